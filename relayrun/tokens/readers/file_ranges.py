"""Ranges of bytes of a large file: parts that several workers read at a time.

A range is a path below its file, which no file can have: `web.jsonl/bytes=0-1000`, or `web.jsonl/bytes=1000-` up to the
end. It holds the row groups of parquet that begin in it. Of jsonl it holds the lines that begin behind its first byte,
up to and with a line that begins at its end; of compressed jsonl its bytes are the gzip members or zstd frames that
begin in it. So the ranges of a file hold each row once and in order, wherever the file is cut.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pkgutil
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from relayrun.tokens.readers.contents import file_compression

_RANGE = re.compile(r"(.+)/bytes=(\d+)-(\d*)", re.DOTALL)
_BLOCK = 1 << 20

_MEMBER = {
    "gzip": re.compile(rb"\x1f\x8b\x08[\x00-\x1f]", re.DOTALL),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
    "bz2": re.compile(rb"BZh[1-9]\x31\x41\x59\x26\x53\x59"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
}
_LONGEST_HEAD = 10


def split_range(path: str) -> tuple[str, int, int | None]:
    """Return the file of a path, and the first byte and the end of its range; 0 and None for a whole file."""
    match = _RANGE.fullmatch(path) if "/bytes=" in path else None
    return (match[1], int(match[2]), int(match[3]) if match[3] else None) if match else (path, 0, None)


def file_of_range(path: str) -> str:
    return split_range(path)[0]


def range_bytes(path: str, file_size: int) -> int:
    """Return the bytes of a range, or of a whole file, of which `file_size` is the size."""
    _, begin, end = split_range(path)
    return max(0, min(file_size, file_size if end is None else end) - begin)


def range_of_file(file: tuple[str, int, int], path: str) -> tuple[str, int, int]:
    """Return the path, bytes and time of change of a range of an input file."""
    return path, range_bytes(path, split_range(file[0])[1] + file[1]), file[2]


def cut_path(path: str, offsets: list[int]) -> list[str]:
    """Return the ranges of a file, or of a range, that is cut at `offsets` inside it, ascending."""
    file, begin, end = split_range(path)
    if not offsets:
        return [path]
    bounds = [str(begin), *map(str, offsets), "" if end is None else str(end)]
    return [f"{file}/bytes={first}-{last}" for first, last in itertools.pairwise(bounds)]


class RangeLines:
    """The lines of a range of jsonl, read by `readline` as from a file."""

    def __init__(self, raw: BinaryIO, path: str, open_text: Callable[[Any, str], io.BufferedReader]) -> None:
        """`open_text` decompresses the beginning of a file and looks at its content. Raises as it does, and OSError or
        pa.ArrowException for torn members."""
        self._raw, (self._file, begin, end) = raw, split_range(path)
        first = next_member(raw, self._file, begin) if begin else 0
        self._after = None if end is None else next_member(raw, self._file, end)
        self._lines: io.BufferedReader | None = None
        self._is_last = False
        if not begin:
            self._lines = open_text(_section(raw, 0, self._after), self._file)
        elif first is not None:
            self._lines = _decompressed(raw, self._file, first, self._after)
            # the line that begins before, or with, the first byte is of the range before
            while (line := self._lines.readline(_BLOCK)) and not line.endswith(b"\n"):
                pass
            self._lines = self._lines if line else None

    def readline(self, size: int) -> bytes:
        """Return the rest of the line, or `size` bytes of it; nothing behind the last line."""
        if self._lines is None:
            return b""
        line = self._lines.readline(size)
        if self._after is not None and len(line) < size and not line.endswith(b"\n"):
            self._lines, self._after = _decompressed(self._raw, self._file, self._after, None), None
            self._is_last = True
            line += self._lines.readline(size - len(line))
        if self._is_last and line.endswith(b"\n"):
            self._lines = None
        return line


def _section(raw: BinaryIO, begin: int, end: int | None) -> Any:
    import pyarrow as pa

    return pa.PythonFile(raw, "r").get_stream(begin, (1 << 62 if end is None else end) - begin)


def _decompressed(raw: BinaryIO, file: str, begin: int, end: int | None) -> io.BufferedReader:
    return io.BufferedReader(decompress(_section(raw, begin, end), file_compression(file)), _BLOCK)


def decompress(raw: Any, compression: str | None) -> Any:
    """Return a file of the decompressed bytes of all members. It raises OSError or pa.ArrowException if one is torn."""
    import pyarrow as pa

    if compression in _DECOMPRESSORS:
        return _BlockFile(_member_blocks(raw, compression))
    # Arrow detects a truncated stream, the zstandard package does not
    return pa.CompressedInputStream(raw, compression) if compression else raw


_DECOMPRESSORS = {"gzip": "zlib:decompressobj", "bz2": "bz2:BZ2Decompressor", "xz": "lzma:LZMADecompressor"}


def _member_blocks(raw: Any, compression: str) -> Iterator[bytes]:
    """Yield the bytes of all members. Arrow takes zeros behind them, as tapes leave, for a fault of the file;
    lzma.LZMAFile ignores a torn second stream, and all behind padding. Not every Python has lzma."""
    make, rest = pkgutil.resolve_name(_DECOMPRESSORS[compression]), b""
    while rest or (rest := raw.read(_BLOCK)):
        if not (rest := rest.lstrip(b"\0")):  # padding
            continue
        stream = make(zlib.MAX_WBITS | 16) if compression == "gzip" else make()
        while not stream.eof:
            if getattr(stream, "needs_input", True) and not (rest := rest or raw.read(_BLOCK)):
                raise OSError(f"a member of {compression} has no end")
            try:
                yield stream.decompress(rest, _BLOCK)
            except MemoryError:
                raise
            except Exception as error:  # of zlib or lzma
                raise OSError(str(error)) from None
            rest = getattr(stream, "unconsumed_tail", b"")
        rest = stream.unused_data


class _BlockFile(io.RawIOBase):
    """A file of blocks of bytes."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._left = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left and (block := next(self._blocks, None)) is not None:
            self._left = memoryview(block)
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def next_member(raw: BinaryIO, file: str, begin: int, until: int | None = None) -> int | None:
    """Return where the first member from `begin` on begins; None if there is none before `until`. Every byte of a file
    that is not compressed will do. Bytes that only look like the head of a member are tried: they do not decompress."""
    compression = file_compression(file)
    if compression is None:
        return begin
    raw.seek(begin)
    block, place = b"", begin
    while (until is None or place < until) and (more := raw.read(_BLOCK)):
        block += more
        for match in _MEMBER[compression].finditer(block):
            with contextlib.suppress(OSError, ValueError):  # Arrow's errors are ValueErrors
                if _decompressed(raw, file, place + match.start(), None).read(_BLOCK):
                    return place + match.start()
        kept = min(len(block), _LONGEST_HEAD - 1)  # a head may begin in them
        place += len(block) - kept
        block = block[len(block) - kept :]
        raw.seek(place + kept)
    return None
