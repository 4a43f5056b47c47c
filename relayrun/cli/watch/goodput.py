"""`relayrun goodput`: where the node hours of runs went, every second of every node in one named part."""

from __future__ import annotations

import argparse

from relayrun.control.rundir.find import find_run
from relayrun.watch.goodput import view
from relayrun.watch.goodput.account import account
from relayrun.watch.status.run_status_view import dump
from relayrun.watch.status.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun goodput`."""
    parser.add_argument("names", nargs="+", metavar="RUN", help="run directory, or project/name below logs/runs")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the account of one or several runs. Raises RelayrunError."""
    found = [account(find_run(name)) for name in options.names]
    if options.json:
        values = [view.as_json(each) for each in found]
        print(dump(values if len(values) > 1 else values[0]))
        return 0
    for number, each in enumerate(found):
        if number:
            print()
        print(view.summary(each))
        for table in view.tables(each):
            print()
            show(table)
    return 0
