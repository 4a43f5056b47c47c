"""Long lines of JSON give what a parser gives for the whole line, and are refused where it refuses them."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relayrun.errors import InputError
from relayrun.tokens.readers import json_csv, texts
from relayrun.tokens.readers.faults import LineFaults

PIECES = [
    b"plain text ",
    b"a",
    b"u",
    b"0041",
    "é".encode(),
    "漢".encode(),
    "\U0001f600".encode(),
    b"\\n",
    b'\\"',
    b"\\\\",
    b"\\/",
    b"\\u0041",
    b"\\u00e9",
    b"\\ud83d\\ude00",
    b"\\uD800",
    b"\\ude00",
    b"\\u12",
    b"\\x",
    b"\\",
    b'"',
    b"\t",
    b"\x80",
    b"\xf0\x9f",
    b"{",
    b"}",
    b":",
    b",",
    b" ",
]
BAD = (b"\\uD800", b"\\ude00", b"\\u12", b"\\x", b"\\", b'"', b"\t", b"\x80", b"\xf0\x9f")
GOOD = [piece for piece in PIECES if piece not in BAD]


def strings(pieces: list[bytes]) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(pieces), max_size=60).map(b"".join)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_csv, "_LONG_BYTES", 40)
    monkeypatch.setattr(texts, "MAX_BYTES_IN_MEMORY", 60)


def read(content: bytes, column: str) -> Iterator[str | None]:
    options: dict[str, Any] = {"batch_bytes": 1000, "scratch": tempfile.gettempdir(), "faults": LineFaults()}
    for array in json_csv.read_jsonl(io.BytesIO(content), "x.jsonl", column, **options):
        array.validate(full=True)
        yield from array.to_pylist()


def expected(line: bytes, column: str) -> str | None:
    """By one parser alone; KeyError for what is no text, ValueError for one that is no UTF-8."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    value = row
    for name in [column] if column in row else column.split("."):
        value = value[name]
    if value is not None and not isinstance(value, str):
        raise KeyError
    if value is not None:
        value.encode()
    return value


@pytest.mark.slow
@given(good=st.booleans(), data=st.data(), end=st.sampled_from([b"\n", b"", b"\r\n", b"\nx", b"\n\n{}"]))
@settings(max_examples=250, deadline=None)
def test_a_long_line_reads_as_a_parser_reads_it(good: bool, data: st.DataObject, end: bytes) -> None:
    first, second, third = (data.draw(strings(GOOD if good else PIECES)) for _ in range(3))
    line = data.draw(
        st.sampled_from(
            [
                b'{"text": "%b", "other": "%b", "x": {"y": "%b"}}',
                b'{"%b": 1, "text": null, "text": "%b", "x": "%b"}',
                b'{"text": "%b", "text": "%b", "text": ["%b"]}',
                b'{"x": {"y": "%b", "text": "%b"}, "x.y": "%b"}',
                b' {"x": {"y" : "%b"} , "text":"%b","z":"%b" } ',
            ]
        )
    ) % (first, second, third)
    for column in ("text", "x.y"):
        try:
            right = expected(line, column)
        except (ValueError, KeyError, TypeError, AttributeError):
            with pytest.raises(InputError, match=r"^x\.jsonl:1: "):
                list(read(line + end, column))
        else:
            if end in (b"\nx", b"\n\n{}"):
                with pytest.raises(InputError, match=rf"^x\.jsonl:{end.count(10) + 1}: "):
                    list(read(line + end, column))
            else:
                assert list(read(line + end, column)) == [right]


@pytest.mark.slow
@given(pieces=st.lists(st.sampled_from(GOOD), min_size=1, max_size=4), times=st.integers(1, 200))
@example(pieces=[b"\\\\"], times=200)
@example(pieces=[b"\\ud83d\\ude00"], times=100)
@settings(max_examples=80, deadline=None)
def test_runs_of_escapes_are_cut_between_them(pieces: list[bytes], times: int) -> None:
    line = b'{"text": "' + b"".join(pieces) * times + b'"}'
    assert list(read(line + b"\n" + line, "text")) == [expected(line, "text")] * 2
