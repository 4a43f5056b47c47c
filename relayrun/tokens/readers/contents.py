"""Tells by its bytes what a file is: compressed, columns, torn, an error page, or a pointer in place of the file.

A name says what a file should be; `content_fault` compares it with `HEAD_BYTES` of the file. Only contents that this
module knows are faults: unknown bytes are left to the reader. This module does not import Arrow.
"""

from __future__ import annotations

import codecs
import os
import re

from relayrun.errors import InputError
from relayrun.tokens.stores.urls import printable

HEAD_BYTES = 512
TAR_ARCHIVE = "tar archive"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2", ".xz": "xz"}
"""Compressions by the ending of a name; all but xz are names of Arrow's codecs."""

_CONTENTS: tuple[tuple[str, re.Pattern[bytes]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE | re.DOTALL if name == "HTML" else re.DOTALL))
    for name, pattern in (
        ("gzip", rb"\x1f\x8b"),
        ("zstd", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
        ("bz2", rb"BZh[1-9]\x31\x41\x59\x26\x53\x59"),
        ("xz", rb"\xfd7zXZ\x00"),
        ("lz4", rb"\x04\x22\x4d\x18"),
        ("zip", rb"PK\x03\x04"),
        ("parquet", rb"PAR1"),
        ("Arrow", rb"ARROW1"),
        ("Git LFS", rb"version https://git-lfs\.github\.com/spec/"),
        ("git-annex", rb"/annex/objects/"),
        ("zeros", rb"\0+\Z"),
        ("HTML", rb"(?:\xef\xbb\xbf)?(?>\s+|<!--.*?-->|<\?xml[^>]*>)*+<(?:!doctype html|html|head\b|error\b)"),
        ("JSON", rb"(?:\xef\xbb\xbf)?\s*\{\s*[\"}]"),
        (TAR_ARCHIVE, rb".{257}ustar"),
        ("PDF", rb"%PDF-"),
        ("Avro, ORC, SQLite or HDF5", rb"Obj\x01|ORC.{0,64}\0|SQLite format 3\0|\x89HDF\r\n\x1a\n"),
        ("lzma or a pickle", rb"\x5d\0\0|\x80[\x02-\x05]"),
    )
)


def file_compression(path: str) -> str | None:
    """Return the compression of a text file by its name."""
    name = path.lower()
    return "gzip" if name.endswith(".tgz") else COMPRESSIONS.get(os.path.splitext(name)[1])


def text_bytes(path: str, size: int) -> int:
    """Return the bytes of a local file's text modulo 2^32, which gzip says at its end and zstd in its head; 0 if they
    are unknown. Raises OSError, ImportError and ZstdError."""
    if (compression := file_compression(path)) is None:
        return size % (1 << 32)
    with open(path, "rb", buffering=0) as file:
        if compression == "zstd":
            import zstandard  # on demand: most data sets have no such file

            return max(0, zstandard.frame_content_size(file.read(HEAD_BYTES))) % (1 << 32)
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(), "little") if compression == "gzip" else 0


def uncompressed_name(path: str) -> str:
    """Return a path without the ending of a compression."""
    name, ending = os.path.splitext(path)
    return name if ending.lower() in COMPRESSIONS else path


def is_text_file(path: str) -> bool:
    """Return whether a file is one text, by its name."""
    return uncompressed_name(path).lower().endswith(".txt")


def _is_utf8(head: bytes) -> bool:
    try:
        return b"\0" not in codecs.getincrementaldecoder("utf-8")().decode(head).encode()
    except UnicodeDecodeError:
        return False


def content_fault(path: str, head: bytes, expected: str | None) -> InputError | None:
    """Return the fault of a file that begins with `head`, at most `HEAD_BYTES`. `expected`: the content that its name
    promises, None for text."""
    promised = expected or "text"
    found = next((name for name, pattern in _CONTENTS if pattern.match(head)), None)
    leave = "or leave it out with --filter-out"
    if not head and expected is not None:
        words, hint = f"cannot be read, it may be torn: 0 bytes are no {expected}", f"fetch the file again, {leave}"
    elif found is None and expected is None and is_text_file(path) and not _is_utf8(head):
        words, hint = "its first bytes are no text in UTF-8", f"convert it, as `iconv -f UTF-16 -t UTF-8` does, {leave}"
    elif found is None or found == expected or (expected is None and found == "JSON"):
        return None
    elif found in ("Git LFS", "git-annex"):
        command = "git lfs pull" if found == "Git LFS" else "git annex get"
        words, hint = f"a pointer of {found} in place of the file", f"run `{command}` in the data set, {leave}"
    elif found in ("HTML", "zeros"):
        what = "a page of HTML, often an error's" if found == "HTML" else "bytes of zero"
        words, hint = f"{what}, not {promised}", f"fetch the file again, {leave}"
    else:
        words = f"its content is {found}, not {promised} as its name says"
        hint = f"give the file the ending of its content, {leave}"
    return InputError(words, where=printable(path), hint=hint)


_STREAM = b"\xff" * 4  # of Arrow; zeros may follow its end
_ENDS = {b"PAR1": (b"PAR1", b"PARE"), b"ARROW1": (b"ARROW1",), b"{": (b"}",), _STREAM: (_STREAM + bytes(4), bytes(12))}
"""Last bytes of whole files by their first ones: of parquet, Arrow, lines of JSON, and streams of Arrow."""


def is_torn(path: str) -> bool:
    """Return whether its last bytes prove that a file is torn; False if it cannot be read, as below a URL."""
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(HEAD_BYTES)
            file.seek(max(0, os.fstat(file.fileno()).st_size - HEAD_BYTES))
            tail = file.read()
    except OSError:
        return False
    if head[257:262] == b"ustar":
        return tail.strip(b"\0") != b""  # blocks of zeros end it
    if is_text_file(path):
        return False
    if head.startswith(b"WARC/"):
        return not tail.endswith(b"\r\n\r\n")
    tail = tail.rstrip()
    ends = next((ends for begin, ends in _ENDS.items() if head.startswith(begin)), (b"",))
    return tail != b"" and not tail.endswith(ends)
