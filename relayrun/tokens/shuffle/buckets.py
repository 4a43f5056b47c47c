"""Rows scattered by their keys to buckets on disk, and written to files in the order of the keys.

The key of a row is a 64-bit hash of the seed, the number of its file, and its number there. A bucket holds a range of
keys; the rows of bucket 0 in the order of their keys, then of bucket 1 and so on, are the shuffle. A part is a run of
the input files, which a thread scatters into one file:

    part-3.arrow    segments: rows of one bucket that were in memory at a time, as a message of Arrow
    part-3.npz      offsets of the segments; rows in every bin (`BINS_PER_BUCKET` a bucket); bytes of texts

Parts, segments and rows are each in the order of the input, so that a stable sort gives rows of equal keys one order,
whatever the parts and the buckets. Each output file is a known range of rows, so that threads write files side by side.
All files but the last hold the same number of rows, a whole number of row groups, after which the first file reached
the requested size.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relayrun.errors import InputError, RelayrunError
from relayrun.files import atomic_file
from relayrun.progress import count
from relayrun.tokens.readers.columns import RowFile, narrow_table, read_rows, wide_schema
from relayrun.tokens.readers.faults import LineFaults
from relayrun.tokens.readers.texts import text_column

_KEY = pa.field("__relayrun_key", pa.uint64(), nullable=False)
BINS_PER_BUCKET = 64
"""Pieces, at most, in which a bucket is read if it is larger than expected."""


def row_keys(seed: int, file: int, rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the keys of rows of file number `file`: two rounds of the splitmix64 finaliser (Steele et al., 2014)."""
    start = np.random.SeedSequence([seed, file]).generate_state(1, np.uint64)[0]
    mixed = rows * np.uint64(0x9E3779B97F4A7C15) + start
    for _ in range(2):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.asarray(mixed, np.uint64)


def keyed_rows(
    files: Iterable[tuple[int, RowFile]], column: str, seed: int, faults: LineFaults, cut: RowSplit | None = None
) -> Iterator[pa.Table]:
    """Yield the rows of these numbered files with their keys, batch by batch. Rows that `faults` skips have no number.
    With `cut`, each row of a split text has its own number."""
    for number, file in files:
        row = 0
        for table in read_rows(file, column, faults):
            table = table if cut is None else cut.apply(table, column)
            rows = np.arange(row, row + len(table), dtype=np.uint64)
            row += len(table)
            yield table.append_column(_KEY, pa.array(row_keys(seed, number, rows)))


class BucketSplitter:
    """Splits rows by bucket, about `most` bytes at a time: few steps, and reused memory."""

    def __init__(self, buckets: int, most: int, column: str) -> None:
        self._buckets, self._most, self._column = buckets, most, column
        self._waiting: list[pa.Table] = []
        self._size = 0
        self.counts = np.zeros(buckets * BINS_PER_BUCKET, np.int64)
        """Rows of every bin."""
        self.text_bytes = 0
        """Bytes of the texts of all rows."""

    def add(self, table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
        """Yield numbers of buckets and their rows once enough rows are waiting."""
        self._waiting.append(table)
        self._size += table.nbytes
        self.text_bytes += pc.sum(pc.binary_length(text_column(table, self._column))).as_py() or 0
        del table
        if self._size > self._most:
            yield from self.rest()

    def rest(self) -> Iterator[tuple[int, pa.Table]]:
        """Yield the waiting rows."""
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting).combine_chunks()
        self._waiting.clear()
        self._size = 0
        bins = _row_bins(table, self._buckets)
        self.counts += np.bincount(bins, minlength=self.counts.size)
        order = np.argsort(bins // BINS_PER_BUCKET, kind="stable")
        bounds = np.searchsorted(bins[order] // BINS_PER_BUCKET, np.arange(self._buckets + 1))
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            yield number, table.take(order[bounds[number] : bounds[number + 1]])


def scatter_rows(tables: Iterable[pa.Table], stem: Path, partition: BucketSplitter) -> Iterator[None]:
    """Write the part `stem` (.arrow, .npz) with the rows of `tables`, and yield after every table. Both files appear
    whole, the .npz last: a part with an .npz is done."""
    segments: list[tuple[int, int, int]] = []

    def write(pieces: Iterable[tuple[int, pa.Table]]) -> None:
        for number, piece in pieces:
            for batch in piece.to_batches():
                start = sink.tell()
                sink.write(batch.serialize())
                segments.append((number, start, sink.tell() - start))

    with atomic_file(stem.with_suffix(".arrow")) as temporary, pa.OSFile(str(temporary), "wb") as sink:
        for table in tables:
            write(partition.add(table))
            del table
            yield
        write(partition.rest())
    with atomic_file(stem.with_suffix(".npz")) as temporary, open(temporary, "wb") as file:
        found = np.array(segments, np.int64).reshape(-1, 3)
        np.savez(file, segments=found, counts=partition.counts, text_bytes=partition.text_bytes)


def _row_bins(table: pa.Table, buckets: int) -> npt.NDArray[np.int64]:
    upper = table[_KEY.name].to_numpy() >> np.uint64(32)
    return np.asarray(upper * np.uint64(buckets * BINS_PER_BUCKET) >> np.uint64(32), np.int64)


class SortedRows:
    """Rows in memory in the order of their keys; rows of equal keys in the order of arrival."""

    def __init__(self, tables: Sequence[pa.Table], schema: pa.Schema) -> None:
        table = pa.concat_tables([schema.empty_table(), *tables])
        self._order = np.argsort(table[_KEY.name].to_numpy(), kind="stable")
        self._table = table.drop_columns([_KEY.name]).combine_chunks()

    def __len__(self) -> int:
        return len(self._order)

    def take(self, start: int, stop: int) -> pa.Table:
        return self._table.take(self._order[start:stop])


class Buckets:
    """The buckets of all parts on disk."""

    def __init__(self, stems: Sequence[Path], schema: pa.Schema) -> None:
        self._files = [stem.with_suffix(".arrow") for stem in stems]
        self._schema = wide_schema(schema).append(_KEY)
        segments, bins = [], np.zeros(0, np.int64)
        self.text_bytes = 0
        """Bytes of the texts of all rows."""
        for part, stem in enumerate(stems):
            with np.load(stem.with_suffix(".npz")) as found:
                segments.append(np.insert(found["segments"], 0, part, axis=1))
                bins = found["counts"] + (bins if part else 0)
                self.text_bytes += int(found["text_bytes"])
        found = np.concatenate(segments)
        found = found[np.argsort(found[:, 1], kind="stable")]
        self._buckets = bins.size // BINS_PER_BUCKET
        self._bounds = np.searchsorted(found[:, 1], np.arange(self._buckets + 1))
        self._segments = found[:, [0, 2, 3]]
        self.size = int(found[:, 3].sum())
        """Bytes of all rows."""
        self._largest = int(np.bincount(found[:, 1], found[:, 3], self._buckets).max())
        self._bins, self._pieces = bins, 1

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Rows of every bucket."""
        return np.asarray(self._bins.reshape(-1, BINS_PER_BUCKET // self._pieces).sum(axis=1), np.int64)

    def split(self, most: int) -> None:
        """Count a bucket as several from now on if the largest bucket exceeds `most` bytes."""
        self._pieces = next((each for each in (1, 2, 4, 8, 16, 32) if self._largest <= most * each), BINS_PER_BUCKET)

    def load(self, number: int) -> SortedRows:
        """Read bucket `number` (after `split`: the piece of a bucket) from disk."""
        bucket, piece = divmod(number, self._pieces)
        segments = self._segments[self._bounds[bucket] : self._bounds[bucket + 1]].tolist()
        if self._pieces == 1:
            return SortedRows(self._read(segments), self._schema)
        first = (bucket * self._pieces + piece) * (BINS_PER_BUCKET // self._pieces)
        tables = []
        for segment in segments:  # one by one: together they exceed the memory
            (table,) = self._read([segment])
            bins = _row_bins(table, self._buckets)
            tables.append(table.filter(pa.array((first <= bins) & (bins < first + BINS_PER_BUCKET // self._pieces))))
        return SortedRows(tables, self._schema)

    def _read(self, segments: Sequence[tuple[int, int, int]]) -> list[pa.Table]:
        buffer = pa.allocate_buffer(sum(length for _, _, length in segments))
        view, tables, at = memoryview(buffer), [], 0
        with contextlib.ExitStack() as stack, _explain_read_errors():
            files = {
                part: stack.enter_context(open(self._files[part], "rb", buffering=0))
                for part in {part for part, _, _ in segments}
            }
            for part, start, length in segments:
                _read_at(files[part], start, view[at : at + length])
                batch = pa.ipc.read_record_batch(buffer.slice(at, length), self._schema)
                tables.append(pa.Table.from_batches([batch]))
                at += length
        return tables


@contextlib.contextmanager
def _explain_read_errors() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        where = getattr(error, "filename", None)
        raise RelayrunError(f"cannot be read back: {error.strerror or error}", where=where, hint="run again") from None


def _read_at(file: io.FileIO, start: int, view: memoryview) -> None:
    while view:  # a call reads at most 2 GiB
        if not (read := os.preadv(file.fileno(), [view], start)):
            raise OSError(errno.EIO, "shorter than it was written", file.name)
        view, start = view[read:], start + read


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """Split of a text into rows of at most `size` characters; each row repeats the last `overlap` characters of the
    former.

    A text of n characters is one row if n ≤ size, else ceil((n - overlap) / (size - overlap)), as document windows are.
    Raises InputError if the overlap leaves a row without new text.
    """

    size: int
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError("must be at least 1", where="--split-rows")
        if not 0 <= self.overlap < self.size:
            raise InputError(
                f"must be at least 0 and below the {self.size:,} characters of a row", where="--split-overlap"
            )

    @property
    def growth(self) -> float:
        """Largest size of the rows of a text over the size of the text."""
        return self.size / (self.size - self.overlap)

    def rows(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of rows of texts of these lengths, in characters."""
        step = self.size - self.overlap
        return np.where(lengths <= self.size, 1, -(-(lengths - self.overlap) // step))

    def apply(self, table: pa.Table, column: str) -> pa.Table:
        """Return the rows of a table with split texts; other columns are repeated. `column`: of large_string."""
        texts = table[column].combine_chunks()
        lengths = pc.fill_null(pc.utf8_length(texts), 0).to_numpy(zero_copy_only=False)
        counts = self.rows(lengths)
        if (counts == 1).all():
            return table
        pieces: list[pa.Array] = []
        step, done = self.size - self.overlap, 0
        for row in np.flatnonzero(counts > 1).tolist():
            text = texts[row].as_py()
            pieces.append(texts[done:row])
            starts = range(0, int(counts[row]) * step, step)
            pieces.append(pa.array([text[start : start + self.size] for start in starts], texts.type))
            done = row + 1
        cut = pa.concat_arrays([*pieces, texts[done:]])
        place = table.column_names.index(column)  # dropped below: a whole text, repeated, may take gigabytes
        rest = table.drop_columns([column])
        if rest.num_columns:
            rest = rest.take(np.repeat(np.arange(len(table)), counts))
            return rest.add_column(place, table.schema.field(column), cut)
        return pa.table([cut], table.schema)


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """Format of an output file. `size`: minimum bytes of a file; `row_group_size`: rows of a row group."""

    schema: pa.Schema
    size: int
    row_group_size: int
    compression: str


class ShuffleWriter:
    """Writes files of rows into `folder`. For one thread."""

    def __init__(self, buckets: Buckets, form: OutputFormat, folder: Path) -> None:
        self._buckets, self._form, self._folder = buckets, form, folder
        self._ends = np.cumsum(buckets.counts)
        self._bucket: SortedRows | None = None
        self._number = -1

    def write_first(self, rows: list[int]) -> Iterator[None]:
        """Write file 0 and append its number of rows to `rows`; yield after every row group."""
        yield from self._write(0, 0, int(self._ends[-1]), rows)

    def write(self, numbers: Sequence[int], rows: int) -> Iterator[None]:
        """Write these files with `rows` rows each; yield after every row group."""
        for number in numbers:
            yield from self._write(number, number * rows, min((number + 1) * rows, int(self._ends[-1])), None)

    def _write(self, number: int, start: int, stop: int, rows: list[int] | None) -> Iterator[None]:
        form = self._form
        with (
            atomic_file(self._folder / f"data_{number}.parquet") as temporary,
            pa.OSFile(str(temporary), "wb") as sink,
            pq.ParquetWriter(sink, form.schema, compression=form.compression) as writer,
        ):
            for first in range(start, stop, form.row_group_size):
                last = min(first + form.row_group_size, stop)
                group = self._rows(first, last)
                writer.write_table(narrow_table(group, form.schema), row_group_size=len(group))
                count(len(group))
                del group
                yield
                if rows is not None and sink.tell() >= form.size:
                    break
        if rows is not None:
            rows.append(last - start)

    def _rows(self, start: int, stop: int) -> pa.Table:
        pieces = []
        while start < stop:
            number = int(np.searchsorted(self._ends, start, side="right"))
            if self._bucket is None or number != self._number:
                self._bucket = None  # before the next load: two buckets exceed the memory
                self._bucket, self._number = self._buckets.load(number), number
            end = int(self._ends[number])
            begin = end - len(self._bucket)
            pieces.append(self._bucket.take(start - begin, min(stop, end) - begin))
            start = min(stop, end)
        return pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces).combine_chunks()
