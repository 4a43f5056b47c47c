"""Rows scattered by their keys: buckets on disk, or one in memory.

Every row has a key, a 64-bit hash of the seed, the number of its file, and its number there. A bucket holds the
rows of a range of keys; the rows of bucket 0 in the order of their keys, then those of bucket 1 and so on, are the
shuffle. A part is a run of the input files, scattered by one thread into one file:

    part-3.arrow    segments: the rows of one bucket among those that were in memory at a time, as a message of Arrow
    part-3.npz      where the segments lie; how many rows fell into every bin (a bucket has `BINS`); mean lengths

Parts in their order, segments in theirs, and rows in theirs are in the order of the input, so that a stable sort
gives rows of equal keys one order, whatever the parts and the buckets.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relayrun.errors import RelayrunError
from relayrun.files import whole_file
from relayrun.tokenization.lengths import Lengths
from relayrun.tokenization.rows import RowFile, read_rows, texts, wide

_KEY = pa.field("__relayrun_key", pa.uint64(), nullable=False)
BINS = 64
"""Of a bucket: it is read in up to so many pieces where it turns out to be larger than expected."""


def keys(seed: int, file: int, rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The keys of these rows of file number `file`: two rounds of the splitmix64 finaliser (Steele et al., 2014)."""
    start = np.random.SeedSequence([seed, file]).generate_state(1, np.uint64)[0]
    mixed = rows * np.uint64(0x9E3779B97F4A7C15) + start
    for _ in range(2):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.asarray(mixed, np.uint64)


def keyed_schema(schema: pa.Schema) -> pa.Schema:
    """Of the rows of files of this schema, while they are moved."""
    return wide(schema).append(_KEY)


def keyed(files: Iterable[tuple[int, RowFile]], column: str, seed: int, lengths: Lengths) -> Iterator[pa.Table]:
    """The rows of these files and their numbers, in pieces, with their keys; notes the lengths of the texts."""
    for number, file in files:
        row = 0
        for table in read_rows(file, column):
            lengths.add(texts(table, column))
            rows = np.arange(row, row + len(table), dtype=np.uint64)
            row += len(table)
            yield table.append_column(_KEY, pa.array(keys(seed, number, rows)))


def scatter(tables: Iterable[pa.Table], stem: Path, buckets: int, most: int, lengths: Lengths) -> Iterator[None]:
    """Write the part `stem` (.arrow, .npz) with the rows of `tables`, of which about `most` bytes are kept in memory.

    Yields after every table. Both files come whole, the .npz last: a part that has one is done.
    """
    segments: list[tuple[int, int, int]] = []
    counts = np.zeros(buckets * BINS, np.int64)
    waiting: list[pa.Table] = []
    size = 0
    with whole_file(stem.with_suffix(".arrow")) as temporary, pa.OSFile(str(temporary), "wb") as sink:
        for table in tables:
            waiting.append(table)
            size += table.nbytes
            del table
            if size > most:
                counts += _write_segments(waiting, sink, buckets, segments)
                size = 0
            yield
        counts += _write_segments(waiting, sink, buckets, segments)
    with whole_file(stem.with_suffix(".npz")) as temporary, open(temporary, "wb") as file:
        np.savez(file, segments=np.array(segments, np.int64).reshape(-1, 3), counts=counts, lengths=lengths.array())


def _write_segments(
    waiting: list[pa.Table], sink: pa.NativeFile, buckets: int, segments: list[tuple[int, int, int]]
) -> npt.NDArray[np.int64]:
    """Write the rows that wait, sorted by bucket, and empty the list; return their number in every bin."""
    if not waiting:
        return np.zeros(buckets * BINS, np.int64)
    table = pa.concat_tables(waiting).combine_chunks()
    waiting.clear()
    bins = _bins(table, buckets)
    order = np.argsort(bins // BINS, kind="stable")
    bounds = np.searchsorted(bins[order] // BINS, np.arange(buckets + 1))
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        for batch in table.take(order[bounds[number] : bounds[number + 1]]).to_batches():
            start = sink.tell()
            sink.write(batch.serialize())
            segments.append((number, start, sink.tell() - start))
    return np.bincount(bins, minlength=buckets * BINS)


def _bins(table: pa.Table, buckets: int) -> npt.NDArray[np.int64]:
    upper = table[_KEY.name].to_numpy() >> np.uint64(32)
    return np.asarray(upper * np.uint64(buckets * BINS) >> np.uint64(32), np.int64)


class SortedRows:
    """Rows in memory, in the order of their keys; rows of equal keys in the order in which they came."""

    def __init__(self, tables: Sequence[pa.Table], schema: pa.Schema) -> None:
        """Of `tables` with the columns of `keyed_schema`."""
        table = pa.concat_tables([schema.empty_table(), *tables])
        self._order = np.argsort(table[_KEY.name].to_numpy(), kind="stable")
        self._table = table.drop_columns([_KEY.name]).combine_chunks()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def size(self) -> int:
        return int(self._table.nbytes)

    def take(self, start: int, stop: int) -> pa.Table:
        return self._table.take(self._order[start:stop])


class Buckets(Protocol):
    """Where sorted rows come from, bucket by bucket."""

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Rows of every bucket."""

    @property
    def size(self) -> int:
        """Bytes of all rows."""

    def load(self, number: int) -> SortedRows: ...


@dataclass
class InMemory:
    """All rows as one bucket."""

    rows: SortedRows

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return np.array([len(self.rows)], np.int64)

    @property
    def size(self) -> int:
        return self.rows.size

    def load(self, number: int) -> SortedRows:
        return self.rows


class OnDisk:
    """The buckets of all parts."""

    def __init__(self, stems: Sequence[Path], schema: pa.Schema) -> None:
        self._files = [stem.with_suffix(".arrow") for stem in stems]
        self._schema = keyed_schema(schema)
        segments, bins, self.before = [], np.zeros(0, np.int64), []
        for part, stem in enumerate(stems):
            with np.load(stem.with_suffix(".npz")) as found:
                segments.append(np.insert(found["segments"], 0, part, axis=1))
                bins = found["counts"] + (bins if part else 0)
                self.before.append(found["lengths"])
        found = np.concatenate(segments)
        found = found[np.argsort(found[:, 1], kind="stable")]
        self._buckets = bins.size // BINS
        self._bounds = np.searchsorted(found[:, 1], np.arange(self._buckets + 1))
        self._segments = found[:, [0, 2, 3]]
        self.size = int(found[:, 3].sum())
        self._largest = int(np.bincount(found[:, 1], found[:, 3], self._buckets).max())
        self._bins, self._pieces = bins, 1

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return np.asarray(self._bins.reshape(-1, BINS // self._pieces).sum(axis=1), np.int64)

    def split(self, most: int) -> None:
        """Count a bucket as several from now on, where the largest one holds more than `most` bytes."""
        self._pieces = next((each for each in (1, 2, 4, 8, 16, 32) if self._largest <= most * each), BINS)

    def load(self, number: int) -> SortedRows:
        bucket, piece = divmod(number, self._pieces)
        segments = self._segments[self._bounds[bucket] : self._bounds[bucket + 1]].tolist()
        if self._pieces == 1:
            return SortedRows(self._read(segments), self._schema)
        first = (bucket * self._pieces + piece) * (BINS // self._pieces)
        tables = []
        for segment in segments:  # one by one: together they are too many
            (table,) = self._read([segment])
            bins = _bins(table, self._buckets)
            tables.append(table.filter(pa.array((first <= bins) & (bins < first + BINS // self._pieces))))
        return SortedRows(tables, self._schema)

    def _read(self, segments: Sequence[tuple[int, int, int]]) -> list[pa.Table]:
        buffer = pa.allocate_buffer(sum(length for _, _, length in segments))
        view, tables, at = memoryview(buffer), [], 0
        with contextlib.ExitStack() as stack, _reading():
            files = {part: stack.enter_context(open(self._files[part], "rb", buffering=0))
                     for part in {part for part, _, _ in segments}}  # fmt: skip
            for part, start, length in segments:
                _read_at(files[part], start, view[at : at + length])
                batch = pa.ipc.read_record_batch(buffer.slice(at, length), self._schema)
                tables.append(pa.Table.from_batches([batch]))
                at += length
        return tables


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        where = getattr(error, "filename", None)
        raise RelayrunError(f"cannot be read back: {error.strerror or error}", where=where, hint="run again") from None


def _read_at(file: io.FileIO, start: int, view: memoryview) -> None:
    while view:  # one call reads 2 GiB at most
        if not (read := os.preadv(file.fileno(), [view], start)):
            raise OSError(errno.EIO, "shorter than it was written", file.name)
        view, start = view[read:], start + read
