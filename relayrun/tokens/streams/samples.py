"""The texts of a lane's block as samples: encoded with the run's tokenizer, cut into windows, packed into rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relayrun.config.sections.data import DocumentWindowSection
from relayrun.tokens.order.document_packing import document_cut, fill_row, pack_rows
from relayrun.tokens.order.document_windows import DocumentCut
from relayrun.tokens.order.sample_rows import SampleRow
from relayrun.tokens.readers.columns import sample_texts
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.shards.manifest import Manifest, TextFileEntry
from relayrun.tokens.streams.run_tokenizer import load_run_tokenizer
from relayrun.tokens.tokenize.encode.engines import EngineSelection, select_engine
from relayrun.tokens.tokenize.encode.libraries import Encoded, Engine
from relayrun.tokens.tokenize.encode.tokenizer import DocumentFraming, load_definition

log = logging.getLogger(__name__)

PROOF_BYTES = 200_000
"""Bytes of the data set's text on which a fast engine must prove that it is exact."""


class StreamEncoder:
    """Encodes texts with the fastest exact engine. The first call loads the tokenizer and proves the engine."""

    def __init__(self, tokenizer: str, manifest: Manifest, files: Sequence[TextFileEntry], column: str) -> None:
        """`tokenizer` is the setting data.tokenizer; the proof reads `column` of `files`."""
        self._name = tokenizer
        self._manifest = manifest
        self._paths = tuple(file.path for file in files)
        self._column = column

    def __call__(self, texts: PackedTexts) -> Encoded:
        """Return the ids of all texts, and the number of each. Raises FatalTrainingError for a changed tokenizer."""
        return self._engine.encode(texts)

    @cached_property
    def _engine(self) -> Engine:
        definition = load_run_tokenizer(self._name, self._manifest).definition
        return _proven_engine(definition, self._column, self._paths).build(definition)


@lru_cache
def _proven_engine(definition: str, column: str, paths: tuple[str, ...]) -> EngineSelection:
    """Return the engine for a tokenizer, proven on these files once in this process."""
    texts = sample_texts(column, [*paths], most_bytes=PROOF_BYTES)
    return select_engine("auto", partial(load_definition, definition), texts, log.warning, definition=definition)


EncodeFunction = Callable[[PackedTexts], Encoded]
"""Maps texts to their ids and the number of ids of each text."""
ENCODE_BATCH_BYTES = 4_000_000
"""Target bytes of a call of an engine, whose fixed cost equals encoding 50 kB."""
_MAX_TEXT_BYTES = 2 * ENCODE_BATCH_BYTES
"""Maximum bytes of a call: the texts of one lane can exceed `ENCODE_BATCH_BYTES`."""
_BATCH_TEXTS = 10_000


@dataclass(frozen=True, kw_only=True)
class SampleShape:
    """The shape of a stream's samples."""

    seq_length: int
    eod: int | None
    """Id behind every document; None: none."""
    padding: int
    """Id that fills a row."""
    cut: DocumentCut | None = None
    """Cut of documents into windows; None: a plain sequence of tokens (`order: window`)."""
    settings: DocumentWindowSection = field(default_factory=DocumentWindowSection)
    """Packing of windows into rows."""

    @classmethod
    def from_settings(
        cls,
        settings: DocumentWindowSection | None,
        *,
        seq_length: int,
        eod: int | None,
        vocabulary_size: int,
        where: str,
    ) -> SampleShape:
        """Return the shape for `document_window`; None: `order: window`. Raises ConfigError like `document_cut`."""
        if settings is None:
            return cls(seq_length=seq_length, eod=eod, padding=eod or 0)
        cut = document_cut(settings, seq_length=seq_length, eod=eod, vocabulary_size=vocabulary_size, where=where)
        return cls(
            seq_length=seq_length,
            eod=None if settings.drop_eod or cut.eos == eod else eod,  # a window that ends with it gets no second one
            padding=eod or 0,
            cut=replace(cut, drop_end=None),  # the framing leaves it away
            settings=settings,
        )


class LaneSamples:
    """The samples of a lane's block, as far as its texts are encoded."""

    def __init__(self, shape: SampleShape, place: tuple[int, ...] = (0, 0, 0, 0)) -> None:
        """Nobody asks for samples before `place`: the fields of a `LaneCursor` from `taken` to `empty_before`."""
        self.start = place
        self._shape, self._rows, self._latest = shape, place[0], place[0] - 1
        self.places = {place[0]: place}
        """The places between samples, by the samples that were taken."""
        self._begin, self.empty = place[2:]
        """Number of the first id that is kept: those of earlier samples are dropped. Skipped texts without a token."""
        self._ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._documents = np.empty((0, 4), np.int64)
        """Row in the lane's share, first id, the one behind the last, and texts before it without a token."""

    def add(
        self, ids: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], *, last: bool
    ) -> None:
        """Add `ids` of the next texts, the number of ids of each, and its row in the lane's share. Windows of documents
        come all at once."""
        shape, there = self._shape, np.flatnonzero(lengths)
        framing = DocumentFraming(bos_id=None, eod_id=shape.eod, dtype="int32", keep_empty=False)
        dropped = min(len(self._ids), max(0, self._latest * shape.seq_length - self._begin)) if shape.cut is None else 0
        kept = self._ids[dropped:]

        def room(count: int) -> npt.NDArray[np.int32]:
            self._ids = np.empty(len(kept) + count, np.int32)
            self._ids[: len(kept)] = kept
            return self._ids[len(kept) :]

        _, sizes = framing.apply(ids, lengths, room)
        self._begin += dropped
        ends = self._begin + len(kept) + np.cumsum(sizes)
        more = np.stack([rows[there], ends - sizes, ends, self.empty + there - np.arange(len(there))], axis=1)
        self._documents = np.concatenate([self._documents[self._documents[:, 2] > self._begin], more])
        self.empty += len(lengths) - len(there)
        if shape.cut is None:
            inputs = max(0, self._begin + len(self._ids) - 1)
            before, self._rows = self._rows, -(-inputs // shape.seq_length) if last else inputs // shape.seq_length
            taken = np.arange(before + 1, self._rows + 1)
            found = np.searchsorted(self._documents[:, 2], taken * shape.seq_length, side="right")
            places = self._documents[np.minimum(found, len(self._documents) - 1)][:, [0, 1, 3]].tolist()
            self.places |= {number: (number, *place) for number, place in zip(taken.tolist(), places, strict=True)}
            return
        counts = shape.cut.windows(sizes)
        self._window_document = np.repeat(np.arange(len(sizes)), counts)
        self._window_start = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * shape.cut.step
        self._window_size = shape.cut.sizes(sizes)
        self._pieces = pack_rows(self._window_size, shape.seq_length, shape.settings.packing)
        self._rows = len(self._pieces)
        self.places |= {taken: (taken, 0, 0, 0) for taken in range(self._rows + 1)}

    @property
    def left(self) -> int:
        """Samples that were not asked for."""
        return self._rows - self._latest - 1

    def __len__(self) -> int:
        return self._rows

    def row(self, i: int) -> SampleRow:
        """Return sample `i` of the block."""
        shape, self._latest = self._shape, i
        if shape.cut is None:
            begin = i * shape.seq_length - self._begin
            end = begin + shape.seq_length
            if end < len(self._ids):  # every input has its target
                return SampleRow(tokens=self._ids[begin : end + 1])
            pieces = [(self._ids, begin, min(end, len(self._ids)))]
        else:
            pieces = [(self._window(window), start, stop) for window, start, stop in self._pieces[i]]
        return fill_row(
            pieces,
            seq_length=shape.seq_length,
            padding=shape.padding,
            with_lengths=shape.cut is not None and shape.settings.packs,
            mask_end=shape.cut is not None and shape.settings.mask_special and shape.cut.eos is not None,
        )

    def origins(self, i: int) -> list[tuple[int, int, int]]:
        """Return the parts of sample `i`: row in the lane's share, first token in its text, number of tokens."""
        cut = self._shape.cut
        found: list[tuple[int, int, int]] = []  # document, and the range of its tokens among all ids
        if cut is None:
            begin = i * self._shape.seq_length
            end = begin + self._shape.seq_length
            begins, ends = np.maximum(begin, self._documents[:, 1]), np.minimum(end, self._documents[:, 2])
            documents = np.flatnonzero(begins < ends)
            found += zip(documents.tolist(), begins[documents].tolist(), ends[documents].tolist(), strict=True)
        for window, start, stop in self._pieces[i] if cut is not None else ():
            document, base, count = self._locate(window)
            before = int(cut is not None and cut.bos is not None)
            low, high = max(start - before, 0), min(stop - before, count)
            if high > low:
                found.append((document, base + low, base + high))
        of = self._documents[:, :2].tolist()
        return [(of[n][0], begin - of[n][1], end - begin) for n, begin, end in found]

    def _locate(self, window: int) -> tuple[int, int, int]:
        """Return document, first id and number of ids of a window."""
        assert self._shape.cut is not None
        document = int(self._window_document[window])
        first = int(self._documents[document, 1]) + int(self._window_start[window])
        return document, first, int(self._window_size[window]) - self._shape.cut.specials

    def _window(self, number: int) -> npt.NDArray[np.int32]:
        cut = self._shape.cut
        assert cut is not None
        _, first, count = self._locate(number)
        return cut.frame(self._ids[first : first + count])


def encode_texts(parts: Sequence[pa.ChunkedArray], encode: EncodeFunction) -> list[Encoded]:
    """Encode several arrays of texts (large_string without nulls) together; return a result for each array."""
    chunks = [chunk for part in parts for chunk in part.chunks]
    texts = PackedTexts.from_arrow(pa.chunked_array(chunks, pa.large_string()).combine_chunks())
    found = [encode(batch) for batch in texts.split(_MAX_TEXT_BYTES, _BATCH_TEXTS)]
    ids = np.concatenate([np.empty(0, np.uint32), *(each for each, _ in found)]) if len(found) != 1 else found[0][0]
    lengths = np.concatenate([np.empty(0, np.int64), *(each for _, each in found)])
    ends = np.cumsum([len(part) for part in parts])[:-1]
    tokens = np.concatenate([[0], np.cumsum(lengths)])[ends]
    return list(zip(np.split(ids, tokens), np.split(lengths, ends), strict=True))
