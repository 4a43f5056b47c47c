"""The supervisor's own lines in a job's log."""

from __future__ import annotations

import sys
import time

PREFIX = "[relayrun "


def log(text: str) -> None:
    """One line on standard error, with the time."""
    print(f"{PREFIX}{time.strftime('%Y-%m-%dT%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
