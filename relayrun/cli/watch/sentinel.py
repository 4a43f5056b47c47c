"""`relayrun sentinel`: one look after the runs of folders, from cron on a login node."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from pathlib import Path

from relayrun.errors import RelayrunError
from relayrun.watch import sentinel
from relayrun.watch.status.sentinel import may_complain

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
            lines, error = _look(folder.expanduser().absolute())
            for line in lines:
                print(line)
            if error:
                failed = True
                if may_complain(folder.expanduser().absolute(), now=time.time()):
                    print(f"error: {error}", file=sys.stderr)
    finally:
        signal.signal(signal.SIGALRM, before)
    return int(failed)


def _look(folder: Path) -> tuple[list[str], str]:
    """The lines of one look, and why it failed; a defect in one look keeps no other folder from being looked at."""
    signal.alarm(LIMIT)
    try:
        return sentinel.look(folder, now=time.time()), ""
    except RelayrunError as error:
        return [], str(error)
    except _TakesTooLongError:
        return [], f"{folder}: no end of this look in {LIMIT} s"
    except Exception:
        return [], f"{folder}: this look failed, which is a defect of relayrun\n{traceback.format_exc()}"
    finally:
        signal.alarm(0)


def _too_long(_number: int, _frame: object) -> None:
    raise _TakesTooLongError
