"""Lines of JSON and rows of CSV to texts, with little memory for long documents.

orjson parses the lines. A Python string takes up to four bytes per character, so the long strings of a long line are
extracted first and decoded block by block into UTF-8, the longest into files; orjson parses the rest with placeholders,
so that duplicates, types and faults are handled as in any other line. Python's own json parses a line that orjson
refuses (NaN, lone surrogates and, here, bytes that are not UTF-8): a fault outside the text costs no document.

CSV has a first row of names, commas, or tabs in `.tsv`, and quotes that may span lines (RFC 4180). Python's own reader
takes fields of any length and knows the line where each row begins; Arrow's reader needs every row to fit into a block,
and does not name a row that is not UTF-8.
"""

from __future__ import annotations

import csv
import io
import json
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

import orjson
import pyarrow as pa

from relayrun.errors import InputError
from relayrun.tokens.readers.contents import HEAD_BYTES, content_fault, file_compression, uncompressed_name
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.readers.file_ranges import RangeLines, decompress, split_range
from relayrun.tokens.readers.texts import MAX_ROWS, LongText, large_strings, missing_column_error
from relayrun.tokens.stores.urls import printable

_LONG_BYTES = 1 << 20
"""Bytes of a line, or of a block of a string."""

_PLACEHOLDER = uuid.uuid4().hex
"""Replaces, with a number appended, an extracted string: random, so that no text holds it by chance or by intent."""

_CUT_PATTERN = re.compile(
    rb"(?<=[^\\]{12})(?=[^\x80-\xbf])"  # longer than an escape or a pair of escapes; and a character begins here
    rb"|(?<=[^\\])(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(?=\\)"  # an escape begins, not the second half of a surrogate pair
)
"""Positions where the inside of a JSON string may be cut into two."""
_INSIDE_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+(?=")', re.DOTALL)

BOM = b"\xef\xbb\xbf"


def read_jsonl(
    raw: BinaryIO, path: str, column: str, *, batch_bytes: int, scratch: str | None, faults: LineFaults
) -> Iterator[pa.Array]:
    """Yield texts as `columns.read_column`. Raises InputError that names the line, or a file of another kind."""
    file, begin, _ = split_range(path)
    lines = open_decompressed(raw, path) if file == path else RangeLines(raw, path, open_decompressed)
    yield from _read_texts(lines, printable(path), column, batch_bytes, scratch, faults, begun=begin > 0)


def plain_texts(content: bytes, path: str, column: str, most: int) -> list[bytes | None] | None:
    """Return the texts of the whole content of a file in UTF-8, at a tenth of the cost of `read_jsonl`. None if that
    has to look: at more than `most` bytes, several members, another compression than gzip, or a line of any fault."""
    compression = file_compression(path)
    try:
        if compression == "gzip":
            stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
            content = stream.decompress(content, most)
            compression = None if stream.eof and not stream.unused_data else compression
        if compression is not None or not content.startswith(b'{"'):
            return None
        values = [orjson.loads(line)[column] for line in content.split(b"\n") if line]
        return [None if value is None else value.encode() for value in values]
    except (ValueError, LookupError, TypeError, AttributeError, zlib.error):
        return None


def open_decompressed(raw: BinaryIO, path: str, expected: str | None = None) -> io.BufferedReader:
    """Return a buffered file of the decompressed bytes of `raw`; the name `path` tells the compression. Raises
    InputError for another content than `expected` (see `contents`; None: text), before any line of it is read."""
    stream: Any = raw
    if (compression := file_compression(path)) is not None:
        stream = decompress(_checked(raw, path, compression), compression)
    return _checked(stream, path, expected)


def _checked(stream: Any, path: str, expected: str | None) -> io.BufferedReader:
    """Return the stream, buffered. Raises InputError if its next bytes are not of the content `expected`."""
    own = isinstance(stream, (io.BufferedReader, io.BytesIO))
    file = cast(io.BufferedReader, stream if own else io.BufferedReader(stream, _LONG_BYTES))
    head = file.peek(HEAD_BYTES) if isinstance(file, io.BufferedReader) else file.getvalue()
    if fault := content_fault(path, head[:HEAD_BYTES], expected):
        raise fault
    return file


def _read_texts(
    lines: Any, file: str, column: str, batch_bytes: int, scratch: str | None, faults: LineFaults, *, begun: bool
) -> Iterator[pa.Array]:
    most, readline = _LONG_BYTES, lines.readline
    texts: list[str | None] = []
    taken: dict[str, LongText | None] = {}
    size = number = 0
    while line := readline(most):
        number += 1
        if not begun:
            line = line.removeprefix(BOM) if number == 1 else line
            if begun := bool(line) and not line.isspace():
                _refuse_other_kinds(line, file)
        if len(line) >= most - len(BOM) and not line.endswith(b"\n"):
            line, taken = _without_long_strings(line, lines, scratch)
        if not line or line.isspace():
            continue
        spilled: LongText | None = None
        reason = None
        try:
            text = _line_text(line, column, faults, taken)
            if text is not None and text in taken and (spilled := taken[text]) is None:
                raise BadLine("not UTF-8", f"{column!r} holds what cannot be written as UTF-8")
        except BadLine as bad:
            faults.add(bad, f"{file}:{number}")
            if not faults.keep:
                continue
            text, reason = None, bad.reason
        finally:
            taken = {}
        length = len(line)
        if texts and (size + length > batch_bytes or len(texts) == MAX_ROWS or spilled is not None):
            yield large_strings(texts)
            texts, size = [], 0
        if spilled is not None:
            array = spilled.text()
            del spilled
            yield array
            del array  # frees it before the next one is read
            continue
        if reason is not None:
            faults.marks[len(texts)] = reason
        texts.append(text)
        size += length
    if texts:
        yield large_strings(texts)


def _refuse_other_kinds(first: bytes, file: str) -> None:
    """Raise InputError if the first line shows one JSON array, one object over several lines, or UTF-16."""
    begin = first.strip()
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        hint = "convert it with `iconv -f UTF-16 -t UTF-8`"
        raise InputError("this file is UTF-16, not UTF-8", where=file, hint=hint)
    of_json = uncompressed_name(file).lower().endswith(".json")
    if begin == b"[" or (begin.startswith(b"[") and (of_json or begin.endswith(b","))):
        hint = "convert it with `jq -c '.[]'`"
        raise InputError("this file is one JSON array; it must hold a JSON object on every line", where=file, hint=hint)
    if begin == b"{":
        words = "this file holds JSON over several lines; it must hold a JSON object on every line"
        raise InputError(words, where=file, hint="convert it with `jq -c .`")


def _line_text(line: bytes, column: str, faults: LineFaults, long: Mapping[str, LongText | None]) -> str | None:
    """Return the text of a line, or the placeholder of a long text. Raises BadLine."""
    exact = True
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        exact = False
        try:
            row = _parse_leniently(line.removeprefix(BOM))
        except (ValueError, RecursionError):
            raise BadLine("not JSON", f"this line is not JSON: {error}") from None
    if isinstance(row, dict):
        faults.look(row, long)
    text = _column_value(row, column)
    if not exact and text is not None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            try:
                line.decode()
            except UnicodeDecodeError:
                raise BadLine("not UTF-8", f"{column!r} holds a byte that is not UTF-8") from None
            found = f"\\u{ord(text[error.start]):04x}"
            raise BadLine("lone surrogate", f"{column!r} holds a lone surrogate ({found})") from None
    return text


def _parse_leniently(line: bytes) -> Any:
    """Parse JSON with NaN, integers of any length, lone surrogates, and non-UTF-8 bytes as lone surrogates."""
    return json.loads(line.decode("utf-8", "surrogateescape"), parse_int=float)


def _column_value(row: Any, column: str) -> str | None:
    if not isinstance(row, dict):
        raise BadLine("no object", "this line is no JSON object")
    value: Any = row
    for name in (column,) if column in row else column.split("."):
        if not isinstance(value, dict) or name not in value:
            error = missing_column_error("", column, list(row))
            raise BadLine("no column", error.message, hint=error.hint)
        value = value[name]
    if value is not None and not isinstance(value, str):
        raise BadLine("not text", f"{column!r} holds {type(value).__name__}, not text")
    return value


def _without_long_strings(begin: bytes, lines: Any, scratch: str | None) -> tuple[bytes, dict[str, LongText | None]]:
    """Return the line that begins with `begin`, with placeholders for long strings, and these strings in UTF-8 by
    placeholder.

    None marks a string that cannot be encoded as UTF-8. A line with an invalid JSON string is read to its end, and the
    returned line is not JSON.
    """
    short, taken = bytearray(), dict[str, LongText | None]()
    left = bytearray(begin)
    text: LongText | None = None  # the string that `left` is inside of
    long = ended = broken = encodable = False
    while True:
        if broken:
            left.clear()
        elif text is None:
            quote = left.find(b'"')
            short += left[:quote] if quote >= 0 else left
            del left[: quote + 1 if quote >= 0 else len(left)]
            if quote >= 0:
                text, long, encodable = LongText(scratch), False, True
                continue
        else:
            quote = match.end() if (match := _INSIDE_STRING.match(left)) else -1
            cut = None if quote >= 0 or len(left) <= _LONG_BYTES else _CUT_PATTERN.search(left, len(left) - 4096)
            end = quote if quote >= 0 else cut.start() if cut is not None else -1
            if end >= 0:
                string = left[:end]
                del left[: end + (quote >= 0)]
                long = long or cut is not None
                if long:
                    try:
                        piece = _decode_string(string)
                    except ValueError:
                        broken = True
                        continue
                    encodable = encodable and piece is not None
                    if encodable and piece is not None:
                        text.add(piece)
                    string = bytearray(f"{_PLACEHOLDER} {len(taken)}".encode())
                if quote >= 0:
                    if long:
                        taken[string.decode()] = text if encodable else None
                    short += b'"' + string + b'"'
                    text = None
                    continue
        if ended:
            return bytes(short if text is None else short + b'"'), taken  # an open string is an error of JSON
        block = lines.readline(_LONG_BYTES)
        ended = len(block) < _LONG_BYTES or block.endswith(b"\n")
        left += block


def _decode_string(inside: bytearray) -> bytes | None:
    """Decode the inside of a JSON string to UTF-8; None if it has no UTF-8 form. Raises ValueError for invalid JSON."""
    string = b'"' + inside + b'"'
    try:
        return bytes(orjson.loads(string).encode())
    except orjson.JSONDecodeError:
        _parse_leniently(string)
        return None


_MAX_FIELD_CHARACTERS = (1 << 31) - 1


def read_csv(
    raw: BinaryIO, path: str, column: str, *, batch_bytes: int, scratch: str | None, faults: LineFaults
) -> Iterator[pa.Array]:
    """Yield texts as `columns.read_column`. Raises InputError that names the line where the row begins."""
    file = printable(path)
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    with open_decompressed(raw, path) as content:
        # drops a byte order mark; a byte that is not UTF-8 becomes a lone surrogate, which valid UTF-8 never yields
        decoded = io.TextIOWrapper(content, "utf-8-sig", errors="surrogateescape", newline="")
        is_tsv = re.search(r"\.tsv(\.\w+)?$", path, re.IGNORECASE)
        reader = csv.reader(decoded, delimiter="\t" if is_tsv else ",", strict=True)
        names: list[str] | None = None
        texts: list[bytes] = []
        size = 0
        while True:
            before = reader.line_num
            where = f"{file}:{before + 1}"
            try:
                row = next(reader)
                if not row:
                    continue  # an empty line
                if names is None:
                    names = row
                    if names.count(column) != 1:
                        raise missing_column_error(file, column, names)
                    place = names.index(column)
                    continue
                text = _row_text(row, names, place, column)
                if faults.whole_rows:
                    faults.look(dict(zip(names, row, strict=True)), {})
            except StopIteration:
                break
            except csv.Error as error:
                if names is None:
                    raise InputError(f"its first row is not CSV: {error}", where=where) from None
                lines = reader.line_num - before
                whole = f"this row of {lines:,} lines is" if lines > 1 else "this row is"
                faults.add(BadLine("not CSV", f"{whole} not CSV: {error}"), where)
                continue
            except BadLine as bad:
                faults.add(bad, where)
                continue
            if texts and (size + len(text) > batch_bytes or len(texts) == MAX_ROWS):
                yield large_strings(texts)
                texts, size = [], 0
            texts.append(text)
            size += len(text)
        if texts:
            yield large_strings(texts)


def _row_text(row: list[str], names: list[str], place: int, column: str) -> bytes:
    if len(row) != len(names):
        raise BadLine("not CSV", f"this row has {len(row)} fields, the first row has {len(names)}")
    try:
        return row[place].encode()
    except UnicodeEncodeError:
        raise BadLine("not UTF-8", f"{column!r} holds a byte that is not UTF-8") from None
