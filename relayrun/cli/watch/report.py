"""`relayrun report`, `goodput` and `metrics`: results of runs, the use of their node hours, metrics for Prometheus."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import stat
import sys
import time
from functools import partial
from pathlib import Path

from relayrun.control.rundir.find_runs import find_run, find_runs_of
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError
from relayrun.files import file_size, write_atomic
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
    # these read site files, data sets and configs: slow imports, not needed for goodput and metrics
    from relayrun.config.compose.writable import check_outputs
    from relayrun.watch.report import page, report_data

    check_outputs({"--html": target})
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


def add_metrics_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun metrics`."""
    words = "runs, projects, or folders of runs; default: all runs"
    parser.add_argument("names", nargs="*", metavar="RUN|FOLDER", help=words)
    to = parser.add_mutually_exclusive_group()
    words = "replace this file with the metrics, for the textfile collector of node_exporter"
    to.add_argument("--output", type=Path, metavar="FILE.prom", help=words)
    words = "answer on 127.0.0.1 until Ctrl-C, to requests with the key alone"
    to.add_argument("--serve", type=int, metavar="PORT", help=words)
    words = "file of the key for --serve, readable by you alone; made if it is missing"
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=words)
    parser.set_defaults(run=run_metrics)


def run_metrics(options: argparse.Namespace) -> int:
    """Print, write or serve the metrics. Raises RelayrunError."""
    from relayrun.watch import prometheus  # an extra brings its library

    if (options.key_file is None) != (options.serve is None):
        raise InputError("--serve and --key-file go together", hint="give both")
    runs = partial(find_runs_of, options.names)
    text = prometheus.metrics_text(runs(now=time.time()))
    if options.serve is not None:
        prometheus.serve(options.serve, read_key(options.key_file), lambda: runs(now=time.time()))
    elif options.output is not None:
        write_atomic(options.output, text, mode=0o644, durable=False)
    else:
        sys.stdout.write(text.decode())
    return 0


def read_key(path: Path) -> str:
    """Return the key in a file, which is made if it is missing. Raises InputError if others can read or write it."""
    if not path.exists():
        write_atomic(path, secrets.token_urlsafe(32), mode=0o600, new=True)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
            raise InputError("the key is not a file of this user alone", where=path, hint=f"chmod 600 {path}")
        if not (key := file.read().strip()):
            raise InputError("this file has no key", where=path, hint="remove it: the next call makes one")
    return key
