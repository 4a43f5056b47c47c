"""The text column of a file, as Arrow arrays of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from relayrun.errors import InputError
from relayrun.tokenization.readers.jsonlines import MOST_ROWS, no_column, read_jsonl
from relayrun.tokenization.readers.stores import open_input, printable

_MOST_REPEATED_ROWS = 128
"""Rows of an array where the file may hold a text once for many rows, so that its size says little of theirs."""

_READ_AHEAD = 1 << 20


def read_column(path: str, column: str, *, batch_bytes: int, scratch: str | None = None) -> Iterator[pa.Array]:
    """String or large_string arrays of all rows of a file, in order, nulls kept, of about `batch_bytes` each.

    The kind of file is known by its suffix. `column` is a name, or names with dots for a nested field; a name
    that holds the dots itself comes first. `scratch`: a folder for texts of jsonl files that are too long for memory.
    Raises InputError naming the file, and the line of a jsonl file.
    """
    name = path.lower()
    try:
        with open_input(path) as raw:
            if name.endswith(".parquet"):
                yield from _read_parquet(raw, path, column, batch_bytes)
            else:
                compression = "gzip" if name.endswith(".gz") else "zstd" if name.endswith(".zst") else None
                yield from read_jsonl(raw, path, column, compression, batch_bytes, scratch)
    except FileNotFoundError:
        raise InputError(
            "this file of the dump is missing",
            where=printable(path),
            hint="run prepare_dumps.py again if the dataset has changed",
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error, hint="fetch the file again, then run again: what is done is kept") from None


def unreadable(path: str, error: Exception, *, hint: str | None = None) -> InputError:
    """The error of a file that Arrow or the store cannot read."""
    lines = str(error).splitlines() or [type(error).__name__]
    return InputError(f"cannot be read, it may be torn: {lines[0]}", where=printable(path), hint=hint)


def _read_parquet(raw: BinaryIO, path: str, column: str, batch_bytes: int) -> Iterator[pa.Array]:
    # pages come through a buffer: without it the column of a whole row group is read at once
    with pq.ParquetFile(raw, buffer_size=_READ_AHEAD, pre_buffer=False) as file:
        fields = find_field(file.schema_arrow, path, column)
        leaves = [file.metadata.schema.column(i).path for i in range(file.metadata.num_columns)]
        leaf = leaves.index(".".join(fields))
        for group in range(file.num_row_groups):
            chunk = file.metadata.row_group(group).column(leaf)
            average = chunk.total_uncompressed_size / max(chunk.num_values, 1)
            most = _MOST_REPEATED_ROWS if chunk.has_dictionary_page else MOST_ROWS
            most = int(max(1, min(most, batch_bytes / max(average, 1))))
            # one thread: the workers share the cores already
            for batch in file.iter_batches(most, [group], [".".join(fields)], use_threads=False):
                array = batch.column(fields[0])
                for field in fields[1:]:
                    array = pa.compute.struct_field(array, field)
                if pa.types.is_dictionary(array.type):
                    array = array.dictionary_decode()
                array = array if _is_text(array.type) else array.cast(pa.large_string())
                del batch
                yield array
                del array  # a long document is not kept while the next one is read


def find_field(schema: pa.Schema, path: str, column: str) -> list[str]:
    """The names that lead to the column of the text. Raises InputError naming `path`."""
    names = [column] if column in schema.names else column.split(".")
    if names[0] not in schema.names:
        raise no_column(path, column, schema.names)
    kind = schema.field(names[0]).type
    for name in names[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            raise no_column(path, column, _leaves(schema))
        kind = kind.field(name).type
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (_is_text(inner) or pa.types.is_string_view(inner) or pa.types.is_null(inner)):
        raise InputError(f"column {column!r} holds {inner}, not text", where=printable(path))
    return names


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _leaves(schema: pa.Schema) -> list[str]:
    names = []
    for field in schema:
        inner = (
            [field.type.field(i).name for i in range(field.type.num_fields)] if pa.types.is_struct(field.type) else []
        )
        names += [f"{field.name}.{name}" for name in inner] or [field.name]
    return names
