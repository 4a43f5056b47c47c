"""`relayrun status`: the state of one run or of all runs, repeated with -f.

Functions import modules that the table of many runs does not need themselves: this halves the start-up time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from relayrun.control.rundir import find_runs
from relayrun.control.rundir.campaign import campaign_folders
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError
from relayrun.watch import unsent_notices
from relayrun.watch.status import queue, tables
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import DamagedRun, RunSummary
from relayrun.watch.text import json_text, print_table

UNFINISHED_STATES = ("running", "queued", "waiting", "unknown")
"""States that may change without a person."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun status`."""
    parser.add_argument("name", nargs="?", metavar="RUN", help="run directory, or project/name below logs/runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="look again and again, until Ctrl-C or, of one RUN, the end of its chain; a line for each change where "
        "there is no terminal",
    )
    parser.add_argument("--interval", type=float, default=5.0, metavar="S", help="seconds between looks (default: 5)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the state of one run or of all runs. Raises RelayrunError."""
    if options.follow:
        if options.json:
            raise InputError("-f and --json do not go together", hint="call --json as often as you need it")
        return follow(options.name, max(options.interval, 0.2))
    now = time.time()
    if options.name is not None:
        from relayrun.watch.status import run_status, run_status_text

        run = find_runs.find_run(options.name)
        stuck = _start_due_stages([run])
        facts = run_status.read_run_status(run, queue.query_queue(run), now=now)
        if options.json:
            print(json_text(run_status_text.run_status_as_json(facts)))
        else:
            print_table(run_status_text.run_status_table(facts, now=now))
        _print_lines(stuck, options)
        unsent_notices.send_in_background(run)
        return 0
    runs = find_runs.all_run_folders()
    stuck = _start_due_stages(runs)
    if options.json:
        from relayrun.watch.status import run_status_text

        print(json_text([run_status_text.run_status_as_json(entry) for entry in RunsWatcher().statuses(runs, now=now)]))
    elif found := RunsWatcher().summaries(runs, now=now):
        tables.print_runs(found)
        for line in tables.cron_check_lines(found, now=now):
            print(line)
    else:
        print(f"no runs below {find_runs.runs_folder()}")
    _print_lines(stuck, options)
    for run in runs:
        unsent_notices.send_in_background(run)
    return 0


def _start_due_stages(runs: Sequence[Run]) -> list[str]:
    """Start due members of the runs' sweeps and stages; return a line for each reason that blocks members."""
    folders = campaign_folders(runs)
    if not folders:
        return []
    from relayrun.control.chain import campaign

    looks = campaign.start_due_members(folders)
    return [
        f"stuck: {folder.parent.name}/{folder.name}: {words}"
        for folder, look in looks.items()
        for words in campaign.stuck_lines(look.stuck)
    ]


def _print_lines(stuck: Sequence[str], options: argparse.Namespace) -> None:
    """Print lines, on standard error if the output is JSON."""
    print("".join(f"{line}\n" for line in stuck), end="", file=sys.stderr if options.json else sys.stdout)


def follow(name: str | None, interval: float) -> int:
    """Show one run or all runs until Ctrl-C, one run also until its chain has ended. Raises RelayrunError."""
    runs: Callable[[], list[Run]] = find_runs.all_run_folders
    if name is not None:
        one = find_runs.find_run(name)
        runs = lambda: [one]  # noqa: E731
    watcher = RunsWatcher()
    try:
        if sys.stdout.isatty():
            _follow_on_terminal(runs, watcher, interval, single=name is not None)
        else:
            _follow_as_lines(runs, watcher, interval, single=name is not None)
    except KeyboardInterrupt:
        pass
    return 0


def _gather(watcher: RunsWatcher, runs: list[Run], *, now: float, single: bool) -> Sequence[RunSummary | DamagedRun]:
    return watcher.statuses(runs, now=now) if single else watcher.summaries(runs, now=now)


def _has_ended(found: Sequence[RunSummary | DamagedRun], single: bool) -> bool:
    return single and all(isinstance(entry, DamagedRun) or entry.state not in UNFINISHED_STATES for entry in found)


def _follow_on_terminal(runs: Callable[[], list[Run]], watcher: RunsWatcher, interval: float, *, single: bool) -> None:
    from rich.live import Live

    from relayrun.watch.status import run_status_text
    from relayrun.watch.status.run_status import RunStatus

    with Live(auto_refresh=False) as live:
        while True:
            now = time.time()
            found = _gather(watcher, runs(), now=now, single=single)
            first = found[0] if single else None
            table = (
                run_status_text.run_status_table(first, now=now)
                if isinstance(first, RunStatus)
                else tables.runs_table(found)
            )
            live.update(table, refresh=True)
            if _has_ended(found, single):
                return
            time.sleep(interval)


def _follow_as_lines(runs: Callable[[], list[Run]], watcher: RunsWatcher, interval: float, *, single: bool) -> None:
    told: dict[str, str] = {}
    while True:
        now = time.time()
        found = watcher.summaries(runs(), now=now)
        for entry in found:
            line = tables.run_line(entry)
            if told.get(entry.path) != line:
                print(f"{time.strftime('%H:%M:%S', time.localtime(now))} {line}", flush=True)
                told[entry.path] = line
        if _has_ended(found, single):
            return
        time.sleep(interval)
