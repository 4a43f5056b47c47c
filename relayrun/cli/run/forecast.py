"""`relayrun forecast`: the expected effective training time at a number of nodes and a rate of failures."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from relayrun.control.rundir.find_runs import find_run
from relayrun.control.rundir.plan import Plan
from relayrun.errors import InputError
from relayrun.submit.effective_time import ASSUMED, EffectiveTime, measured_costs
from relayrun.submit.forecast import SECONDS_PER_HOUR
from relayrun.terminal import print_rows
from relayrun.watch.text import format_seconds, json_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun forecast`."""
    words = "take what restarts, saves and jobs of this run cost; default: named assumptions"
    parser.add_argument("name", nargs="?", metavar="RUN", help=words)
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes that train")
    words = "mean hours between two failures of one node"
    parser.add_argument("--mtbf-hours", type=float, required=True, metavar="M", help=words)
    parser.add_argument("--job-hours", type=float, metavar="H", help="length of a job; default: the run's, or 24")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the forecast. Raises RunDirError if there is no such run, InputError for values below zero."""
    costs, hours = dict(ASSUMED), options.job_hours
    if options.name is not None:
        found = find_run(options.name)
        costs |= dict(measured_costs(found))
        hours = hours or Plan.load(found).time_limit / SECONDS_PER_HOUR
    hours = 24.0 if hours is None else hours
    if min(options.nodes, options.mtbf_hours, hours) <= 0:
        raise InputError("--nodes, --mtbf-hours and --job-hours are above zero")
    future = EffectiveTime(nodes=options.nodes, node_mtbf_hours=options.mtbf_hours, job_hours=hours, costs=costs)
    shares = {name: future.effective(in_job=name == "node") for name in ("node", "job")}
    if options.json:
        computed = {name: getattr(future, name) for name in ("job_mtbf_hours", "save_interval", "spare_nodes")}
        print(json_text(asdict(future) | computed | {"effective": {name: asdict(one) for name, one in shares.items()}}))
        return 0
    every = shares.values()
    rows = [(one.words, f"{one.expected:.1%}", f"{one.low:.1%} to {one.high:.1%}", one.source) for one in every]
    mtbf, interval = format_seconds(future.job_mtbf_hours * SECONDS_PER_HOUR), format_seconds(future.save_interval)
    rows += [
        ("time between failures of the job", mtbf, "", f"{future.nodes:,} nodes, {future.node_mtbf_hours:,g} h each"),
        ("time between saves", interval, "", "Daly's formula"),
        (f"spare nodes of a job of {hours:g} h", str(future.spare_nodes), "", "enough in 95 of 100 jobs"),
    ]
    rows += [(one.words, f"{one.expected:,g}", f"{one.low:,g} to {one.high:,g}", one.source) for one in costs.values()]
    print_rows(("", "expected|n", "range", "from"), rows)
    return 0
