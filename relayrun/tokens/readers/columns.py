"""Files of a data set as Arrow data of bounded size: the text column, or all columns.

While rows are moved, texts and lists have 64-bit offsets, so that any number of them fits into one array, and
dictionaries become plain values, whose bytes in a file do not depend on the surrounding rows. `narrow_table` restores
32-bit offsets; dictionaries stay plain, as Parquet encodes repeated values itself.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pkgutil
import tarfile
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from relayrun.errors import InputError, RelayrunError, combined_error
from relayrun.tokens.readers.arrow_files import open_parquet, read_batches, unreadable_file_error
from relayrun.tokens.readers.contents import file_compression
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.readers.file_ranges import file_of_range
from relayrun.tokens.readers.inputs import JSON_LINES, PARQUET, content_fault_now, file_format
from relayrun.tokens.readers.texts import PackedTexts, find_field, keep_utf8_rows
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.urls import MissingInput, open_input, printable

log = logging.getLogger(__name__)
T = TypeVar("T")

_FILES_AT_A_TIME = 8


def read_column(
    path: str, column: str, *, batch_bytes: int, scratch: str | None = None, faults: LineFaults | None = None
) -> Generator[pa.Array]:
    """Yield all rows of a file, or of a range of it, in order as string or large_string arrays of about `batch_bytes`
    each, nulls kept.

    The suffix gives the format. `column` is a name, or names with dots for a nested field; a column whose own name
    holds the dots comes first. `scratch`: a folder for texts that are too long for memory. All texts are UTF-8. Raises
    InputError that names the place of a bad text, unless `faults` skips it, or a file that cannot be read at all."""
    faults = faults or LineFaults()
    file = file_of_range(path)
    read = pkgutil.resolve_name(file_format(file).reader)
    try:
        with open_input(file) as raw:
            yield from read(raw, path, column, batch_bytes=batch_bytes, scratch=scratch, faults=faults)
    except FileNotFoundError:
        hint = "run `relayrun dumps prepare` again if the dataset has changed"
        raise MissingInput("this file of the dump is missing", where=printable(path), hint=hint) from None
    except (pa.ArrowException, OSError, tarfile.TarError) as error:
        hint = "fetch the file again, then run again: what is done is kept"
        raise content_fault_now(file) or unreadable_file_error(path, error, hint=hint) from None


def texts_of_content(content: bytes, path: str, column: str, *, most: int, scratch: str) -> list[bytes | None]:
    """Return the texts and nulls of a file with this content, in UTF-8. Raises an Exception if `read_column` has to
    look: anything is wrong with the file, or its texts have more than `most` bytes."""
    from relayrun.tokens.readers.json_csv import plain_texts  # on demand: shards and parquet need no orjson

    form = file_format(path)
    texts = plain_texts(content, path, column, most) if form is JSON_LINES else None
    if texts is None:
        texts, read = [], pkgutil.resolve_name(form.reader)
        for array in read(io.BytesIO(content), path, column, batch_bytes=most, scratch=scratch, faults=LineFaults()):
            if (most := most - array.nbytes) < 0:  # a few compressed bytes can be much text
                raise ValueError("too much text")
            texts += map(bytes, PackedTexts.from_arrow(array.drop_null()).views())
            texts += [None] * array.null_count
    return texts


MAX_BAD_FIRST_LINES = 100
"""`check_column` stops after so many bad lines if lines may be skipped."""


class _FirstBadLines(LineFaults):
    """Skips the first bad lines, then raises InputError for the last one."""

    last: tuple[BadLine, str] | None = None

    def add(self, bad: BadLine, where: str) -> None:
        super().add(bad, where)
        self.last = bad, where
        if sum(self.counts.values()) >= MAX_BAD_FIRST_LINES:
            self.refuse()

    def refuse(self) -> None:
        """Raise InputError that names the last bad line, if any."""
        if self.last is not None:
            LineFaults().add(*self.last)


def check_column(path: str, column: str, skip_lines: bool = False) -> None:
    """Read the schema or the first lines of a file, and the first texts. Raises InputError as `read_column`.
    `skip_lines`: some bad lines at the beginning are accepted."""
    if not urls.is_url(path) and os.path.exists(path) and not os.path.isfile(path):
        return  # a pipe can be read only once
    faults = _FirstBadLines(skip=skip_lines)
    arrays = read_column(path, column, batch_bytes=1, faults=faults)
    if next(arrays, None) is None:
        faults.refuse()  # every line is bad
    arrays.close()


MAX_CHECKED_FILES = 256
"""Files of a data set that are checked, evenly chosen; only a few in a store, which may be slow or closed from here."""
MAX_CHECKED_REMOTE_FILES = 8


def check_files(
    paths: Sequence[str],
    column: str,
    *,
    skip_lines: bool,
    skip_files: bool = False,
    what: str = "files cannot be tokenized",
) -> None:
    """Raise InputError, which begins with `what`, that names the files without the column, and unreadable files, by
    their beginnings. With `skip_files` only a column that no file has is an error, with `skip_lines` only a file
    without a good line. An unreachable store is a warning."""
    if not paths:
        return
    remote = urls.is_url(paths[0])
    chosen = paths[:: -(-len(paths) // (MAX_CHECKED_REMOTE_FILES if remote else MAX_CHECKED_FILES))]
    with ThreadPoolExecutor(_FILES_AT_A_TIME) as pool:
        found = list(pool.map(lambda path: _or_error(check_column, path, column, skip_lines), chosen))
    faults: list[RelayrunError] = [fault for fault in found if fault is not None]
    if not faults or (skip_files and len(faults) < len(chosen)):
        return
    every = f" (looked at {len(chosen):,} of {len(paths):,})" if len(chosen) < len(paths) else ""
    error = combined_error(faults, f"{what}{every}")
    if remote and not any("no column" in fault.message for fault in faults):
        log.warning("%s", error)
        return
    raise error


def _or_error(call: Callable[..., T], *arguments: Any) -> T | InputError:
    """Return the result of a call, or the InputError that it raises."""
    try:
        return call(*arguments)
    except InputError as error:
        return error


_BATCH_BYTES = 4_000_000
_MAX_TABLE_ROWS = 4096
_FIRST_ROWS = 128
"""Rows read first from such a file, see `_MAX_REPEATED_ROWS`."""

_PAGE_ROWS = 1024
"""Parquet writers check the size of a page after about so many rows."""

_COMPRESSION_FACTOR = 6
"""Size of a compressed jsonl file in memory, over its size on disk, about."""


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """A file of rows. `size`: about its bytes in memory; `rows`: their number, None unless the file stores it."""

    path: str
    size: int
    rows: int | None
    page: int
    """Bytes of its largest page, about; a reader holds a whole page."""

    schema: pa.Schema
    """Schema of an output file: without dictionaries, views and metadata."""


def inspect_files(files: Sequence[tuple[str, int]], column: str) -> list[RowFile]:
    """Return a RowFile for each (path, bytes on disk), from the footers of parquet files. Raises InputError that names
    the files that are torn, lack the column, or have other columns than the first one."""
    with ThreadPoolExecutor(_FILES_AT_A_TIME) as pool:
        looked = [*pool.map(lambda file: _or_error(_inspect_file, *file, column), files)]
    if bad := [each for each in looked if isinstance(each, InputError)]:
        raise combined_error(sorted(bad, key=str), f"of {len(files):,} files cannot be shuffled")
    found = [each for each in looked if isinstance(each, RowFile)]
    first = wide_schema(found[0].schema)
    for file in found[1:]:
        if (schema := wide_schema(file.schema)) != first:
            words = f"its columns are others than those of {printable(found[0].path)}: "
            words, hint = words + _schema_difference(schema, first), "shuffle files of one kind at a time"
            bad.append(InputError(words, where=printable(file.path), hint=hint))
    if bad:
        raise combined_error(bad, f"of {len(files):,} files have other columns than the first one")
    return found


def _inspect_file(path: str, size: int, column: str) -> RowFile:
    if file_format(path) is not PARQUET:
        size *= 1 if file_compression(path) is None else _COMPRESSION_FACTOR
        return RowFile(path=path, size=size, rows=None, page=0, schema=pa.schema([(column, pa.string())]))
    with open_parquet(path) as file:
        find_field(file.schema_arrow, path, column)
        metadata = file.metadata
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        pages = [each.total_byte_size * min(_PAGE_ROWS, each.num_rows) // max(each.num_rows, 1) for each in groups]
        return RowFile(
            path=path,
            size=sum(group.total_byte_size for group in groups),
            rows=metadata.num_rows,
            page=max(pages, default=0),
            schema=pa.schema([_plain_field(field) for field in file.schema_arrow]),
        )


def read_rows(file: RowFile, column: str, faults: LineFaults | None = None) -> Iterator[pa.Table]:
    """Yield all rows of a file in order, some megabytes at a time, in `wide_schema`. Raises as `read_column`."""
    schema, faults = wide_schema(file.schema), faults or LineFaults()
    if file.rows is None:
        for array in read_column(file.path, column, batch_bytes=_BATCH_BYTES, faults=faults):
            yield pa.table([array.cast(pa.large_string())], schema)
        return
    measured = 0.0  # bytes of a row in memory, in the largest group so far
    size = rows = 0

    def rows_at_once(group: pq.RowGroupMetaData) -> float:
        nonlocal measured, size, rows
        measured, size, rows = max(measured, size / max(rows, 1)), 0, 0
        average: float = max(group.total_byte_size / max(group.num_rows, 1), measured, 1)
        return min(_MAX_TABLE_ROWS if measured else _FIRST_ROWS, _BATCH_BYTES / average)

    def take(batch: pa.RecordBatch, where: Callable[[int], str]) -> pa.Table:
        nonlocal size, rows
        size, rows = size + batch.nbytes, rows + len(batch)
        kept = keep_utf8_rows(batch, fields, faults, where)
        return pa.Table.from_batches([kept]).replace_schema_metadata().cast(schema)

    with open_parquet(file.path) as source:
        fields = find_field(source.schema_arrow, file.path, column)
        yield from read_batches(source, file.path, range(source.num_row_groups), None, rows_at_once, take)


def wide_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([_wide_field(field) for field in schema])


def narrow_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast the table to `schema`; split into several chunks if one chunk would exceed its offsets."""
    if table.nbytes < 1 << 31 or len(table) == 1:
        return table.cast(schema)
    half = len(table) // 2
    return pa.concat_tables([narrow_table(table.slice(0, half), schema), narrow_table(table.slice(half), schema)])


_WIDE_TYPES = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
_PLAIN_TYPES = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


def _wide_field(field: pa.Field) -> pa.Field:
    kind = _WIDE_TYPES.get(field.type, field.type)
    if pa.types.is_list(kind):
        kind = pa.large_list(kind.value_field)
    elif pa.types.is_map(kind):
        kind = pa.map_(_wide_field(kind.key_field), _wide_field(kind.item_field), kind.keys_sorted)
    return field.with_type(_with_inner(kind, _wide_field))


def _plain_field(field: pa.Field) -> pa.Field:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return field.with_type(_with_inner(_PLAIN_TYPES.get(kind, kind), _plain_field)).remove_metadata()


def _with_inner(kind: pa.DataType, convert: Callable[[pa.Field], pa.Field]) -> pa.DataType:
    """Return a type of lists or structs with converted fields; other types as they are."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return (pa.list_ if pa.types.is_list(kind) else pa.large_list)(convert(kind.value_field))
    return pa.struct([convert(inner) for inner in kind]) if pa.types.is_struct(kind) else kind


def _schema_difference(schema: pa.Schema, first: pa.Schema) -> str:
    here, there = ({f"{each.name}: {each.type}" for each in kinds} for kinds in (schema, first))
    found = [f"it has {name}" for name in sorted(here - there)] + [f"it lacks {name}" for name in sorted(there - here)]
    return ", ".join(found[:4]) or "they stand in another order, or may be null in one of the files alone"


def sample_texts(
    column: str,
    paths: list[str],
    *,
    most_bytes: int,
    scratch: str | None = None,
    read: Callable[..., Iterator[pa.Array]] = read_column,
) -> PackedTexts:
    """Return the first readable texts of at most eight files, evenly chosen. `scratch`: see `read_column`."""
    chosen = paths[:: max(1, len(paths) // 8)][:8]
    # a pipe can be read only once
    chosen = [path for path in chosen if urls.is_url(path) or os.path.isfile(file_of_range(path))]
    texts: list[str] = []
    for path in chosen:
        left = most_bytes // len(chosen)
        with contextlib.suppress(InputError):  # the task of the file reports it
            for array in read(path, column, batch_bytes=left, scratch=scratch, faults=LineFaults(skip=True)):
                for piece in PackedTexts.from_arrow(array.drop_null() if array.null_count else array).views():
                    if left > 0 and piece:
                        texts.append(str(piece[:left], "utf-8", "ignore"))  # the cut may split a character
                        left -= len(piece)
                if left <= 0:
                    break
    return PackedTexts.of(texts)
