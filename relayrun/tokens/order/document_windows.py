"""Windows that never cross a document, addressed by number: `order: document-window`.

A document of n tokens is cut into pieces of at most c tokens that overlap by v, where c is the window without BOS and
EOS: one piece if n <= c, else ceil((n - v) / (c - v)), of which number j begins at token j (c - v). Windows are
numbered through the documents and shards of a data set, in the manifest's order. (Hugging Face calls the overlap
`stride`; elsewhere a stride is the step c - v.)

A table keeps the number of windows before every 128th document: 8 bytes, so 62 MB for 10^9 documents. Lengths of the
documents between are read from the .idx on demand (512 bytes). Opening reads all lengths once, 4 bytes a document. A
"document" is a sequence of the .idx; an empty one has no window.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from relayrun.errors import FatalTrainingError
from relayrun.tokens.order.datasets import MAX_OPEN_FILES, IndexFile, SampleSegment, WindowDataset
from relayrun.tokens.order.remote_shards import BlockCache
from relayrun.tokens.shards.manifest import DatasetManifest

DOCUMENTS_PER_BLOCK = 128
"""Documents between two entries of the table."""
_DOCUMENTS_READ_AT_ONCE = DOCUMENTS_PER_BLOCK << 13  # number of lengths for one read


@dataclass(frozen=True, kw_only=True)
class DocumentCut:
    """The cut of documents into windows."""

    window: int
    """Tokens of a window, with BOS and EOS."""
    overlap: int = 0
    """Tokens of a document that a window shares with the window before it."""
    bos: int | None = None
    """Id before every window; None: none."""
    eos: int | None = None
    """Id behind every window; None: none."""
    drop_end: int | None = None
    """Id at the end of documents in the shards that windows leave out; None: documents are used unchanged."""

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < self.content:
            raise ValueError(f"an overlap of {self.overlap} does not fit windows with {self.content} tokens of text")

    @property
    def specials(self) -> int:
        """Number of tokens that are added to a piece: BOS and EOS."""
        return (self.bos is not None) + (self.eos is not None)

    @property
    def content(self) -> int:
        """Maximum tokens of a document in a window."""
        return self.window - self.specials

    @property
    def step(self) -> int:
        """Distance of the starts of adjacent windows of a document."""
        return self.content - self.overlap

    def tokens(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the tokens of documents that are used, int64 [documents], from their lengths in the shard."""
        tokens = lengths.astype(np.int64)
        return tokens if self.drop_end is None else np.maximum(tokens - 1, 0)

    def windows(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of windows of documents with `tokens` tokens, int64 [documents]."""
        rest = tokens - self.overlap
        return np.asarray(np.where(tokens > 0, np.maximum(1, -(-rest // self.step)), 0), np.int64)

    def sizes(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the tokens of every window of these documents, with BOS and EOS; int64 [windows]."""
        counts = self.windows(tokens)
        ends = np.cumsum(counts)
        numbers = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        sizes = np.minimum(self.content, np.repeat(tokens, counts) - numbers * self.step) + self.specials
        return np.asarray(sizes, np.int64)

    def frame(self, text: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the window of a piece of a document: with BOS and EOS."""
        window = np.empty(len(text) + self.specials, text.dtype)
        first = int(self.bos is not None)
        window[first : first + len(text)] = text
        if self.bos is not None:
            window[0] = self.bos
        if self.eos is not None:
            window[-1] = self.eos
        return window


class DocumentWindows:
    """The windows of a data set. Thread-safe; holds at most 2 x `MAX_OPEN_FILES` files open."""

    def __init__(self, manifest: DatasetManifest, cut: DocumentCut, *, blocks: BlockCache | None = None) -> None:
        """Read the lengths of all documents. Raises InputError if a shard is missing or was truncated."""
        self.manifest = manifest
        self.cut = cut
        self._stream = WindowDataset(manifest, 1, blocks=blocks)
        self._file = lru_cache(MAX_OPEN_FILES)(lambda number: IndexFile(manifest.shards[number], blocks))
        self._tables = [self._table(number) for number in range(len(manifest.shards))]
        self._starts = list(accumulate((int(table[-1]) for table in self._tables), initial=0))

    def _table(self, shard: int) -> npt.NDArray[np.int64]:
        """Return the windows of the shard before each block of documents, and in all; int64 [blocks + 1]."""
        index = self._file(shard)
        table = np.zeros(-(-index.sequences // DOCUMENTS_PER_BLOCK) + 1, np.int64)
        for first in range(0, index.sequences, _DOCUMENTS_READ_AT_ONCE):
            counts = self.cut.windows(self.cut.tokens(index.lengths(first, first + _DOCUMENTS_READ_AT_ONCE)))
            blocks = np.add.reduceat(counts, np.arange(0, len(counts), DOCUMENTS_PER_BLOCK))
            table[first // DOCUMENTS_PER_BLOCK + 1 :][: len(blocks)] = blocks
        return np.cumsum(table, out=table)

    def __len__(self) -> int:
        """Windows of the data set."""
        return self._starts[-1]

    def locate(self, i: int) -> tuple[int, SampleSegment, bool]:
        """Return the shard of window i, its part of a document, and whether the document ends with it. Raises
        IndexError outside of 0..len-1, OSError and InputError like `read`."""
        if not 0 <= i < len(self):
            raise IndexError(f"window {i} is outside of range({len(self)})")
        shard = bisect_right(self._starts, i) - 1
        i -= self._starts[shard]
        table, index = self._tables[shard], self._file(shard)
        block = int(np.searchsorted(table, i, side="right")) - 1
        tokens = self.cut.tokens(index.lengths(block * DOCUMENTS_PER_BLOCK, (block + 1) * DOCUMENTS_PER_BLOCK))
        ends = table[block] + np.cumsum(self.cut.windows(tokens))
        at = int(np.searchsorted(ends, i, side="right"))
        before = int(ends[at - 1]) if at else int(table[block])
        offset = (i - before) * self.cut.step
        count = min(self.cut.content, int(tokens[at]) - offset)
        prefix, document = self.manifest.shards[shard].prefix, block * DOCUMENTS_PER_BLOCK + at
        part = SampleSegment(prefix=prefix, document=document, offset=offset, tokens=count)
        return shard, part, offset + count == int(tokens[at])

    def read(self, i: int) -> npt.NDArray[np.int64]:
        """Return the token ids of window i, int64 [at most `cut.window`]. Raises IndexError, InputError if a shard was
        truncated, OSError, and FatalTrainingError if a document does not end with `drop_end`."""
        shard, place, ends = self.locate(i)
        offset = int(self._file(shard).offsets(place.document, place.document + 1)[0])
        itemsize = np.dtype(self.manifest.shards[shard].dtype).itemsize
        start = self._stream.starts[shard] + offset // itemsize + place.offset
        cut, dropped = self.cut, ends and self.cut.drop_end is not None
        text = self._stream.tokens(start, place.tokens + dropped)
        if dropped and text[-1] != cut.drop_end:
            raise FatalTrainingError(
                f"document {place.document} ends with the token id {text[-1]}, not with the end of document "
                f"{cut.drop_end}",
                where=place.prefix + ".bin",
                hint="set drop_eod: false in data.document_window, in a run with another name",
            )
        return cut.frame(text[: place.tokens])

    def sizes(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Return the tokens of the windows first .. end - 1, with BOS and EOS; int64 [end - first]."""
        if not 0 <= first <= end <= len(self):
            raise IndexError(f"windows {first}:{end} are outside of range({len(self)})")
        found = []
        shard = bisect_right(self._starts, first) - 1
        while first < end:
            start, stop = self._starts[shard], min(end, self._starts[shard + 1])
            if stop > first:
                table, index = self._tables[shard], self._file(shard)
                low = int(np.searchsorted(table, first - start, side="right")) - 1
                high = int(np.searchsorted(table, stop - start, side="left"))
                tokens = self.cut.tokens(index.lengths(low * DOCUMENTS_PER_BLOCK, high * DOCUMENTS_PER_BLOCK))
                found.append(self.cut.sizes(tokens)[first - start - int(table[low]) :][: stop - first])
                first = stop
            shard += 1
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def all_sizes(self, each: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the sizes of all windows in order, `each` at a time; the last array may be shorter."""
        step = max(1, (1 << 20) // each) * each
        for first in range(0, len(self), step):
            sizes = self.sizes(first, min(first + step, len(self)))
            for at in range(0, len(sizes), each):
                yield sizes[at : at + each]
