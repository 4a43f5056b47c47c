"""`relayrun logs` and `why`: the output of a run's jobs, and the first cause of the end of an attempt."""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

from relayrun.cli import add_run
from relayrun.control.rundir.find_runs import find_run
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.errors import RunDirError
from relayrun.files import last_lines
from relayrun.terminal import inert
from relayrun.watch import follow
from relayrun.watch.text import json_text

POLL_SECONDS = 1.0


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun logs`."""
    add_run(parser)
    parser.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="last lines of each file (50)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-f", "--follow", action="store_true", help="go on with what is added, job after job")
    which.add_argument("--attempt", type=int, metavar="N", help="of this attempt, not the newest one")
    parser.add_argument("--rank", type=int, metavar="R", help="last words and stacks of one rank")
    parser.set_defaults(run=run_logs)


def run_logs(options: argparse.Namespace) -> int:
    """Print the end of a job's logs and, with --follow, new output until the chain ends. Raises RunDirError."""
    found = find_run(options.name)
    if options.rank is not None:
        newest = max(found.attempt_numbers(), default=None)
        attempt = options.attempt if options.attempt is not None else newest
        if attempt is None:
            raise RunDirError("no attempt of this run has begun", where=found.path)
        print(follow.rank_messages(found, attempt, options.rank))
        return 0
    following, printer = follow.ChainLogFollower(found), LogPrinter()
    for path in follow.job_log_files(found, options.attempt):
        text, following.seen[path] = last_lines(path, options.lines)
        printer.print(path, text)
    if options.follow:
        follow_logs(found, following, printer)
    return 0


def follow_logs(run: Run, following: follow.ChainLogFollower, printer: LogPrinter) -> None:
    """Print new output until the chain has ended and the logs are quiet, or until Ctrl-C."""
    quiet = 0
    try:
        while stop_reason(run) is None or quiet < 3:
            added = following.poll()
            quiet = 0 if added else quiet + 1
            for path, text in added:
                printer.print(path, text)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return
    print(f"the chain has ended: {stop_reason(run)}", file=sys.stderr)


class LogPrinter:
    """Prints parts of files, below the file's name if it differs from the last part's."""

    def __init__(self) -> None:
        self._shown: Path | None = None
        self._in_line = False

    def print(self, path: Path, text: bytes) -> None:
        """Print a part of a file. A progress bar that goes on begins a new line."""
        if path != self._shown:
            print(f"{'' if self._shown is None else chr(10)}==> {path} <==", flush=True)
            self._shown, self._in_line = path, False
        if self._in_line and text.startswith(b"\r") and not text.startswith(b"\r\n"):
            text = b"\n" + text[1:]
        print(readable_log(text), end="", flush=True)
        self._in_line = not text.endswith((b"\r", b"\n"))


_COLOUR = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
"""ANSI sequences for colours, and for the places of the cursor."""


def readable_log(text: bytes) -> str:
    """Return a part of a log without colours, each line in its last state: a progress bar overwrites its line with
    carriage returns. A line that is no UTF-8 is read as Latin-1."""
    lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in text.split(b"\n")]
    return _COLOUR.sub("", "\n".join(map(_decoded, lines)) + "\n" * text.endswith(b"\r"))


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line.decode("latin-1")


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun why`."""
    add_run(parser)
    parser.add_argument("--attempt", type=int, metavar="N", help="of this attempt, not the newest one")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run_why)


def run_why(options: argparse.Namespace) -> int:
    """Print why an attempt ended. Raises RunDirError if there is no such run or attempt."""
    from relayrun.watch import why  # loads the trainers, without which `logs` begins sooner

    folder = Path(options.name).expanduser()
    found = Run(folder.absolute()) if (folder / "attempts").is_dir() else find_run(options.name)
    numbers = found.attempt_numbers()
    if options.attempt is not None and options.attempt not in numbers:
        known = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise RunDirError(f"this run has no attempt {options.attempt}; there are: {known}", where=found.attempts)
    explanation = why.explain(found, options.attempt)
    if options.json:
        print(json_text(asdict(explanation)))
    else:
        print("\n".join(inert(line) for line in why.explanation_lines(explanation)))
    return 0
