"""SIGUSR2 and SIGTERM only set a flag; the loop looks at it after each step. SIGUSR1 dumps the Python stacks.

Standard library only: the handlers are installed before torch is imported, which takes seconds in which a
signal must already be understood. A rank is started with SIGUSR1 and SIGUSR2 ignored, so that none can
kill it before that.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TextIO

log = logging.getLogger(__name__)

LEAVE_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


class SignalFlag:
    """Remembers the first signal that asked this process to leave."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._process = os.getpid()

    def install(self) -> None:
        """Catch the signals of LEAVE in this process; a forked child keeps the handler, but it does nothing there."""
        for number in LEAVE_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process and self.received is None:
            self.received = signal.Signals(number)


def dump_stacks_on_request(path: Path) -> None:
    """Append the stacks of all threads to `path` at every SIGUSR1, also while the main thread hangs in C.

    Where the file cannot be made they go to standard error.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the process lives
    except OSError as error:
        log.warning("stacks will go to standard error: %s", error)
        file = sys.stderr
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
