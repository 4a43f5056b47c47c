"""`relayrun goodput`: where the node hours of runs went, every second of every node in one named part."""

from __future__ import annotations

import argparse

from relayrun.control.rundir.find_runs import find_run
from relayrun.watch.goodput import tables
from relayrun.watch.goodput.account import account_for_run
from relayrun.watch.status.run_status_text import json_text
from relayrun.watch.status.terminal import print_table


def add_goodput_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun goodput`."""
    parser.add_argument("names", nargs="+", metavar="RUN", help="run directory, or project/name below logs/runs")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run_goodput)


def run_goodput(options: argparse.Namespace) -> int:
    """Print the account of one or several runs. Raises RelayrunError."""
    found = [account_for_run(find_run(name)) for name in options.names]
    if options.json:
        values = [tables.account_as_json(each) for each in found]
        print(json_text(values if len(values) > 1 else values[0]))
        return 0
    for number, each in enumerate(found):
        if number:
            print()
        print(tables.account_summary(each))
        for table in tables.all_tables(each):
            print()
            print_table(table)
    return 0
