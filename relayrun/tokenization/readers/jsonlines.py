"""Lines of JSON to texts. A long document costs little memory, whatever its length, its escapes and its alphabet.

orjson reads the lines. A Python string takes up to four bytes per character, so where a line is long, its long strings
are taken out first, and decoded block by block into UTF-8, the longest into files. What is left of the line is short,
and orjson decides about it, with a name in the place of each of those strings: duplicates, types and faults are as in
any other line.
"""

from __future__ import annotations

import io
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import orjson
import pyarrow as pa

from relayrun.errors import InputError
from relayrun.tokenization.readers.spill import Spill
from relayrun.tokenization.readers.stores import printable

MOST_ROWS = 1024
"""Rows of an array, at most."""

_LONG = 1 << 20
"""Bytes of a line, or of a block of a string."""

_NAME = uuid.uuid4().hex
"""Stands, with a number behind it, for a string that was taken out: no text holds it by chance or by intent."""

_CUT = re.compile(
    rb"(?<=[^\\]{12})(?=[^\x80-\xbf])"  # no escape, nor a pair of them, is so long; and a character begins here
    rb"|(?<=[^\\])(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(?=\\)"  # an escape begins, and no second half of a pair
)
"""Where the inside of a JSON string may be cut into two."""


def read_jsonl(
    raw: BinaryIO, path: str, column: str, compression: str | None, batch_bytes: int, scratch: str | None = None
) -> Iterator[pa.Array]:
    """As `columns.read_column`. Raises InputError naming the line."""
    stream: Any = raw
    if compression is not None:  # Arrow notices a truncated stream, the zstandard package does not
        stream = pa.CompressedInputStream(raw, compression)
    own = isinstance(stream, (io.BufferedReader, io.BytesIO))
    with stream if own else io.BufferedReader(stream, _LONG) as lines:
        yield from _texts(lines, printable(path), column, batch_bytes, scratch)


def _texts(lines: BinaryIO, file: str, column: str, batch_bytes: int, scratch: str | None) -> Iterator[pa.Array]:
    most, readline = _LONG, lines.readline
    texts: list[str | None] = []
    taken: dict[str, Spill] = {}
    size = number = 0
    while line := readline(most):
        number += 1
        try:
            if len(line) == most and not line.endswith(b"\n"):
                line, taken = _without_long_strings(line, lines, scratch)
            if line.isspace():
                continue
            text = _value(orjson.loads(line), column, file, number)
        except orjson.JSONDecodeError as error:
            raise InputError(f"this line is not JSON: {error}", where=f"{file}:{number}") from None
        length = len(line)
        if texts and (size + length > batch_bytes or len(texts) == MOST_ROWS or text in taken):
            yield pa.array(texts, pa.large_string())
            texts, size = [], 0
        if text in taken:
            array, taken = taken[text].text(), {}
            yield array
            del array  # it is not kept while the next one is read
            continue
        taken = {}
        texts.append(text)
        size += length
    if texts:
        yield pa.array(texts, pa.large_string())


def _value(row: Any, column: str, file: str, number: int) -> str | None:
    if not isinstance(row, dict):
        raise InputError("this line is no JSON object", where=f"{file}:{number}")
    value: Any = row
    for name in (column,) if column in row else column.split("."):
        if not isinstance(value, dict) or name not in value:
            raise no_column(f"{file}:{number}", column, list(row))
        value = value[name]
    if value is not None and not isinstance(value, str):
        raise InputError(f"{column!r} holds {type(value).__name__}, not text", where=f"{file}:{number}")
    return value


def no_column(where: str, column: str, columns: Sequence[str]) -> InputError:
    """The error of a file without the column."""
    return InputError(
        f"no column {column!r}; there are: {', '.join(columns)}",
        where=printable(where),
        hint="name the column of the text with --column",
    )


def _without_long_strings(begin: bytes, lines: BinaryIO, scratch: str | None) -> tuple[bytes, dict[str, Spill]]:
    """A line that begins with `begin`, with names for its long strings; and these strings by name, in UTF-8.

    Raises orjson.JSONDecodeError for what is no string of JSON.
    """
    short, taken = bytearray(), dict[str, Spill]()
    left = bytearray(begin)
    text: Spill | None = None  # of the string that `left` is inside of
    long = ended = False
    while True:
        if text is None:
            quote = left.find(b'"')
            short += left[:quote] if quote >= 0 else left
            del left[: quote + 1 if quote >= 0 else len(left)]
            if quote >= 0:
                text, long = Spill(scratch), False
                continue
        elif (quote := _closing(left)) >= 0:
            string = left[:quote]
            del left[: quote + 1]
            if long:
                text.add(_decoded(string))
                string = bytearray(f"{_NAME} {len(taken)}".encode())
                taken[string.decode()] = text
            short += b'"' + string + b'"'
            text = None
            continue
        elif len(left) > _LONG and (cut := _CUT.search(left, len(left) - 4096)):
            text.add(_decoded(left[: cut.start()]))
            long = True
            del left[: cut.start()]
        if ended:
            return bytes(short if text is None else short + b'"'), taken  # an open string is an error
        block = lines.readline(_LONG)
        ended = len(block) < _LONG or block.endswith(b"\n")
        left += block


def _closing(inside: bytearray) -> int:
    """Where the quote is that ends a string, -1 if it does not end here."""
    quote = inside.find(b'"')
    while quote >= 0:
        first = quote
        while first > 0 and inside[first - 1] == 0x5C:  # backslashes
            first -= 1
        if (quote - first) % 2 == 0:
            return quote
        quote = inside.find(b'"', quote + 1)
    return -1


def _decoded(inside: bytearray) -> bytes:
    string: str = orjson.loads(b'"' + inside + b'"')
    return string.encode()
