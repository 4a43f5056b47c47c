"""The column of the text in Arrow's tables: where it lies, and whether what it holds is UTF-8."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relayrun.errors import InputError
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.readers.texts import Texts
from relayrun.tokens.stores.stores import printable


def find_field(schema: pa.Schema, path: str, column: str) -> list[str]:
    """The names that lead to the column of the text. Raises InputError naming `path`."""
    names = [column] if column in schema.names else column.split(".")
    if names[0] not in schema.names:
        raise missing_column_error(path, column, schema.names)
    kind = schema.field(names[0]).type
    for name in names[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            raise missing_column_error(path, column, _leaf_names(schema))
        kind = kind.field(name).type
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (_is_text(inner) or pa.types.is_string_view(inner) or pa.types.is_null(inner)):
        raise InputError(f"column {column!r} holds {inner}, not text", where=printable(path))
    return names


def missing_column_error(where: str, column: str, columns: Sequence[str]) -> InputError:
    """The error of a file without the column."""
    return InputError(
        f"no column {column!r}; there are: {', '.join(columns)}",
        where=printable(where),
        hint="name the column of the text with --column",
    )


def text_array(batch: pa.RecordBatch, fields: Sequence[str]) -> pa.Array:
    """The texts of a batch as a string or large_string array; `fields` as `find_field` gives them."""
    array = batch.column(fields[0])
    for field in fields[1:]:
        array = pc.struct_field(array, field)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array if _is_text(array.type) else array.cast(pa.large_string())


def keep_utf8(array: pa.Array, faults: LineFaults, where: Callable[[int], str]) -> pa.Array:
    """The texts of a string or large_string array that are UTF-8, which Arrow's readers do not look at.

    `where` names row i of the array; `faults` may keep a null in the place of another one. Raises InputError for the
    first other one, unless `faults` leaves it out, and pa.ArrowInvalid for an array that is broken in another way.
    """
    good = _utf8_mask(array, faults, where)
    if good is None:
        return array
    return pc.if_else(good, array, pa.scalar(None, array.type)) if faults.keep else array.filter(good)


def keep_utf8_rows(
    batch: pa.RecordBatch, fields: Sequence[str], faults: LineFaults, where: Callable[[int], str]
) -> pa.RecordBatch:
    """The rows of a batch whose texts are UTF-8, with all their columns. Raises as `valid` does."""
    good = _utf8_mask(text_array(batch, fields), faults, where)
    return batch if good is None else batch.filter(good)


def _utf8_mask(array: pa.Array, faults: LineFaults, where: Callable[[int], str]) -> pa.Array | None:
    """Which texts are UTF-8; None where all are, which costs little to find out."""
    try:
        array.validate(full=True)
        return None
    except pa.ArrowInvalid:
        array.validate()  # raises for offsets outside the buffers: then no row can be looked at
    good = np.ones(len(array), np.bool_)
    for row, text in enumerate(Texts.from_arrow(array).views()):
        if array[row].is_valid:
            try:
                str(text, "utf-8")
            except UnicodeDecodeError as error:
                good[row] = False
                found = f"byte 0x{text[error.start]:02x} at {error.start} of its {len(text):,} bytes"
                bad = BadLine("not UTF-8", f"the text is not UTF-8 ({found})")
                faults.add(bad, where(row))
                if faults.keep:
                    faults.mark(row, bad.reason)
    mask = pa.array(good)
    array.filter(mask).validate(full=True)
    return mask


def row_namer(path: str, group: int, first: int, *, what: str = "row group") -> Callable[[int], str]:
    """How row i of an array is named that begins at row `first` of a row group, or of a record batch of Arrow."""
    return lambda row: f"{path}: {what} {group}, row {first + row} of it (both counted from 0)"


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _leaf_names(schema: pa.Schema) -> list[str]:
    names = []
    for field in schema:
        inner = (
            [field.type.field(i).name for i in range(field.type.num_fields)] if pa.types.is_struct(field.type) else []
        )
        names += [f"{field.name}.{name}" for name in inner] or [field.name]
    return names
