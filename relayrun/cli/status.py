"""`relayrun status`: where one run, or every run, stands."""

from __future__ import annotations

import argparse
import time

from relayrun.monitoring import run_status, run_status_view, unsent
from relayrun.rundir import find


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun status`."""
    parser.add_argument("name", nargs="?", metavar="RUN", help="run directory, or project/name below logs/runs")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print where one run, or every run, stands."""

    now = time.time()
    if options.name is not None:
        run = find.find_run(options.name)
        facts = run_status.gather(run, run_status.ask(run), now=now)
        if options.json:
            print(run_status_view.dump(run_status_view.as_json(facts)))
        else:
            run_status_view.show(run_status_view.one(facts, now=now))
        unsent.send_in_background(run)
        return 0
    runs = find.every_run()
    found = run_status.gather_all(runs, now=now)
    if options.json:
        print(run_status_view.dump([run_status_view.as_json(entry) for entry in found]))
    elif found:
        run_status_view.show(run_status_view.many(found))
    else:
        print(f"no runs below {find.RUNS}")
    for run in runs:
        unsent.send_in_background(run)
    return 0
