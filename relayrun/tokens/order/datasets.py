"""Data sets with numbered samples: the protocol `Dataset`, fixed windows, mock data and validation sets.

    epoch, i = divmod(k, windows_per_epoch)
    window   = Permutation(windows_per_epoch, key(seed, name, epoch))(i)

`order: window` is `WindowOrder` over `WindowDataset`: all shards in manifest order are one sequence of tokens, and
window i is the tokens [i * seq_length, (i + 1) * seq_length], both ends included. Neighbours share one token, as in
Megatron's GPTDataset. Windows cross the borders of documents and shards. Files are read with `pread`: a truncated shard
raises an error with its name, where a memory map would end the process with SIGBUS.

A user's own callable gets a `DatasetSpec` and returns a `Dataset`. Samples do not depend on ranks, workers or batch
sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from relayrun.errors import ConfigError, InputError
from relayrun.tokens.order.permutation import epoch_permutations
from relayrun.tokens.order.remote_shards import BlockCache, open_cached_shard_file
from relayrun.tokens.order.sample_rows import SampleRow, read_row
from relayrun.tokens.shards.manifest import DatasetManifest, ShardEntry
from relayrun.tokens.shards.shard import INDEX_HEADER, Shard
from relayrun.tokens.stores.urls import is_url


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Arguments of a callable that makes a data set."""

    name: str
    """Identity of the data set."""
    seed: int
    seq_length: int
    manifest: DatasetManifest
    """Shards of the data set; empty if the mixture gives no path."""
    split: float = 0.0
    """Held-out share of the data set, at its end; see `side_of_split`."""
    cache_dir: str | None = None
    opening: str | None = None
    """Identifies an attempt, whose ranks open the data set together; None: no other process opens it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the data set's entry in the mixture."""


MAX_OPEN_FILES = 128
"""Open shards of a data set; many systems allow 1,024 open files for a process."""


class WindowDataset:
    """Windows of `seq_length` + 1 tokens. Thread-safe; holds at most `MAX_OPEN_FILES` files open."""

    def __init__(self, manifest: DatasetManifest, seq_length: int, *, blocks: BlockCache | None = None) -> None:
        """`blocks` is the cache for shards below URLs; without it all shards must be local."""
        if seq_length < 1:
            raise ValueError(f"seq_length must be positive, not {seq_length}")
        self.manifest = manifest
        self.seq_length = seq_length
        self.starts = list(accumulate((shard.tokens for shard in manifest.shards), initial=0))
        self._file = lru_cache(MAX_OPEN_FILES)(lambda number: _BinFile(manifest.shards[number], blocks))
        self._blocks = blocks

    def __len__(self) -> int:
        """Windows in an epoch."""
        return max(0, self.starts[-1] - 1) // self.seq_length

    def read(self, i: int) -> npt.NDArray[np.int64]:
        """Return window i, int64 [seq_length + 1]. Raises IndexError, InputError for a truncated shard, OSError."""
        if not 0 <= i < len(self):
            raise IndexError(f"window {i} is outside of range({len(self)})")
        return self.tokens(i * self.seq_length, self.seq_length + 1)

    def tokens(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return `count` tokens from token `start` on, int64. Raises like `read`; the range must exist."""
        result = np.empty(count, dtype=np.int64)
        shard = bisect_right(self.starts, start) - 1
        filled = 0
        while filled < count:
            within = start + filled - self.starts[shard]
            part = min(count - filled, self.starts[shard + 1] - self.starts[shard] - within)
            if part:
                result[filled : filled + part] = self._file(shard).read(within, part)
            filled += part
            shard += 1
        return result

    def origins(self, i: int) -> list[SampleSegment]:
        """Return the origins of the tokens of window i, in order. Reads a few pages of an .idx for each shard."""
        if not 0 <= i < len(self):
            raise IndexError(f"window {i} is outside of range({len(self)})")
        found = []
        at, end = i * self.seq_length, (i + 1) * self.seq_length + 1
        while at < end:
            number = bisect_right(self.starts, at) - 1
            entry = self.manifest.shards[number]
            itemsize = np.dtype(entry.dtype).itemsize
            index = IndexFile(entry, self._blocks)
            offsets = index.offsets(0, index.sequences)
            within = entry.first_token + at - self.starts[number]
            document = int(np.searchsorted(offsets, within * itemsize, side="right")) - 1
            following = (offsets[document + 1 : document + 2] // itemsize).tolist()
            stop = min([entry.first_token + entry.tokens, *following])
            count, offset = min(end - at, stop - within), within - int(offsets[document]) // itemsize
            found.append(SampleSegment(prefix=entry.prefix, document=document, offset=offset, tokens=count))
            at += count
        return found


@dataclass(frozen=True, kw_only=True)
class SampleSegment:
    """A part of a sample: `tokens` tokens of a document of a shard, starting at token `offset`."""

    prefix: str
    document: int
    offset: int
    tokens: int


class _BinFile:
    def __init__(self, shard: ShardEntry, blocks: BlockCache | None) -> None:
        self._path = shard.prefix + ".bin"
        self._dtype = np.dtype(shard.dtype).newbyteorder("<")
        self._bytes = open_cached_shard_file(self._path, shard.bin_bytes, shard.fingerprint, blocks)
        self._first = shard.first_token

    def read(self, start: int, count: int) -> npt.NDArray[np.generic]:
        start += self._first
        size = count * self._dtype.itemsize
        data = self._bytes.pread(size, start * self._dtype.itemsize)
        if len(data) != size:
            words = f"token file has become shorter: no token {start + len(data) // self._dtype.itemsize}"
            raise InputError(words, where=self._path, hint="put the shard back as it was")
        return np.frombuffer(data, dtype=self._dtype)


class IndexFile:
    """The .idx of a shard, local or below a URL, read on demand."""

    def __init__(self, shard: ShardEntry, blocks: BlockCache | None) -> None:
        """Raises InputError for an index that is missing or was truncated."""
        if not is_url(shard.prefix):
            Shard.open(shard.prefix)  # checks the index with clear errors
        self._path = shard.prefix + ".idx"
        self._bytes = open_cached_shard_file(self._path, shard.idx_bytes, shard.fingerprint, blocks)
        self.sequences: int = INDEX_HEADER.unpack(self._read(INDEX_HEADER.size, 0))[3]
        self._documents = shard.documents

    def lengths(self, first: int, end: int) -> npt.NDArray[np.int32]:
        """Return the tokens of the sequences first .. end - 1, fewer at the end of the index."""
        end = min(end, self.sequences)
        return np.frombuffer(self._read(4 * (end - first), INDEX_HEADER.size + 4 * first), "<i4")

    def offsets(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Return the byte offsets in the .bin of the sequences first .. end - 1."""
        return np.frombuffer(self._read(8 * (end - first), INDEX_HEADER.size + 4 * self.sequences + 8 * first), "<i8")

    def document_starts(self) -> npt.NDArray[np.int64]:
        """Return the tokens before each document."""
        bounds = np.frombuffer(self._read(8 * self._documents, INDEX_HEADER.size + 12 * self.sequences), "<i8")
        ends = np.cumsum(self.lengths(0, self.sequences), dtype=np.int64)
        starts: npt.NDArray[np.int64] = np.append(np.int64(0), ends)[bounds]
        return starts

    def _read(self, size: int, at: int) -> bytes:
        data = self._bytes.pread(size, at)
        if len(data) != size:
            raise InputError("index has become shorter", where=self._path, hint="put the shard back as it was")
        return data


MOCK_WINDOWS = 1 << 20
"""Windows of an epoch."""


class MockDataset:
    """A `Dataset` without files: a pure function of (seed, epoch, i)."""

    def __init__(self, source: DatasetSpec) -> None:
        self._seed = source.seed
        self._tokens = source.seq_length + 1
        self._vocabulary_size = int(source.options["vocabulary_size"])

    def __len__(self) -> int:
        return MOCK_WINDOWS

    def read(self, epoch: int, i: int) -> npt.NDArray[np.int64]:
        """Return token ids, int64 [seq_length + 1]."""
        first = int(np.random.SeedSequence((self._seed, epoch, i)).generate_state(1, np.uint64)[0])
        return (first % self._vocabulary_size + np.arange(self._tokens, dtype=np.int64)) % self._vocabulary_size


class Dataset(Protocol):
    """A data set of a mixture. The data set determines the order inside an epoch; epochs continue without end.

    The same (epoch, i) must give the same sample in every process and after every start. Several threads may read at
    once. An optional method `row(epoch, i)` returns a `relayrun.tokens.order.sample_rows.SampleRow`.
    """

    def __len__(self) -> int:
        """Windows in an epoch, equal in all epochs."""

    def read(self, epoch: int, i: int) -> npt.NDArray[np.int64]:
        """Return the token ids, int64 [seq_length + 1], of window i, 0 <= i < len, of epoch 0, 1, ..."""


class WindowOrder:
    """The samples of a data set in order; sample k is any k >= 0, epoch follows epoch.

    `name` separates the shuffles of data sets that share a seed. `split` and `held_out`: see `side_of_split`. Raises
    ConfigError for less than one window.
    """

    def __init__(
        self,
        manifest: DatasetManifest,
        *,
        seq_length: int,
        seed: int,
        name: str = "train",
        split: float = 0.0,
        held_out: bool = False,
        blocks: BlockCache | None = None,
    ) -> None:
        if split:
            manifest = side_of_split(manifest, seq_length, split, held_out=held_out, blocks=blocks)
        self.windows = WindowDataset(manifest, seq_length, blocks=blocks)
        self.windows_per_epoch = len(self.windows)
        if not self.windows_per_epoch:
            raise ConfigError(
                f"the data set {name!r} has {manifest.tokens} tokens, fewer than one sample: "
                f"seq_length {seq_length} needs {seq_length + 1}",
                hint="give more data or a smaller seq_length",
            )
        self._permutation = epoch_permutations(self.windows_per_epoch, seed, name)

    def __len__(self) -> int:
        return self.windows_per_epoch

    def window(self, epoch: int, i: int) -> int:
        """Return the window of `WindowDataset` that is number i of an epoch."""
        if epoch < 0 or not 0 <= i < self.windows_per_epoch:
            raise IndexError(f"epoch {epoch}, window {i}: outside of range({self.windows_per_epoch})")
        return self._permutation(epoch)(i)

    def read(self, epoch: int, i: int) -> npt.NDArray[np.int64]:
        """Return token ids, int64 [seq_length + 1]; inputs are [:-1], labels [1:]."""
        return self.windows.read(self.window(epoch, i))

    def origins(self, epoch: int, i: int) -> list[SampleSegment]:
        """Return the origins of the tokens of a sample: documents and offsets."""
        return self.windows.origins(self.window(epoch, i))


def side_of_split(
    manifest: DatasetManifest, seq_length: int, split: float, *, held_out: bool, blocks: BlockCache | None = None
) -> DatasetManifest:
    """Return the documents that are trained on, the first ones of each shard; or with `held_out` the last documents of
    the data set, which no pass of a mixture trains on. The border is the begin of a document: the nearest one to a
    share `split` of the windows, of one pass. Raises ConfigError if none leaves a window on both sides."""
    shards = manifest.shards
    firsts = [number if shard.pass_of is None else shard.pass_of for number, shard in enumerate(shards)]
    longest: dict[int, ShardEntry] = {}  # a pass may end inside of a shard
    for first, shard in zip(firsts, shards, strict=True):
        longest[first] = max(longest.get(first, shard), shard, key=lambda each: each.tokens)
    *starts, total = accumulate((shard.tokens for shard in longest.values()), initial=0)
    wanted = max(1, round((total - 1) // seq_length * split)) * seq_length
    at = bisect_right(starts, max(0, total - 1 - wanted)) - 1
    begins = {*starts, *(IndexFile([*longest.values()][at], blocks).document_starts() + starts[at]).tolist()}
    fitting = [begin for begin in begins if seq_length < begin < total - seq_length]
    if not fitting:
        words = f"data.split {split} finds no document that leaves a window of {seq_length} tokens on both sides"
        raise ConfigError(words, hint="give more documents or a smaller seq_length, or hold out by path")
    border = min(fitting, key=lambda begin: (abs(total - 1 - wanted - begin), begin))
    kept = {first: max(0, border - start) for first, start in zip(longest, starts, strict=True)}
    parts = [replace(shard, tokens=min(shard.tokens, kept[first])) for first, shard in zip(firsts, shards, strict=True)]
    if held_out:
        whole = [(kept[first], shard) for first, shard in longest.items() if kept[first] < shard.tokens]
        parts = [replace(shard, first_token=first, tokens=shard.tokens - first) for first, shard in whole]
    return DatasetManifest(shards=tuple(parts))


@dataclass(kw_only=True)
class ValidationSet:
    """The samples of a data set in its order; sample k is any k >= 0, epoch follows epoch."""

    name: str
    dataset: Dataset

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self.dataset)

    def row(self, k: int) -> SampleRow:
        """Return sample k with lengths and mask."""
        epoch, i = divmod(k, len(self))
        return read_row(self.dataset, epoch, i)
