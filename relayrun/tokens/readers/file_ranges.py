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
import re
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from relayrun.errors import RelayrunError
from relayrun.tokens.readers.contents import file_compression
from relayrun.tokens.stores.urls import join_path, open_input

SMALLEST_RANGE = 32 << 20
"""Least bytes of a range: a start of a task costs as much as some megabytes of text."""

_RANGE = re.compile(r"(.+)/bytes=(\d+)-(\d*)", re.DOTALL)
_BLOCK = 1 << 20
_SEARCHED_BYTES = 256 << 20
"""A file whose next member begins farther away than this is not cut."""

_MEMBER = {"gzip": re.compile(rb"\x1f\x8b\x08[\x00-\x1f]", re.DOTALL), "zstd": re.compile(rb"\x28\xb5\x2f\xfd")}
_MEMBER_HEAD = 4


def split_range(path: str) -> tuple[str, int, int | None]:
    """Return the file of a path, and the first byte and the end of its range; 0 and None for a whole file."""
    match = _RANGE.fullmatch(path)
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


def deal_in_ranges(dataset: str, files: Sequence[tuple[str, int, int]], tasks: int) -> list[list[str]]:
    """Deal files, which are cut into ranges, in order onto at most `tasks` parts of about the same bytes; none if no
    file has the bytes of two parts."""
    total = sum(size for _, size, _ in files)
    share = max(total / tasks, SMALLEST_RANGE)
    if not files or max(size for _, size, _ in files) < 2 * share:
        return []
    parts: list[list[str]] = [[] for _ in range(tasks)]
    place = 0
    for file in files:
        name, size, _ = file
        offsets: list[int] = []
        with contextlib.suppress(RelayrunError, OSError):  # the task of the file reports it
            offsets = cut_offsets(join_path(dataset, name), size, round(size / share))
        for path in cut_path(name, offsets):
            _, size, _ = range_of_file(file, path)
            parts[min(tasks - 1, int((place + size / 2) * tasks / total))].append(path)
            place += size
    return [part for part in parts if part]


def cut_path(path: str, offsets: list[int]) -> list[str]:
    """Return the ranges of a file, or of a range, that is cut at `offsets` inside it, ascending."""
    file, begin, end = split_range(path)
    if not offsets:
        return [path]
    bounds = [str(begin), *map(str, offsets), "" if end is None else str(end)]
    return [f"{file}/bytes={first}-{last}" for first, last in itertools.pairwise(bounds)]


def cut_offsets(path: str, size: int, pieces: int) -> list[int]:
    """Return up to `pieces` - 1 offsets that cut a file or range of `size` bytes evenly; fewer where it has few row
    groups, or its members of gzip or zstd are large; none for formats that are read from the beginning."""
    from relayrun.tokens.readers.arrow_files import open_parquet, row_group_starts  # on demand: Arrow
    from relayrun.tokens.readers.inputs import JSON_LINES, PARQUET, file_format

    file, begin, _ = split_range(path)
    wanted = [begin + size * piece // pieces for piece in range(1, pieces)]
    found: set[int] = set()
    if file_format(file) is PARQUET:
        with open_parquet(file) as parquet:
            starts = row_group_starts(parquet)[1:]
        found = {min((abs(start - offset), start) for start in starts)[1] for offset in wanted if starts}
    elif file_format(file) is JSON_LINES:
        with open_input(file) as raw:
            for offset in wanted:
                member = _next_member(raw, file, offset, offset + _SEARCHED_BYTES)
                if member is None:
                    break
                found.add(member)
    return sorted(offset for offset in found if begin < offset < begin + size)


class RangeLines:
    """The lines of a range of jsonl, read by `readline` as from a file."""

    def __init__(self, raw: BinaryIO, path: str, open_text: Callable[[Any, str], io.BufferedReader]) -> None:
        """`open_text` decompresses the beginning of a file and looks at its content. Raises as it does, and OSError or
        pa.ArrowException for torn members."""
        self._raw, (self._file, begin, end) = raw, split_range(path)
        first = _next_member(raw, self._file, begin) if begin else 0
        self._after = None if end is None else _next_member(raw, self._file, end)
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
    import pyarrow as pa

    section, compression = _section(raw, begin, end), file_compression(file)
    return io.BufferedReader(pa.CompressedInputStream(section, compression) if compression else section, _BLOCK)


def _next_member(raw: BinaryIO, file: str, begin: int, until: int | None = None) -> int | None:
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
        kept = min(len(block), _MEMBER_HEAD - 1)
        place += len(block) - kept
        block = block[len(block) - kept :]
        raw.seek(place + kept)
    return None
