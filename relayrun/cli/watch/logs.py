"""`relayrun logs`: the output of a run's jobs."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from relayrun.cli import add_run
from relayrun.control.rundir.find_runs import find_run
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.errors import RunDirError
from relayrun.files import last_lines
from relayrun.watch import follow

POLL_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun logs`."""
    add_run(parser)
    parser.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="last lines of each file (50)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-f", "--follow", action="store_true", help="go on with what is added, job after job")
    which.add_argument("--attempt", type=int, metavar="N", help="of this attempt, not the newest one")
    parser.add_argument("--rank", type=int, metavar="R", help="last words and stacks of one rank")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the end of a job's logs and, with --follow, new output until the chain ends. Raises RunDirError."""
    found = find_run(options.name)
    if options.rank is not None:
        newest = max(found.attempt_numbers(), default=None)
        attempt = options.attempt if options.attempt is not None else newest
        if attempt is None:
            raise RunDirError("no attempt of this run has begun", where=found.path)
        print(follow.rank_messages(found, attempt, options.rank))
        return 0
    shown: Path | None = None
    following = follow.ChainLogFollower(found)
    for path in follow.job_log_files(found, options.attempt):
        text, following.seen[path] = last_lines(path, options.lines)
        shown = print_log(path, text, shown)
    if options.follow:
        follow_logs(found, following, shown)
    return 0


def follow_logs(run: Run, following: follow.ChainLogFollower, shown: Path | None) -> None:
    """Print new output until the chain has ended and the logs are quiet, or until Ctrl-C."""
    quiet = 0
    try:
        while stop_reason(run) is None or quiet < 3:
            added = following.poll()
            quiet = 0 if added else quiet + 1
            for path, text in added:
                shown = print_log(path, text, shown)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return
    print(f"the chain has ended: {stop_reason(run)}", file=sys.stderr)


def print_log(path: Path, text: bytes, shown: Path | None) -> Path:
    """Print text of a file, below the file's name if it differs from `shown`; return the file."""
    if path != shown:
        print(f"{'' if shown is None else chr(10)}==> {path} <==", flush=True)
    print(re.sub(r"\r\n?", "\n", text.decode("utf-8", "surrogateescape")), end="", flush=True)
    return path
