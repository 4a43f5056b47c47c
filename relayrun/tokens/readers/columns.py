"""The text column of a file, as Arrow arrays of a bounded size."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from relayrun.errors import InputError
from relayrun.tokens.readers.csvrows import read_csv
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.readers.formats import file_compression, file_kind
from relayrun.tokens.readers.jsonlines import MAX_ROWS, read_jsonl
from relayrun.tokens.readers.rowtext import find_field, keep_utf8, row_namer, text_array
from relayrun.tokens.stores.stores import MissingInput, open_input, printable

_MAX_REPEATED_ROWS = 128
"""Rows of an array where the file may hold a text once for many rows, so that its size says little of theirs."""

_COLUMN_READ_AHEAD = 1 << 20

_ARROW_FILE = b"ARROW1"
"""An IPC file begins so, an IPC stream does not."""


def read_column(
    path: str, column: str, *, batch_bytes: int, scratch: str | None = None, faults: LineFaults | None = None
) -> Generator[pa.Array]:
    """String or large_string arrays of all rows of a file, in order, nulls kept, of about `batch_bytes` each.

    The kind of file is known by its suffix. `column` is a name, or names with dots for a nested field; a name
    that holds the dots itself comes first. `scratch`: a folder for texts of jsonl files that are too long for memory.
    All texts are UTF-8. Raises InputError naming the file and the line, or the row group and the row, of what is not,
    unless `faults` leaves such lines out; and InputError naming a file that cannot be read at all.
    """
    faults = faults or LineFaults()
    kind = file_kind(path)
    try:
        with open_input(path) as raw:
            if kind == "parquet":
                yield from _read_parquet(raw, path, column, batch_bytes, faults)
            elif kind == "arrow":
                yield from _read_arrow(raw, path, column, faults)
            elif kind == "csv":
                yield from read_csv(raw, path, column, file_compression(path), batch_bytes, faults)
            else:
                yield from read_jsonl(raw, path, column, file_compression(path), batch_bytes, scratch, faults)
    except FileNotFoundError:
        raise MissingInput(
            "this file of the dump is missing",
            where=printable(path),
            hint="run prepare_dumps.py again if the dataset has changed",
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise unreadable_file_error(
            path, error, hint="fetch the file again, then run again: what is done is kept"
        ) from None


MAX_BAD_FIRST_LINES = 100
"""Bad lines behind which a file is no further looked at, where lines may be left out."""


class _FirstBadLines(LineFaults):
    """Leaves out some bad lines; then the last one is an InputError."""

    last: tuple[BadLine, str] | None = None

    def add(self, bad: BadLine, where: str) -> None:
        super().add(bad, where)
        self.last = bad, where
        if sum(self.counts.values()) >= MAX_BAD_FIRST_LINES:
            self.refuse()

    def refuse(self) -> None:
        """Raise InputError naming the last bad line, if there was one."""
        if self.last is not None:
            LineFaults().add(*self.last)


def check_column(path: str, column: str, *, skip_lines: bool = False) -> None:
    """Read the schema of a file, or its first lines, and the first texts. Raises InputError as `read_column`.

    `skip_lines`: some bad lines at the beginning are no fault.
    """
    faults = _FirstBadLines(skip=skip_lines)
    arrays = read_column(path, column, batch_bytes=1, faults=faults)
    if next(arrays, None) is None:
        faults.refuse()  # not one line is good
    arrays.close()


def unreadable_file_error(path: str, error: Exception, *, hint: str | None = None) -> InputError:
    """The error of a file that Arrow or the store cannot read."""
    lines = str(error).splitlines() or [type(error).__name__]
    return InputError(f"cannot be read, it may be torn: {lines[0]}", where=printable(path), hint=hint)


def _read_parquet(raw: BinaryIO, path: str, column: str, batch_bytes: int, faults: LineFaults) -> Iterator[pa.Array]:
    # pages come through a buffer: without it the column of a whole row group is read at once
    with pq.ParquetFile(raw, buffer_size=_COLUMN_READ_AHEAD, pre_buffer=False) as file:
        fields = find_field(file.schema_arrow, path, column)
        leaves = [file.metadata.schema.column(i).path for i in range(file.metadata.num_columns)]
        leaf = leaves.index(".".join(fields))
        for group in range(file.num_row_groups):
            chunk = file.metadata.row_group(group).column(leaf)
            average = chunk.total_uncompressed_size / max(chunk.num_values, 1)
            most = _MAX_REPEATED_ROWS if chunk.has_dictionary_page else MAX_ROWS
            most = int(max(1, min(most, batch_bytes / max(average, 1))))
            first = 0
            # one thread: the workers share the cores already
            for batch in file.iter_batches(most, [group], [".".join(fields)], use_threads=False):
                rows = len(batch)
                array = text_array(batch, fields)
                del batch
                array = keep_utf8(array, faults, row_namer(path, group, first))
                yield array
                del array  # a long document is not kept while the next one is read
                first += rows


def _read_arrow(raw: BinaryIO, path: str, column: str, faults: LineFaults) -> Iterator[pa.Array]:
    """The texts of an IPC file, or of an IPC stream, a record batch at a time: so the format keeps them."""
    is_file = raw.read(len(_ARROW_FILE)) == _ARROW_FILE
    raw.seek(0)
    # two readers: the schema says which column is read, and no other one is brought into memory
    with pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw) as reader:
        schema = reader.schema
    fields = find_field(schema, path, column)
    raw.seek(0)
    options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(fields[0])])
    reader = pa.ipc.open_file(raw, options=options) if is_file else pa.ipc.open_stream(raw, options=options)
    batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
    for number, batch in enumerate(batches):
        batch.validate()  # before its texts are looked at: offsets come from the file as they are
        array = text_array(batch, fields)
        del batch
        array = keep_utf8(array, faults, row_namer(path, number, 0, what="record batch"))
        yield array
        del array
