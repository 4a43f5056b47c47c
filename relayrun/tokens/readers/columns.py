"""Files of a data set as Arrow data of a bounded size: the text column alone, or all columns.

While rows are moved, texts and lists have 64-bit offsets, so that any number of them fits into one array, and
dictionaries are plain values, whose bytes in a file do not depend on the rows around them. `narrow_table` undoes the
first; the second stays, as Parquet has an encoding of its own for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relayrun.errors import InputError, RelayrunError, combined_error
from relayrun.tokens.readers.inputs import BadLine, LineFaults, file_compression, file_kind
from relayrun.tokens.readers.json_csv import MAX_ROWS, read_csv, read_jsonl
from relayrun.tokens.readers.texts import find_field, keep_utf8, keep_utf8_rows, row_namer, text_array
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.urls import MissingInput, open_input, printable

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


_ROWS_READ_AHEAD = 1 << 18
"""Bytes of every column that are read at a time."""

_BATCH_BYTES = 4_000_000
_MAX_TABLE_ROWS = 4096
_FIRST_ROWS = 128
"""Rows that are read first of a file that may hold a text once for many rows: its size says little of theirs."""

_PAGE_ROWS = 1024
"""Writers look at the size of a page after about so many rows."""

_COMPRESSION_FACTOR = 6
"""A compressed jsonl file holds about this many times its bytes."""

_FOOTERS_AT_A_TIME = 8


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """A file of rows. `size`: about its bytes in memory; `rows`: their number, where the file tells it."""

    path: str
    size: int
    rows: int | None
    page: int
    """About the bytes of its largest page, which a reader holds whole."""

    schema: pa.Schema
    """The schema of a file that is written from it: without dictionaries, views and metadata."""


def inspect_files(files: Sequence[tuple[str, int]], column: str) -> list[RowFile]:
    """What these files (path, bytes on disk) are, from the footers of those that are parquet.

    Raises InputError naming the files that are torn, lack the column, or have other columns than the first one.
    """
    bad: list[RelayrunError] = []

    def tried(file: tuple[str, int]) -> RowFile | None:
        try:
            return _inspect_file(*file, column)
        except InputError as error:
            bad.append(error)
            return None

    with ThreadPoolExecutor(_FOOTERS_AT_A_TIME) as pool:
        found = [file for file in pool.map(tried, files) if file is not None]
    if bad:
        raise combined_error(sorted(bad, key=str), f"of {len(files):,} files cannot be shuffled")
    first = wide_schema(found[0].schema)
    bad += [
        InputError(
            f"its columns are others than those of {printable(found[0].path)}: {_schema_difference(schema, first)}",
            where=printable(file.path),
            hint="shuffle files of one kind at a time",
        )
        for file in found[1:]
        if (schema := wide_schema(file.schema)) != first
    ]
    if bad:
        raise combined_error(bad, f"of {len(files):,} files have other columns than the first one")
    return found


def _inspect_file(path: str, size: int, column: str) -> RowFile:
    if file_kind(path) != "parquet":
        size *= 1 if file_compression(path) is None else _COMPRESSION_FACTOR
        return RowFile(path=path, size=size, rows=None, page=0, schema=pa.schema([(column, pa.string())]))
    with open_parquet(path) as file:
        find_field(file.schema_arrow, path, column)
        metadata = file.metadata
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        return RowFile(
            path=path,
            size=sum(group.total_byte_size for group in groups),
            rows=metadata.num_rows,
            page=max(
                (group.total_byte_size * min(_PAGE_ROWS, group.num_rows) // max(group.num_rows, 1) for group in groups),
                default=0,
            ),
            schema=_plain_schema(file.schema_arrow),
        )


def read_rows(file: RowFile, column: str, faults: LineFaults | None = None) -> Iterator[pa.Table]:
    """All rows of a file in order, some megabytes at a time, in the types of `wide_schema`; their texts are UTF-8.

    Raises InputError as `read_column`.
    """
    schema, faults = wide_schema(file.schema), faults or LineFaults()
    if file.rows is None:
        for array in read_column(file.path, column, batch_bytes=_BATCH_BYTES, faults=faults):
            yield pa.table([array.cast(pa.large_string())], schema)
        return
    with open_parquet(file.path) as source:
        fields = find_field(source.schema_arrow, file.path, column)
        measured = 0.0
        for group in range(source.num_row_groups):
            part = source.metadata.row_group(group)
            average = max(part.total_byte_size / max(part.num_rows, 1), measured, 1)
            most = int(max(1, min(_MAX_TABLE_ROWS if measured else _FIRST_ROWS, _BATCH_BYTES / average)))
            size = first = 0
            # one thread: the callers share the cores already
            for batch in source.iter_batches(most, [group], use_threads=False):
                rows = len(batch)
                size += batch.nbytes
                batch = keep_utf8_rows(batch, fields, faults, row_namer(file.path, group, first))
                first += rows
                yield pa.Table.from_batches([batch]).replace_schema_metadata().cast(schema)
            measured = max(measured, size / max(part.num_rows, 1))


@contextlib.contextmanager
def open_parquet(path: str) -> Iterator[pq.ParquetFile]:
    """Open a parquet file, local or below a URL. Raises InputError naming one that cannot be read."""
    try:
        # pages come through a buffer: without it a whole row group is read at once
        with (
            _open_source(path) as source,
            pq.ParquetFile(source, buffer_size=_ROWS_READ_AHEAD, pre_buffer=False) as file,
        ):
            yield file
    except (pa.ArrowException, OSError) as error:
        raise unreadable_file_error(path, error) from None


def _open_source(path: str) -> pa.NativeFile:
    utf8 = path == printable(path)  # Arrow takes no other names
    return pa.OSFile(path) if utf8 and not urls.is_url(path) else pa.PythonFile(urls.open_input(path), "r")


def wide_schema(schema: pa.Schema) -> pa.Schema:
    """The same columns with 64-bit offsets."""
    return pa.schema([_wide_field(field) for field in schema])


def narrow_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table in the types of `schema`; of several chunks where one would hold too much for them."""
    if table.nbytes < 1 << 31 or len(table) == 1:
        return table.cast(schema)
    half = len(table) // 2
    return pa.concat_tables([narrow_table(table.slice(0, half), schema), narrow_table(table.slice(half), schema)])


def text_column(table: pa.Table, column: str) -> pa.ChunkedArray:
    """The column of the text, which may be a nested one."""
    first, *others = find_field(table.schema, "", column)
    found = table[first]
    for name in others:
        found = pc.struct_field(found, name)
    return found


def _wide_field(field: pa.Field) -> pa.Field:
    kind = field.type
    if pa.types.is_string(kind):
        kind = pa.large_string()
    elif pa.types.is_binary(kind):
        kind = pa.large_binary()
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = pa.large_list(_wide_field(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_wide_field(inner) for inner in kind])
    elif pa.types.is_map(kind):
        kind = pa.map_(_wide_field(kind.key_field), _wide_field(kind.item_field), kind.keys_sorted)
    return field.with_type(kind)


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([_plain_field(field) for field in schema])


def _plain_field(field: pa.Field) -> pa.Field:
    kind = field.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string_view(kind):
        kind = pa.string()
    elif pa.types.is_binary_view(kind):
        kind = pa.binary()
    elif pa.types.is_list(kind):
        kind = pa.list_(_plain_field(kind.value_field))
    elif pa.types.is_large_list(kind):
        kind = pa.large_list(_plain_field(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_plain_field(inner) for inner in kind])
    return field.with_type(kind).remove_metadata()


def _schema_difference(schema: pa.Schema, first: pa.Schema) -> str:
    here, there = ({f"{each.name}: {each.type}" for each in kinds} for kinds in (schema, first))
    found = [f"it has {name}" for name in sorted(here - there)] + [f"it lacks {name}" for name in sorted(there - here)]
    return ", ".join(found[:4]) or "they stand in another order, or may be null in one of the files alone"
