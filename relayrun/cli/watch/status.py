"""`relayrun status`: where one run, or every run, stands; with -f again and again.

What a table of many runs does not need is imported by those who need it: half of the time of a start.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from relayrun.control.rundir import find
from relayrun.control.rundir.campaign import folders_of
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError
from relayrun.watch import unsent
from relayrun.watch.status import queue, standing_view
from relayrun.watch.status.standing import Damaged, Standing
from relayrun.watch.status.watcher import Watcher

LIVING = ("running", "queued", "waiting", "unknown")
"""States in which something may still change by itself."""


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
    """Print where one run, or every run, stands. Raises RelayrunError."""
    if options.follow:
        if options.json:
            raise InputError("-f and --json do not go together", hint="call --json as often as you need it")
        return follow(options.name, max(options.interval, 0.2))
    now = time.time()
    if options.name is not None:
        from relayrun.watch.status import run_status, run_status_view
        from relayrun.watch.status.terminal import show

        run = find.find_run(options.name)
        stuck = _mend([run])
        facts = run_status.gather(run, queue.ask(run), now=now)
        if options.json:
            print(run_status_view.dump(run_status_view.as_json(facts)))
        else:
            show(run_status_view.one(facts, now=now))
        _say(stuck, options)
        unsent.send_in_background(run)
        return 0
    runs = find.every_run()
    stuck = _mend(runs)
    if options.json:
        from relayrun.watch.status import run_status_view

        print(run_status_view.dump([run_status_view.as_json(entry) for entry in Watcher().look(runs, now=now)]))
    elif found := Watcher().glance(runs, now=now):
        standing_view.show_many(found)
        for line in standing_view.sentinels(found, now=now):
            print(line)
    else:
        print(f"no runs below {find.runs()}")
    _say(stuck, options)
    for run in runs:
        unsent.send_in_background(run)
    return 0


def _mend(runs: Sequence[Run]) -> list[str]:
    """Begin what is due of the campaigns that runs belong to; return a line for each trouble that holds some up."""
    folders = folders_of(runs)
    if not folders:
        return []
    from relayrun.control.chain import campaign

    looks = campaign.mend(folders)
    return [
        f"stuck: {folder.parent.name}/{folder.name}: {words}"
        for folder, look in looks.items()
        for words in campaign.in_words(look.stuck)
    ]


def _say(stuck: Sequence[str], options: argparse.Namespace) -> None:
    """Print these lines, outside what is JSON."""
    print("".join(f"{line}\n" for line in stuck), end="", file=sys.stderr if options.json else sys.stdout)


def follow(name: str | None, interval: float) -> int:
    """Show one run, or every run, until Ctrl-C; one run also until its chain has ended. Raises RelayrunError."""
    runs: Callable[[], list[Run]] = find.every_run
    if name is not None:
        one = find.find_run(name)
        runs = lambda: [one]  # noqa: E731
    watcher = Watcher()
    try:
        if sys.stdout.isatty():
            _live(runs, watcher, interval, single=name is not None)
        else:
            _lines(runs, watcher, interval, single=name is not None)
    except KeyboardInterrupt:
        pass  # this is how it ends
    return 0


def _look(watcher: Watcher, runs: list[Run], *, now: float, single: bool) -> Sequence[Standing | Damaged]:
    """All that is known of a single run; of many what a table tells."""
    return watcher.look(runs, now=now) if single else watcher.glance(runs, now=now)


def _ended(found: Sequence[Standing | Damaged], single: bool) -> bool:
    return single and all(isinstance(entry, Damaged) or entry.state not in LIVING for entry in found)


def _live(runs: Callable[[], list[Run]], watcher: Watcher, interval: float, *, single: bool) -> None:
    from rich.live import Live

    from relayrun.watch.status import run_status_view
    from relayrun.watch.status.run_status import RunStatus

    with Live(auto_refresh=False) as live:
        while True:
            now = time.time()
            found = _look(watcher, runs(), now=now, single=single)
            first = found[0] if single else None
            table = run_status_view.one(first, now=now) if isinstance(first, RunStatus) else standing_view.many(found)
            live.update(table, refresh=True)
            if _ended(found, single):
                return
            time.sleep(interval)


def _lines(runs: Callable[[], list[Run]], watcher: Watcher, interval: float, *, single: bool) -> None:
    told: dict[str, str] = {}
    while True:
        now = time.time()
        found = watcher.glance(runs(), now=now)
        for entry in found:
            line = standing_view.line(entry)
            if told.get(entry.path) != line:
                print(f"{time.strftime('%H:%M:%S', time.localtime(now))} {line}", flush=True)
                told[entry.path] = line
        if _ended(found, single):
            return
        time.sleep(interval)
