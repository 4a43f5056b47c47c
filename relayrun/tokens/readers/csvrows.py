"""Rows of a CSV file to texts: a first row of names, commas, quotes that may span lines (RFC 4180), UTF-8.

Python's own reader takes fields of any length and knows on which line each row begins; Arrow's needs every row to fit
into a block, and does not name a row that is no UTF-8.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from relayrun.errors import InputError
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.readers.jsonlines import MAX_ROWS, open_decompressed
from relayrun.tokens.readers.rowtext import missing_column_error
from relayrun.tokens.readers.texts import large_strings
from relayrun.tokens.stores.stores import printable

_MAX_FIELD_CHARACTERS = (1 << 31) - 1
"""Characters of a field, at most."""


def read_csv(
    raw: BinaryIO, path: str, column: str, compression: str | None, batch_bytes: int, faults: LineFaults
) -> Iterator[pa.Array]:
    """As `columns.read_column`. Raises InputError naming the line where the row begins."""
    file = printable(path)
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    with open_decompressed(raw, compression) as lines:
        # a byte order mark is dropped; a byte that is not UTF-8 becomes a lone surrogate, which no UTF-8 gives
        decoded = io.TextIOWrapper(lines, "utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(decoded, strict=True)
        names: list[str] | None = None
        texts: list[bytes] = []
        size = 0
        while True:
            before = reader.line_num
            try:
                row = next(reader)
                if not row:
                    continue  # an empty line
                if names is None:
                    names = row
                    place = _column_index(names, file, column)
                    continue
                text = _row_text(row, names, place, column)
            except StopIteration:
                break
            except csv.Error as error:
                if names is None:
                    raise InputError(f"its first row is not CSV: {error}", where=f"{file}:{before + 1}") from None
                faults.add(_bad_row(error, reader.line_num - before), f"{file}:{before + 1}")
                continue
            except BadLine as bad:
                faults.add(bad, f"{file}:{before + 1}")
                continue
            if texts and (size + len(text) > batch_bytes or len(texts) == MAX_ROWS):
                yield large_strings(texts)
                texts, size = [], 0
            texts.append(text)
            size += len(text)
        if texts:
            yield large_strings(texts)


def _column_index(names: list[str], file: str, column: str) -> int:
    if names.count(column) > 1:
        raise InputError(f"there are {names.count(column)} columns {column!r}", where=file)
    if column not in names:
        raise missing_column_error(file, column, names)
    return names.index(column)


def _row_text(row: list[str], names: list[str], place: int, column: str) -> bytes:
    if len(row) != len(names):
        raise BadLine("not CSV", f"this row has {len(row)} fields, the first row has {len(names)}")
    try:
        return row[place].encode()
    except UnicodeEncodeError:
        raise BadLine("not UTF-8", f"{column!r} holds a byte that is not UTF-8") from None


def _bad_row(error: csv.Error, lines: int) -> BadLine:
    whole = f"this row of {lines:,} lines is" if lines > 1 else "this row is"
    return BadLine("not CSV", f"{whole} not CSV: {error}")
