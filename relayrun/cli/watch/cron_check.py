"""`relayrun sentinel`: check the runs of folders once, from cron on a login node."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from pathlib import Path

from relayrun.errors import RelayrunError
from relayrun.watch import cron_check
from relayrun.watch.status.cron_check_record import may_report_failure

TIME_LIMIT_SECONDS = 240
"""Seconds that a check may take: a hanging file system or command would block all later checks."""


class _CheckTimeoutError(BaseException):
    """A check takes too long. Not an Exception: code that continues after errors must not continue after this."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun sentinel`."""
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a folder that runs lie in or below")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check the runs of each folder, and print problems that no notice reports; return 1 if a check failed."""
    before = signal.signal(signal.SIGALRM, _raise_timeout)
    failed = False
    try:
        for folder in options.folders:
            lines, error = _check_folder(folder.expanduser().absolute())
            for line in lines:
                print(line)
            if error:
                failed = True
                if may_report_failure(folder.expanduser().absolute(), now=time.time()):
                    print(f"error: {error}", file=sys.stderr)
    finally:
        signal.signal(signal.SIGALRM, before)
    return int(failed)


def _check_folder(folder: Path) -> tuple[list[str], str]:
    """Printed lines and error of one check; an error must not keep other folders from being checked."""
    signal.alarm(TIME_LIMIT_SECONDS)
    try:
        return cron_check.check_folder(folder, now=time.time()), ""
    except RelayrunError as error:
        return [], str(error)
    except _CheckTimeoutError:
        return [], f"{folder}: no end of this look in {TIME_LIMIT_SECONDS} s"
    except Exception:
        return [], f"{folder}: this look failed, which is a defect of relayrun\n{traceback.format_exc()}"
    finally:
        signal.alarm(0)


def _raise_timeout(_number: int, _frame: object) -> None:
    raise _CheckTimeoutError
