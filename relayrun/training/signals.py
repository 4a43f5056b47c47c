"""SIGUSR2 and SIGTERM only set a flag; the loop looks at it after each step.

Standard library only: the handler is installed before torch is imported, which takes seconds in which a
signal must already be understood. A rank is started with SIGUSR2 ignored, so that none can kill it
before that.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

LEAVE = (signal.SIGUSR2, signal.SIGTERM)


class SignalFlag:
    """Remembers the first signal that asked this process to leave."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._process = os.getpid()

    def install(self) -> None:
        """Catch the signals of LEAVE in this process; a forked child keeps the handler, but it does nothing there."""
        for number in LEAVE:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process and self.received is None:
            self.received = signal.Signals(number)
