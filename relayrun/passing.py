"""Large files that are written once, from begin to end."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

WINDOW = 32 << 20
"""Bytes of a file that wait in memory to be written, about; as many are on their way to the disk."""


class PassingFile(io.FileIO):
    """A file for writing that does not pile up in the page cache.

    The kernel is told early to write and to forget what was written. So checkpoints and shards do not push the
    data that training reads out of memory, the disk has no burst at the sync, and a few pages serve the whole file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self._done = self._under_way = 0
        """Ends of the window that should be on disk and of the one behind it."""

    def write(self, data: Any) -> int:
        """All of `data`, bytes or a buffer of them."""
        view = memoryview(data)
        if not view.nbytes:
            return 0  # Python cannot look at nothing as bytes
        view = view.cast("B")
        for begin in range(0, len(view), WINDOW):
            piece = view[begin : begin + WINDOW]
            while piece:
                piece = piece[super().write(piece) :]
            at = self.tell()
            if at - self._under_way >= WINDOW:
                self._forget(self._done, at)
                self._done, self._under_way = self._under_way, at
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """As of any file; what is written again counts as new."""
        size = super().truncate(size)
        self._done, self._under_way = min(self._done, size), min(self._under_way, size)
        return size

    def close(self) -> None:
        if not self.closed:
            self._forget(self._done, self.tell())
        super().close()

    def _forget(self, begin: int, end: int) -> None:
        """Begins to write what is not on disk yet, and drops the rest (Linux, mm/fadvise.c)."""
        with contextlib.suppress(OSError):  # advice alone
            os.posix_fadvise(self.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
