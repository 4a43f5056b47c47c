"""The files of a shuffle: each is a known range of its rows, so that they can be written side by side.

All files but the last hold the same number of rows, a whole number of row groups: as many as the first one took
to reach the size that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relayrun.files import atomic_file
from relayrun.tokens.readers.rows import narrow_table, text_column
from relayrun.tokens.shuffle.buckets import Buckets, SortedRows
from relayrun.tokens.shuffle.lengths import LengthProfile


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """How a file is written. `size`: bytes of a file, at least; `row_group_size`: rows of a row group."""

    schema: pa.Schema
    column: str
    size: int
    row_group_size: int
    compression: str


def output_file_name(number: int) -> str:
    return f"data_{number}.parquet"


class ShuffleWriter:
    """Writes files of the rows of `buckets` into `folder`, and the lengths of their texts beside, into `notes`.

    For one thread: it keeps the bucket that it read last.
    """

    def __init__(self, buckets: Buckets, form: OutputFormat, folder: Path, notes: Path) -> None:
        self._buckets, self._form, self._folder, self._notes = buckets, form, folder, notes
        self._ends = np.cumsum(buckets.counts)
        self._bucket: SortedRows | None = None
        self._number = -1

    def write_first(self, rows: list[int]) -> Iterator[None]:
        """Write file 0, and append the number of its rows to `rows`; yields after every row group."""
        yield from self._write(0, 0, int(self._ends[-1]), rows)

    def write(self, numbers: Sequence[int], rows: int) -> Iterator[None]:
        """Write these files, of `rows` rows each; yields after every row group."""
        for number in numbers:
            yield from self._write(number, number * rows, min((number + 1) * rows, int(self._ends[-1])), None)

    def _write(self, number: int, start: int, stop: int, rows: list[int] | None) -> Iterator[None]:
        form, lengths = self._form, LengthProfile()
        path = self._folder / output_file_name(number)
        with atomic_file(path) as temporary:
            with (
                pa.OSFile(str(temporary), "wb") as sink,
                pq.ParquetWriter(sink, form.schema, compression=form.compression) as writer,
            ):
                for first in range(start, stop, form.row_group_size):
                    last = min(first + form.row_group_size, stop)
                    group = self._rows(first, last)
                    lengths.add(text_column(group, form.column))
                    writer.write_table(narrow_table(group, form.schema), row_group_size=len(group))
                    del group
                    yield
                    if rows is not None and sink.tell() >= form.size:
                        break
            np.save(self._notes / f"after-{number}.npy", lengths.array())
        if rows is not None:
            rows.append(last - start)

    def _rows(self, start: int, stop: int) -> pa.Table:
        """Rows `start` to `stop` of the shuffle, in one chunk."""
        pieces = []
        while start < stop:
            number = int(np.searchsorted(self._ends, start, side="right"))
            if self._bucket is None or number != self._number:
                self._bucket = None  # first: two are too many
                self._bucket, self._number = self._buckets.load(number), number
            end = int(self._ends[number])
            begin = end - len(self._bucket)
            pieces.append(self._bucket.take(start - begin, min(stop, end) - begin))
            start = min(stop, end)
        return pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces).combine_chunks()
