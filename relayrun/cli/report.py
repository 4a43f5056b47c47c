"""`relayrun report`: what the attempts of a run did, and its loss."""

from __future__ import annotations

import argparse
from pathlib import Path

from relayrun.config.writable import check_outputs
from relayrun.errors import RunDirError
from relayrun.monitoring import report
from relayrun.monitoring.run_status_view import show
from relayrun.rundir.find import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun report`."""
    parser.add_argument("name", metavar="RUN", help="run directory, or project/name below logs/runs")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the relay and the loss into this file, too")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a table of the attempts and the loss curve. Raises RelayrunError."""
    check_outputs({"--png": options.png})
    run = find_run(options.name)
    found = report.read_report(run)
    if not found.attempts:
        raise RunDirError("no attempt of this run has begun", where=run.path, hint=f"relayrun status {options.name}")
    show(report.attempts_table(found))
    if found.iterations:
        print(report.terminal_curve(found))
    if options.png is not None:
        report.write_png(found, options.png)
        print(options.png)
    return 0
