"""Parquet files, and Arrow's IPC files and streams: their texts, and batches of their rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from relayrun.errors import InputError
from relayrun.tokens.readers.faults import LineFaults
from relayrun.tokens.readers.file_ranges import split_range
from relayrun.tokens.readers.texts import MAX_ROWS, find_field, keep_utf8, row_namer, text_array
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.urls import first_line, printable

T = TypeVar("T")

_MAX_REPEATED_ROWS = 128
"""Rows of an array if the file may store a text once for many rows: file size then says little about text size."""

_COLUMN_READ_AHEAD = 1 << 20
_ROWS_READ_AHEAD = 1 << 18
"""Bytes read at a time per column."""

_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_ARROW_FILE = b"ARROW1"
"""First bytes of an IPC file; an IPC stream begins differently."""


def unreadable_file_error(path: str, error: Exception, *, hint: str | None = None) -> InputError:
    """Return the error of a file that Arrow cannot read."""
    words = f"cannot be read, it may be torn: {first_line(error)}"
    if "requires too much memory for decoding" in words:
        words = "it was compressed with a long window of zstd, which is not read here"
        hint = "`zstd -d --long=31 --memory=2048MB FILE`, and compress it again without --long or --ultra"
    return InputError(words, where=printable(path), hint=hint)


def read_parquet(
    raw: BinaryIO, path: str, column: str, *, batch_bytes: int, scratch: str | None, faults: LineFaults
) -> Iterator[pa.Array]:
    """Yield the texts of an open file as `read_column` does."""

    def rows_at_once(group: pq.RowGroupMetaData) -> float:
        chunk = group.column(leaf)
        average: float = chunk.total_uncompressed_size / max(chunk.num_values, 1)
        return min(_MAX_REPEATED_ROWS if chunk.has_dictionary_page else MAX_ROWS, batch_bytes / max(average, 1))

    def take(batch: pa.RecordBatch, where: Callable[[int], str]) -> pa.Array:
        _look_at_rows(batch, fields[0], faults)
        return keep_utf8(text_array(batch, fields), faults, where)

    with _parquet_file(raw, _COLUMN_READ_AHEAD) as file:
        fields = find_field(file.schema_arrow, path, column)
        leaves = [file.metadata.schema.column(i).path for i in range(file.metadata.num_columns)]
        leaf = leaves.index(".".join(fields))
        columns = None if faults.whole_rows else [".".join(fields)]
        _, begin, end = split_range(path)
        starts = row_group_starts(file)
        groups = [group for group, start in enumerate(starts) if begin <= start and (end is None or start < end)]
        yield from read_batches(file, path, groups, columns, rows_at_once, take)


def row_group_starts(file: pq.ParquetFile) -> list[int]:
    """Return the offset of the first byte of each row group."""
    groups = (file.metadata.row_group(number).column(0) for number in range(file.num_row_groups))
    return [min(each.data_page_offset, each.dictionary_page_offset or each.data_page_offset) for each in groups]


def _look_at_rows(batch: pa.RecordBatch, text_column: str, faults: LineFaults) -> None:
    """Show `faults` the other columns of each row, if it wants them."""
    if faults.whole_rows:
        others = batch.select([place for place, name in enumerate(batch.schema.names) if name != text_column])
        others.validate(full=True)
        for row in others.to_pylist() if others.num_columns else [{}] * len(batch):
            faults.look(row, {})


def read_batches(
    file: pq.ParquetFile,
    path: str,
    groups: Iterable[int],
    columns: Sequence[str] | None,
    rows_at_once: Callable[[pq.RowGroupMetaData], float],
    take: Callable[[pa.RecordBatch, Callable[[int], str]], T],
    start: int = 0,
) -> Iterator[T]:
    """Yield the result of `take` for each batch of these row groups, from row `start` of them on. `columns`: None for
    all. `take` gets a batch and a function that names row i of the batch."""
    for group in groups:
        part = file.metadata.row_group(group)
        if start >= part.num_rows:
            start -= part.num_rows
            continue
        first = 0
        with naming_row_group(path, group):
            # one thread: the callers share the cores already
            for batch in file.iter_batches(int(max(1, rows_at_once(part))), [group], columns, use_threads=False):
                rows = len(batch)
                if start < rows:
                    found = take(batch.slice(start), row_namer(path, group, first + start))
                    del batch
                    yield found
                    del found  # frees a long document before the next one is read
                start, first = max(0, start - rows), first + rows


def read_arrow(
    raw: BinaryIO, path: str, column: str, *, batch_bytes: int, scratch: str | None, faults: LineFaults
) -> Iterator[pa.Array]:
    """Yield the texts of an IPC file or stream, a record batch at a time, as the format stores them."""
    is_file = raw.read(len(_ARROW_FILE)) == _ARROW_FILE
    open_ipc = pa.ipc.open_file if is_file else pa.ipc.open_stream
    raw.seek(0)
    # two readers: the schema says which column to read, so that the other columns stay on disk
    with open_ipc(raw) as reader:
        schema = reader.schema
    fields = find_field(schema, path, column)
    raw.seek(0)
    wanted = [] if faults.whole_rows else [schema.get_field_index(fields[0])]  # none: all of them
    reader = open_ipc(raw, options=pa.ipc.IpcReadOptions(included_fields=wanted))
    batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
    for number, batch in enumerate(batches):
        batch.validate()  # before its texts are read: offsets come unchecked from the file
        _look_at_rows(batch, fields[0], faults)
        array = text_array(batch, fields)
        del batch
        array = keep_utf8(array, faults, row_namer(path, number, 0, what="record batch"))
        yield array
        del array
    if not is_file:
        _check_end_of_stream(raw, path)


def _check_end_of_stream(raw: BinaryIO, path: str) -> None:
    """Raise InputError unless an IPC stream that was read to `raw`'s place ends there with its mark: Arrow takes the
    end of a torn file for the end of the stream, and does not look at a second stream behind the first."""
    end, _ = raw.tell(), raw.seek(0)
    mark = _STREAM_END if raw.read(4) == _STREAM_END[:4] else _STREAM_END[4:]  # without the first half until Arrow 0.15
    raw.seek(max(0, end - len(mark)))
    if raw.read(len(mark)) != mark:
        words = "it may be torn: its stream of Arrow has no end mark"
        raise InputError(words, where=printable(path), hint="fetch or write the file again")
    if raw.read(4096).strip(b"\0"):
        words = "there are bytes behind the end mark of its stream of Arrow, which are not read"
        raise InputError(words, where=printable(path), hint="split the file into its streams")


@contextlib.contextmanager
def open_parquet(path: str) -> Iterator[pq.ParquetFile]:
    """Open a parquet file, local or below a URL. Raises InputError that names an unreadable file."""
    try:
        with _open_source(path) as source, _parquet_file(source, _ROWS_READ_AHEAD) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise unreadable_file_error(path, error) from None


def _parquet_file(source: BinaryIO | pa.NativeFile, read_ahead: int) -> pq.ParquetFile:
    # buffered pages: without a buffer the columns of a whole row group are read at once
    return pq.ParquetFile(source, buffer_size=read_ahead, pre_buffer=False, page_checksum_verification=True)


@contextlib.contextmanager
def naming_row_group(path: str, group: int) -> Iterator[None]:
    """Raise InputError for a page of this row group that has another checksum (CRC) than the file says."""
    try:
        yield
    except OSError as error:
        if "CRC" not in str(error):
            raise
        words = f"row group {group}: a page is not what its checksum says (CRC), so its bytes were changed"
        raise InputError(words, where=printable(path), hint="fetch or write the file again") from None


def _open_source(path: str) -> pa.NativeFile:
    utf8 = path == printable(path)  # Arrow accepts UTF-8 names only
    return pa.OSFile(path) if utf8 and not urls.is_url(path) else pa.PythonFile(urls.open_input(path), "r")
