"""`relayrun why`: the first cause of the end of an attempt."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from relayrun.cli import add_run
from relayrun.control.rundir.find_runs import find_run
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.terminal import inert
from relayrun.watch import why
from relayrun.watch.text import json_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun why`."""
    add_run(parser)
    parser.add_argument("--attempt", type=int, metavar="N", help="of this attempt, not the newest one")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print why an attempt ended. Raises RunDirError if there is no such run or attempt."""
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
