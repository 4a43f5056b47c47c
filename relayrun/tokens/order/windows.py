"""Fixed windows over the shards of a data set, read straight from the .bin files, without an index.

All shards in manifest order are one stream of tokens. Window i is the tokens
[i * seq_length, (i + 1) * seq_length], both ends included: seq_length inputs and, one further, as many
labels. Neighbours share one token, as in Megatron's GPTDataset, so over one epoch every token but the
first is a label exactly once; only the last (tokens - 1) % seq_length tokens are left out.

Windows cross the borders of documents and of shards. Shards are an accident of how many workers
tokenized; cutting at them would drop up to a window for each, and change the samples with the split.

Files are read with `pread`, not mapped: memory does not grow with what was read, and a shard that
was truncated is an error that names it, where a map would end the process with SIGBUS.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from relayrun.errors import InputError
from relayrun.tokens.order.block_cache import BlockCache
from relayrun.tokens.order.shard_bytes import open_shard_file
from relayrun.tokens.shards.indexed import INDEX_HEADER, Shard
from relayrun.tokens.shards.manifest import DatasetManifest, ShardEntry
from relayrun.tokens.stores.stores import is_url

MAX_OPEN_FILES = 128
"""Shards of one data set that are held open; many systems allow a process 1,024 files in all."""


class WindowDataset:
    """Windows of `seq_length` + 1 tokens. Thread-safe; holds at most `open_files` files open."""

    def __init__(
        self,
        manifest: DatasetManifest,
        seq_length: int,
        *,
        open_files: int = MAX_OPEN_FILES,
        blocks: BlockCache | None = None,
    ) -> None:
        """`blocks`: the cache for shards below URLs; without any there may be none of these."""
        if seq_length < 1:
            raise ValueError(f"seq_length must be positive, not {seq_length}")
        self.manifest = manifest
        self.seq_length = seq_length
        self._starts = list(accumulate((shard.tokens for shard in manifest.shards), initial=0))
        self._file = lru_cache(open_files)(partial(_open_bin_file, manifest.shards, blocks))
        self._blocks = blocks

    def __len__(self) -> int:
        """Windows in one epoch."""
        return max(0, self._starts[-1] - 1) // self.seq_length

    def read(self, i: int) -> npt.NDArray[np.int64]:
        """Token ids of window i, int64 [seq_length + 1].

        Raises IndexError outside of 0..len-1, InputError if a shard has become shorter, OSError if it
        cannot be read.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"window {i} is outside of range({len(self)})")
        return self.tokens(i * self.seq_length, self.seq_length + 1)

    def tokens(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """`count` tokens of the stream from token `start` on, int64. Errors as `read`; the range must exist."""
        result = np.empty(count, dtype=np.int64)
        shard = bisect_right(self._starts, start) - 1
        filled = 0
        while filled < count:
            within = start + filled - self._starts[shard]
            part = min(count - filled, self._starts[shard + 1] - self._starts[shard] - within)
            if part:
                result[filled : filled + part] = self._file(shard).read(within, part)
            filled += part
            shard += 1
        return result

    def origins(self, i: int) -> list[DocumentOrigin]:
        """Where the tokens of window i come from, in order. Reads a few pages of an .idx for each shard."""
        if not 0 <= i < len(self):
            raise IndexError(f"window {i} is outside of range({len(self)})")
        found = []
        at, end = i * self.seq_length, (i + 1) * self.seq_length + 1
        while at < end:
            number = bisect_right(self._starts, at) - 1
            entry = self.manifest.shards[number]
            itemsize = np.dtype(entry.dtype).itemsize
            offsets = _sequence_offsets(entry, self._blocks)
            within = at - self._starts[number]
            document = int(np.searchsorted(offsets, within * itemsize, side="right")) - 1
            stop = int(offsets[document + 1]) // itemsize if document + 1 < len(offsets) else entry.tokens
            count = min(end - at, stop - within)
            found.append(
                DocumentOrigin(
                    prefix=entry.prefix,
                    document=document,
                    tokens=count,
                    offset=within - int(offsets[document]) // itemsize,
                )
            )
            at += count
        return found


@dataclass(frozen=True, kw_only=True)
class DocumentOrigin:
    """A piece of a sample: `tokens` tokens of one document of one shard, from token `offset` of it on."""

    prefix: str
    document: int
    offset: int
    tokens: int


class _BinFile:
    """An open .bin."""

    def __init__(self, shard: ShardEntry, blocks: BlockCache | None) -> None:
        self._path = shard.prefix + ".bin"
        self._dtype = np.dtype(shard.dtype).newbyteorder("<")
        self._bytes = open_shard_file(self._path, shard.bin_bytes, shard.fingerprint, blocks)

    def read(self, start: int, count: int) -> npt.NDArray[np.generic]:
        size = count * self._dtype.itemsize
        data = self._bytes.pread(size, start * self._dtype.itemsize)
        if len(data) != size:
            raise InputError(
                f"token file has become shorter: no token {start + len(data) // self._dtype.itemsize}",
                where=self._path,
                hint="put the shard back as it was",
            )
        return np.frombuffer(data, dtype=self._dtype)


def _open_bin_file(shards: tuple[ShardEntry, ...], blocks: BlockCache | None, number: int) -> _BinFile:
    return _BinFile(shards[number], blocks)


def _sequence_offsets(shard: ShardEntry, blocks: BlockCache | None) -> npt.NDArray[np.int64]:
    """Byte offset of each sequence of a shard in its .bin."""
    if not is_url(shard.prefix):
        return Shard.open(shard.prefix).offsets()
    index = open_shard_file(shard.prefix + ".idx", shard.idx_bytes, shard.fingerprint, blocks)
    sequences = INDEX_HEADER.unpack(index.pread(INDEX_HEADER.size, 0))[3]
    return np.frombuffer(index.pread(8 * sequences, INDEX_HEADER.size + 4 * sequences), "<i8")
