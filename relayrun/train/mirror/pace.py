"""How fast checkpoints are copied."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

COPY_PIECE_BYTES = 8 << 20
"""Bytes that are copied at a time."""


@dataclass
class CopyRateLimit:
    """Keeps copying below so many bytes a second, on average since it began.

    `sleep` and `clock` are those of `time`, but in tests.
    """

    bytes_per_second: float | None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _began: float | None = None
    _bytes: int = 0

    def spend(self, count: int) -> None:
        """Wait until so many more bytes may have been copied."""
        if self.bytes_per_second is None:
            return
        self._began = self.clock() if self._began is None else self._began
        self._bytes += count
        wait = self._began + self._bytes / self.bytes_per_second - self.clock()
        if wait > 0:
            self.sleep(wait)
