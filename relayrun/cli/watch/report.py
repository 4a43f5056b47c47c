"""`relayrun report` and `relayrun goodput`: the results of runs and the use of their node hours."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from relayrun.config.compose.writable import check_outputs
from relayrun.control.rundir.find_runs import find_run
from relayrun.control.rundir.run import Run
from relayrun.files import file_size
from relayrun.progress import Progress
from relayrun.publishing import published_file
from relayrun.watch.goodput import tables
from relayrun.watch.goodput.account import account_for_run
from relayrun.watch.text import json_text


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun report`."""
    parser.add_argument("names", nargs="+", metavar="RUN", help="run directory, or project/name below logs/runs")
    words = "write the page into this file (default: report-NAME.html here, if nothing else is asked for)"
    parser.add_argument("--html", type=Path, metavar="FILE", help=words)
    parser.add_argument("--text", action="store_true", help="attempts and goodput in the terminal")
    parser.set_defaults(run=run_report)


def run_report(options: argparse.Namespace) -> int:
    """Write a page about the runs, or print them. Raises RelayrunError."""
    runs = [find_run(name) for name in options.names]
    target = options.html
    if target is None and not options.text:
        names = "-".join(run.path.name for run in runs)
        target = Path(f"report-{re.sub(r'[^A-Za-z0-9._-]+', '_', names)[:100]}.html")
    check_outputs({"--html": target})
    # reads data sets and configs: slow imports, not needed for goodput
    from relayrun.watch.report import page, report_data

    found = []
    for run in runs:
        with _reading(run):
            found.append(report_data.read_report_data(run))
    for each in found if options.text else ():
        report_data.attempts_table(each).print()
        print(tables.account_summary(each.account))
        tables.parts_table(each.account).print()
    if target is not None:
        with published_file(target) as temporary:
            temporary.write_text(page.report_page(found, now=time.time()), encoding="utf-8")
        print(target)
    return 0


def _reading(run: Run) -> Progress:
    attempts = map(run.attempt, run.attempt_numbers())
    return Progress(f"reading {run.path.name}", sum(file_size(attempt.metrics) for attempt in attempts))


def add_goodput_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun goodput`."""
    parser.add_argument("names", nargs="+", metavar="RUN", help="run directory, or project/name below logs/runs")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run_goodput)


def run_goodput(options: argparse.Namespace) -> int:
    """Print the account of each run. Raises RelayrunError."""
    found = []
    for run in map(find_run, options.names):
        with _reading(run):
            found.append(account_for_run(run))
    if options.json:
        values = [tables.account_as_json(account) for account in found]
        print(json_text(values if len(values) > 1 else values[0]))
        return 0
    for number, account in enumerate(found):
        print("\n" * bool(number) + tables.account_summary(account))
        for table in tables.account_tables(account):
            print()
            table.print()
    return 0
