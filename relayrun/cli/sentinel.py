"""`relayrun sentinel`: one look after the runs of folders, from cron on a login node."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from relayrun.errors import RelayrunError
from relayrun.monitoring import sentinel

LIMIT = 240
"""Seconds that a look may take: a file system or a command that hangs would keep all later ones from looking."""


class _TakesTooLongError(BaseException):
    """A look takes too long; no duty that goes on after errors goes on after this."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun sentinel`."""
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a folder that runs lie in or below")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look once after each folder, and print what nobody else is told; the exit code is 1 where a look failed."""
    before = signal.signal(signal.SIGALRM, _too_long)
    failed = False
    try:
        for folder in options.folders:
            signal.alarm(LIMIT)
            try:
                for line in sentinel.look(folder.expanduser().absolute(), now=time.time()):
                    print(line)
            except (RelayrunError, _TakesTooLongError) as error:
                failed = True
                words = error if isinstance(error, RelayrunError) else f"{folder}: no end of this look in {LIMIT} s"
                print(f"error: {words}", file=sys.stderr)
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    return int(failed)


def _too_long(_number: int, _frame: object) -> None:
    raise _TakesTooLongError
