"""The lines that a growing log has gained since it was last read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

LONGEST_LINE = 1 << 16
"""A longer line is no line of progress: its rest is left out."""

READ_BYTES = 1 << 20

_LINE_END = re.compile(rb"[\r\n]")
"""A progress bar ends its lines with a carriage return alone, and may never write another end."""


class LogFollower:
    """Whole lines of a file, each given once, from byte `offset` on; empty ones are left out.

    What has no end of line yet is kept for later, and what never gets one is never given: half a number is another
    number. A file that has become shorter is read from its beginning.
    """

    def __init__(self, path: str | os.PathLike[str], *, offset: int = 0) -> None:
        self._path = Path(path)
        self._offset = offset
        self._rest = b""

    def read(self) -> Iterator[str]:
        """The lines that are new and whole; none while there is no file. Raises OSError."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self._offset:
                self._offset, self._rest = 0, b""
            file.seek(self._offset)
            while chunk := file.read(READ_BYTES):
                self._offset += len(chunk)
                *lines, rest = _LINE_END.split(self._rest + chunk)
                self._rest = rest[:LONGEST_LINE]
                for line in filter(None, lines):
                    yield line[:LONGEST_LINE].decode("utf-8", errors="replace")
