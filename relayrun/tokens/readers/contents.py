"""Tells by its first bytes what a file is: compressed, columns, an error page, or a pointer in place of the file. Tells
by its last bytes that it is torn.

A name says what a file should be; `content_fault` compares it with `HEAD_BYTES` of the file. Only contents that this
module knows are faults: unknown bytes are left to the reader. This module does not import Arrow.
"""

from __future__ import annotations

import json
import os
import re
from typing import Literal

from relayrun.errors import InputError
from relayrun.tokens.stores.urls import printable

HEAD_BYTES = 512

UNFINISHED = (".aria2", ".part", ".partial", ".crdownload", ".incomplete", ".filepart", ".st")
"""Endings of downloads that have not ended, or of the note that says so of the file beside it."""

_CONTENTS: tuple[tuple[str, re.Pattern[bytes]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE | re.DOTALL if name == "HTML" else re.DOTALL))
    for name, pattern in (
        ("gzip", rb"\x1f\x8b"),
        ("zstd", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
        ("bzip2", rb"BZh[1-9]\x31\x41\x59\x26\x53\x59"),
        ("xz", rb"\xfd7zXZ\x00"),
        ("lz4", rb"\x04\x22\x4d\x18"),
        ("zip", rb"PK\x03\x04"),
        ("parquet", rb"PAR1"),
        ("Arrow", rb"ARROW1"),
        ("Git LFS", rb"version https://git-lfs\.github\.com/spec/"),
        ("HTML", rb"(?:\xef\xbb\xbf)?\s*(?:<!doctype html|<html|<\?xml[^>]*>\s*<(?:!doctype html|html|error))"),
        ("JSON", rb"(?:\xef\xbb\xbf)?\s*\{\s*[\"}]"),
        ("tar", rb".{257}ustar"),
    )
)


def file_compression(path: str) -> Literal["gzip", "zstd"] | None:
    """Return the compression of a text file by its name."""
    name = path.lower()
    return "gzip" if name.endswith(".gz") else "zstd" if name.endswith((".zst", ".zstd")) else None


def content_fault(path: str, head: bytes, expected: str | None) -> InputError | None:
    """Return the fault of a file that begins with `head`, at most `HEAD_BYTES`. `expected`: the content that its name
    promises, None for text."""
    promised = expected or "text"
    found = next((name for name, pattern in _CONTENTS if pattern.match(head)), None)
    leave = "or leave it out with --filter-out"
    if not head and expected is not None:
        words, hint = f"cannot be read, it may be torn: 0 bytes are no {expected}", f"fetch the file again, {leave}"
    elif found is None or found == expected or (expected is None and found == "JSON"):
        return None
    elif found == "Git LFS":
        words, hint = "a pointer of Git LFS in place of the file", f"run `git lfs pull` in the data set, {leave}"
    elif found == "HTML":
        words, hint = f"a page of HTML, often an error's, not {promised}", f"fetch the file again, {leave}"
    else:
        words = f"its content is {found}, not {promised} as its name says"
        hint = f"give the file the ending of its content, {leave}"
    return InputError(words, where=printable(path), hint=hint)


_TAIL_BYTES = 1 << 16
_SMALL_BYTES = 1 << 22
"""The blocks of zstd are counted in smaller files."""
_INFLATE_RATIO = 1032
"""Deflate makes at most so many bytes of one."""

_STREAM_END = b"\xff\xff\xff\xff"


def is_torn(file: int, size: int, head: bytes, content: str | None) -> bool:
    """Return whether the last bytes of the open `file` prove that its end is missing. `head`: its first bytes;
    `content`: "JSON" for lines of JSON, else as in `content_fault`."""
    kept = _TAIL_BYTES if content == "JSON" else 64
    tail = os.pread(file, kept, max(0, size - kept))
    if content == "parquet" and head.startswith(b"PAR1"):
        return tail[-4:] not in (b"PAR1", b"PARE")
    if content == "Arrow" and head.startswith(b"ARROW1"):
        return not tail.endswith(b"ARROW1")
    if content == "Arrow" and head.startswith(_STREAM_END):  # Arrow 0.14 and older wrote another mark
        return bool(tail.strip(b"\0")) and not (tail.endswith(bytes(4)) and tail.rstrip(b"\0").endswith(_STREAM_END))
    if content == "gzip" and head.startswith(b"\x1f\x8b"):  # ends with the bytes of the last member, which a torn file has by chance
        return int.from_bytes(tail[-4:], "little") > _INFLATE_RATIO * size
    if content == "zstd":
        return size <= _SMALL_BYTES and _is_torn_zstd(file, size)
    if content in (None, "JSON") and tail.endswith(b"\0"):
        return not head.startswith(b"\0")
    *before, last = tail.split(b"\n")
    if content != "JSON" or not last.startswith(b"{") or not (before or size <= len(tail)):
        return False
    try:
        return json.loads(last.decode("utf-8", "surrogateescape")) is None
    except (ValueError, RecursionError):
        return True


def _is_torn_zstd(file: int, size: int) -> bool:
    """Walk over the frames and blocks of zstd (RFC 8878)."""

    def number(at: int, length: int) -> int:
        return int.from_bytes(os.pread(file, length, at), "little")

    at = 0
    while at < size:
        magic = number(at, 4)
        if magic & 0xFFFFFFF0 == 0x184D2A50:  # a frame to skip
            at += 8 + number(at + 4, 4)
            continue
        if magic != 0xFD2FB528:
            return False  # other bytes behind a whole frame
        described = number(at + 4, 1)
        single, sizes = described >> 5 & 1, described >> 6
        at += 5 + (1 - single) + (0, 1, 2, 4)[described & 3] + (single, 2, 4, 8)[sizes]
        is_last = False
        while not is_last and at < size:
            block = number(at, 3)
            is_last = bool(block & 1)
            at += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
        at += 4 * (described >> 2 & 1)
        if not is_last:
            return True
    return at > size
