"""The supervisor's own lines in a job's log."""

from __future__ import annotations

import contextlib
import sys
import time

LOG_PREFIX = "[relayrun "


def log_line(text: str) -> None:
    """One line on standard error, with the time. Nobody ends of a file system of the log that is full, or away."""
    with contextlib.suppress(OSError):
        print(f"{LOG_PREFIX}{time.strftime('%Y-%m-%dT%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
