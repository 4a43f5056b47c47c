"""`relayrun runs`: list the runs of folders with their sizes; move a run's directory to an archive or elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import time
from pathlib import Path
from typing import Any

from relayrun.cli import add_run
from relayrun.config.compose import yaml_file
from relayrun.config.compose.writable import check_outputs, check_writable
from relayrun.config.sections.batch_systems import batch_system
from relayrun.control import chain_state
from relayrun.control.rundir import campaign, find_runs
from relayrun.control.rundir.find_runs import find_run, find_runs_below
from relayrun.control.rundir.plan import COPY, Plan
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.storage_limits import format_bytes
from relayrun.control.scheduler.base import is_live_state
from relayrun.errors import InputError, RelayrunError, RunDirError, user_name
from relayrun.progress import Progress, counted
from relayrun.submit import move_run as submit_move_run
from relayrun.submit.check.findings import count_noun
from relayrun.terminal import print_rows
from relayrun.watch.status import queue, run_status
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import UNFINISHED_STATES, DamagedRun
from relayrun.watch.text import format_seconds, json_text

SEARCH_DEPTH = 4
"""Levels of folders between a named folder and its runs."""
RUN_COLUMNS = ("run", "state", "size|n", "last sign of life|n", "checkpoint|n", "saved|n", "the last end")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun runs`."""
    actions = parser.add_subparsers(dest="action", required=True)
    listed = actions.add_parser("list", help="runs in folders, with state, size, age and newest checkpoint")
    words = "a folder that runs lie in or below (default: logs/runs)"
    listed.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help=words)
    listed.add_argument("--json", action="store_true")
    listed.set_defaults(run=list_runs)
    archive = actions.add_parser("archive", help="move runs to PLACE/PROJECT/NAME, each byte read back")
    archive.add_argument("names", nargs="+", metavar="RUN", help="run directory, or project/name below logs/runs")
    archive.add_argument("--to", type=Path, required=True, metavar="PLACE", help="a folder that is there")
    archive.set_defaults(run=archive_runs)
    move = actions.add_parser("move", help="move a run's directory; `relayrun resume` goes on with it there")
    add_run(move)
    move.add_argument("target", type=Path, metavar="FOLDER", help="its new directory, which is not there yet")
    move.set_defaults(run=move_run)


def list_runs(options: argparse.Namespace) -> int:
    """Print the runs in folders. Raises InputError if a folder cannot be read."""
    now = time.time()
    runs: dict[Path, Run] = {}
    for folder in options.folders or [find_runs.runs_folder()]:
        try:
            runs |= {run.path: run for run in find_runs_below(folder.expanduser().absolute(), depth=SEARCH_DEPTH)}
        except OSError as error:
            raise InputError(f"it cannot be looked into: {error.strerror}", where=folder) from None
    with Progress("looking at runs", len(runs), "runs"):
        found = counted(RunsWatcher().statuses(list(runs.values()), now=now))
        rows = [_run_row(runs[Path(entry.path)], entry) for entry in found]
    if options.json:
        print(json_text(rows))
    elif rows:
        print_rows(RUN_COLUMNS, [_run_cells(row, now) for row in rows])
        print(f"{count_noun(len(rows), 'run')}, {format_bytes(sum(row['bytes'] for row in rows))}")
    else:
        print("no runs below " + ", ".join(map(str, options.folders or [find_runs.runs_folder()])))
    return 0


def _run_row(run: Run, entry: run_status.RunStatus | DamagedRun) -> dict[str, Any]:
    """Return a row of the list. `updated`: newest time in the records; `words`: reason of the end, or the error."""
    # what cannot be looked at counts as nothing
    size = sum(found.size for found in submit_move_run.list_entries(run.path, on_error=lambda _: None).values())
    row = {"path": entry.path, "state": "damaged", "bytes": size}
    if isinstance(entry, DamagedRun):
        return row | dict.fromkeys(("updated", "durable_iteration", "durable_age")) | {"words": entry.error}
    return row | {
        "state": entry.state,
        "updated": entry.updated or None,
        "durable_iteration": entry.durable_iteration,
        "durable_age": entry.durable_age,
        "words": (entry.stop or entry.broken or entry.last_end or "").partition("\n")[0],
    }


def _run_cells(row: dict[str, Any], now: float) -> tuple[str, ...]:
    return (
        row["path"],
        row["state"],
        format_bytes(row["bytes"]),
        "" if row["updated"] is None else f"{format_seconds(now - row['updated'])} ago",
        f"{row['durable_iteration']:,}" if row["durable_iteration"] else "none",
        "" if row["durable_age"] is None else f"{format_seconds(row['durable_age'])} ago",
        row["words"],
    )


def archive_runs(options: argparse.Namespace) -> int:
    """Move runs to a folder; return 1 if one could not be moved. Raises InputError without the folder."""
    check_outputs({"--to": options.to})
    place = options.to.expanduser().absolute()
    if not place.is_dir():
        raise InputError("there is no such folder", where=place, hint="mount it, or make it")
    failed: list[RelayrunError] = []
    for name in options.names:
        try:
            source = _run_path(name)
            _move_directory(name, place / source.parent.name / source.name)
        except RelayrunError as error:
            if len(options.names) == 1:
                raise
            failed.append(error)
            print(f"not archived: {error}")
    return int(bool(failed))


def move_run(options: argparse.Namespace) -> int:
    """Move a run's directory. Raises RelayrunError."""
    check_outputs({"FOLDER": options.target})
    target = options.target.expanduser().absolute()
    _move_directory(options.name, target)
    print(f"go on: relayrun resume {target}")
    return 0


def _run_path(name: str) -> Path:
    """The directory of a run, even if a killed move has renamed it; a symbolic link is not resolved."""
    try:
        return find_run(name).path
    except RunDirError:
        path = Path(name).expanduser().absolute()
        places = (path, find_runs.runs_folder() / name)
        return next((each for each in places if submit_move_run.renamed_source(each.resolve()).is_dir()), path)


def _move_directory(name: str, target: Path) -> None:
    named = _run_path(name)
    source = named.resolve()
    _refuse_protected(source, target)
    done = submit_move_run.finish_move(source, target)
    if not done:
        run = find_run(name)
        _refuse_busy_run(run)
        submit_move_run.move_run_directory(run, target)
    for line in done:
        print(line)
    if named.is_symlink() and not named.exists():
        print(f"{named} is a link to where it was: {shlex.join(['ln', '-sfn', str(target), str(named)])}")


def _refuse_protected(source: Path, target: Path) -> None:
    """Raise ConfigError for a path that any site, or the run's own, declares read-only: moving removes."""
    places = {"RUN": source, "its new place": target}
    check_outputs(places)
    run = Run(source)
    cluster: dict[str, Any] = {"name": "", "read_only_paths": []}
    for number in run.revisions()[-1:]:
        with contextlib.suppress(RelayrunError, TypeError):  # a damaged run may be moved
            cluster |= yaml_file.read_yaml(run.config_revision(number)).values.get("cluster", {})
    check_writable(places, cluster=cluster["name"], read_only_paths=cluster["read_only_paths"])


def _refuse_busy_run(run: Run) -> None:
    """Raise InputError if a job may write into the run, RunDirError if another user owns it."""
    plan = Plan.load(run)
    if plan.owner is None:
        raise RunDirError(COPY, where=run.path, hint="mv moves it")
    if chain_state.is_owned_by_another_user(plan):
        name = user_name(plan.owner)
        raise RunDirError(f"this run is {name}'s, who submitted it last", where=run.path, hint=f"let {name} move it")
    asked = queue.query_queue(run)
    states = {job: state for job, state in asked.evaluations.items() if state != "gone"}
    if jobs := {job: state for job, state in states.items() if is_live_state(state.upper())}:
        told = ", ".join(f"{job} ({state})" for job, state in jobs.items())
        end = f", or end them: scancel {' '.join(jobs)}" if batch_system(plan.scheduler).slurm else ""
        words = f"jobs that evaluate its checkpoints write into its directory: {told}"
        hint = f"wait for them{end}"
        raise InputError(words, where=run.path, hint=hint)
    state = run_status.read_run_status(run, asked, now=time.time()).state
    if state == "queued" and campaign.waits_for_campaign(run):
        words = "its sweep, or the stage before it, begins this run later, and looks for it here"
        hint = f"let it begin, or give it up: relayrun stop {run.path}"
        raise InputError(words, where=run.path, hint=hint)
    if state in UNFINISHED_STATES:
        words = f"the chain is {state}: a job writes into its directory, or may begin to"
        hint = f"end it first: relayrun stop {run.path}, or relayrun cancel {run.path}"
        raise InputError(words, where=run.path, hint=hint)
    if later := campaign.members_that_need(run):
        words = f"stages look for this run here, and have no checkpoint of their own yet: {', '.join(later)}"
        hint = "move it when they have, or give them up: relayrun stop"
        raise InputError(words, where=run.path, hint=hint)
