"""`relayrun status`: the state of one run or of all runs, repeated with -f.

Functions import modules that the table of many runs does not need themselves: this halves the start-up time.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from relayrun import places
from relayrun.control.rundir import find_runs
from relayrun.control.rundir.campaign import campaign_folders
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError, RunDirError
from relayrun.files import MIN_FREE_BYTES, free_space, last_lines
from relayrun.terminal import show_in_place
from relayrun.watch.status import queue, tables
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import UNFINISHED_STATES, DamagedRun, RunSummary
from relayrun.watch.text import format_seconds, json_text

ShowRuns = Callable[[Sequence[RunSummary | DamagedRun], float], None]
REFUSED_SECONDS = 7 * 86400.0
"""Age after which a refused start is not shown any more."""
REFUSAL_LINES = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun status`."""
    words = "run directory, or project/name below logs/runs; several, projects, or folders of runs: by user"
    parser.add_argument("names", nargs="*", metavar="RUN|PROJECT", help=words)
    parser.add_argument("--json", action="store_true")
    words = "look again and again, until Ctrl-C or, of one RUN, the end of its chain"
    words += "; a line for each change where there is no terminal"
    parser.add_argument("-f", "--follow", action="store_true", help=words)
    words = "of all runs, also those whose chains ended more than 30 days ago (--json has all)"
    parser.add_argument("--all", action="store_true", help=words)
    parser.add_argument("--interval", type=float, default=5.0, metavar="S", help="seconds between looks (default: 5)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the state of one run, of all runs, or of the runs of several people. Raises RelayrunError."""
    name = options.names[0] if options.names else None
    if options.follow:
        if options.json or len(options.names) > 1:
            raise InputError("-f goes with one RUN, and not with --json", hint="call it as often as you need it")
        return follow(name, max(options.interval, 0.2))
    now = time.time()
    if name is not None:
        from relayrun.watch.status import run_status, run_status_text

        if len(options.names) > 1 or (Path(name).is_dir() and not Path(name, "plan.json").exists()):
            return _show_team(options, now=now)
        try:
            run = find_runs.find_run(name)
        except RunDirError:  # perhaps since its first job was refused
            print("".join(f"{line}\n" for line in _refused_starts(now)), end="", file=sys.stderr)
            raise
        stuck = _stuck_stages([run])
        facts = run_status.read_run_status(run, queue.query_queue(run), now=now)
        if options.json:
            print(json_text(asdict(facts)))
        else:
            print(run_status_text.run_status_table(facts, now=now))
        _print_lines(stuck, options)
        return 0
    runs = find_runs.all_run_folders()
    stuck = [*_stuck_stages(runs), *_refused_starts(now), *_full_disk(find_runs.runs_folder())]
    if options.json:
        print(json_text([asdict(entry) for entry in RunsWatcher().statuses(runs, now=now)]))
    elif runs:
        look = RunsWatcher().all_summaries if options.all else RunsWatcher().summaries
        found = look(runs if options.all else find_runs.without_old_runs(runs, now=now), now=now)
        print(tables.runs_table(found))
        if left_out := len(runs) - len(found):
            print(f"{left_out} runs whose chains ended more than 30 days ago: --all")
        for line in tables.cron_check_lines(found, now=now):
            print(line)
    else:
        print(f"no runs below {find_runs.runs_folder()}")
    _print_lines(stuck, options)
    return 0


def _show_team(options: argparse.Namespace, *, now: float) -> int:
    from relayrun.watch.status import team

    runs = find_runs.find_runs_of(options.names, now=now)
    found = team.read_team_runs(runs, now=now)
    if options.json:
        print(json_text([{"user": user, "week_node_hours": hours, **asdict(each)} for user, hours, each, _ in found]))
    else:
        team.print_team(found)
    _print_lines(_stuck_stages(runs), options)
    return 0


def _full_disk(folder: Path) -> list[str]:
    """Return a line if the file system of the runs is full, empty otherwise."""
    with contextlib.suppress(OSError):
        if free_space(folder) < MIN_FREE_BYTES:
            return [f"disk full: no job can record anything below {folder}; `relayrun status RUN` says what could go"]
    return []


def _refused_starts(now: float) -> list[str]:
    """Return a line for each job of a launcher that could not begin a run, newest first; launchers/lib/launch.sh writes
    the record, and removes it with the next start."""
    found = []
    for path in (places.project_folder() / "logs/slurm/training").glob("*.refused"):
        with contextlib.suppress(OSError):
            since = now - path.stat().st_mtime
            text = last_lines(path, REFUSAL_LINES)[0].decode(errors="replace")
            if (at := f"\n{text}".find("\nerror: ")) >= 0 and since < REFUSED_SECONDS:
                name, _, job = path.stem.rpartition("-")
                words = f"refused: job {job} ({name}), {format_seconds(since)} ago: {' '.join(text[at + 7 :].split())}"
                found.append((since, f"{words}; its log: {path.with_suffix('.err')}"))
    return [line for _, line in sorted(found)]


def _stuck_stages(runs: Sequence[Run]) -> list[str]:
    """Return lines on members of the runs' sweeps and stages that wait for a person or for the next look."""
    folders = campaign_folders(runs)
    if not folders:
        return []
    from relayrun.control.chain import campaign

    looks = campaign.look_at_campaigns(folders)
    return [line for folder, look in looks.items() for line in campaign.campaign_lines(folder, look)]


def _print_lines(stuck: Sequence[str], options: argparse.Namespace) -> None:
    print("".join(f"{line}\n" for line in stuck), end="", file=sys.stderr if options.json else sys.stdout)


def follow(name: str | None, interval: float) -> int:
    """Show one run or all runs until Ctrl-C, one run also until its chain has ended. Raises RelayrunError."""
    one = [] if name is None else [find_runs.find_run(name)]
    in_full = bool(one) and sys.stdout.isatty()
    watcher = RunsWatcher()
    show = _table_in_place() if sys.stdout.isatty() else _changed_lines()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            now = time.time()
            runs = one or find_runs.newer_run_folders(now=now)
            found = watcher.statuses(runs, now=now) if in_full else watcher.summaries(runs, now=now)
            show(found, now)
            if one and all(isinstance(entry, DamagedRun) or entry.state not in UNFINISHED_STATES for entry in found):
                break
            time.sleep(interval)
    return 0


def _table_in_place() -> ShowRuns:
    """Show a table in place: of one run in full, or of many runs."""
    from relayrun.watch.status import run_status_text
    from relayrun.watch.status.run_status import RunStatus

    lines = 0

    def show(found: Sequence[RunSummary | DamagedRun], now: float) -> None:
        nonlocal lines
        alone = found[0] if found and isinstance(found[0], RunStatus) else None
        text = tables.runs_table(found) if alone is None else run_status_text.run_status_table(alone, now=now)
        lines = show_in_place(text, lines)

    return show


def _changed_lines() -> ShowRuns:
    """Print a line for each run that has changed."""
    told: dict[str, str] = {}

    def show(found: Sequence[RunSummary | DamagedRun], now: float) -> None:
        for entry in found:
            line = tables.run_log_line(entry)
            if told.get(entry.path) != line:
                print(f"{time.strftime('%H:%M:%S', time.localtime(now))} {line}", flush=True)
                told[entry.path] = line

    return show
