"""One owner of a run at a time: who submitted it last, and whose jobs alone go on with it.

A singleton holds among the jobs of one user, and Slurm may show nobody the jobs of others. So two people of a group
could run one directory at once, each superseding the other's attempts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from relayrun.control import signs
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError, describe_owner, group_name, user_name
from relayrun.errors import refuse_unwritable as refuse_unwritable_place
from relayrun.files import append_line


def refuse_other_owner(run: Run, *, take_over: bool, now: float) -> None:
    """Raise RunDirError where another user owns the run, unless this one takes it over and nothing of it runs."""
    if not run.plan.exists():
        return
    plan = Plan.load(run)
    if plan.owner is None or not signs.is_owned_by_another_user(plan):
        return
    name = user_name(plan.owner)
    if not take_over:
        raise RunDirError(
            f"this run is {name}'s, who submitted it last",
            where=run.path,
            hint=f"let {name} submit, or take it over with --take-over when {name}'s jobs have ended",
        )
    _refuse_live_attempt(run, plan, now=now)


def claim_run(run: Run, plan: Plan, *, take_over: bool, now: float) -> None:
    """Write the plan, which makes its owner the run's. Raises RunDirError as `refuse_another`.

    A job of the former owner may begin at the same time. It writes begin.json first and then reads the plan, this
    writes the plan first and then looks for begin.json: at least one of both sees the other. Who sees an attempt here
    raises, and whoever undoes the submit puts the plan back; the attempt waits for that before it gives way.
    """
    refuse_other_owner(run, take_over=take_over, now=now)
    former = Plan.load(run) if run.plan.exists() else None
    record_owner(run, plan, now=now)
    plan.write(run.plan)
    if former is not None and former.owner not in (None, plan.owner):
        _refuse_live_attempt(run, former, now=now)


def _refuse_live_attempt(run: Run, plan: Plan, *, now: float) -> None:
    """Raise RunDirError where an attempt of the plan's owner may live."""
    sign = signs.newest_life_sign(run, plan, now=now)
    if sign is not None:
        name = user_name(plan.owner) if plan.owner is not None else "an unknown user"
        raise RunDirError(
            f"attempt {sign.attempt}, in a job of {name}, gave a sign of life {max(sign.age, 0.0):.0f} s ago",
            where=run.path,
            hint=f"end it after a checkpoint with `relayrun stop {run.path}`; without a sign for {sign.patience:.0f} s "
            "it counts as gone",
        )


def refuse_unwritable_run(run: Run) -> None:
    """Raise RunDirError where this user may not write what a chain writes: its jobs would die of it one by one."""
    if not run.path.exists():
        refuse_unwritable_place(run.path)
    closed = next(_unwritable_paths(run), None)
    if closed is None:
        return
    found = closed.stat()
    name = user_name(found.st_uid)
    if found.st_mode & stat.S_IWGRP:
        who, hint = f"the user {name} and the group {group_name(found.st_gid)} may", "ask one of them"
    else:
        who = f"the user {name} may"
        hint = f"to share the run with a group, let {name} run `chmod -R g+w {run.path}`, and submit under umask 002"
    raise RunDirError(f"you may not write here: only {who}; {describe_owner(closed)}", where=closed, hint=hint)


def _unwritable_paths(run: Run) -> Iterator[Path]:
    """What is there and closed to this user: folders that a chain makes or moves files in, files it appends to."""
    checkpoints = _subfolders(run.checkpoints)
    newest = [run.attempt(number).path for number in run.attempt_numbers()[-1:]]
    local = run.path / "local"
    folders = [run.path, run.config, run.attempts, *newest, run.checkpoints, *checkpoints]
    folders += [path for folder in checkpoints if folder.name.startswith(".") for path in _subfolders(folder)]
    folders += [run.evaluations, *_subfolders(run.evaluations), run.triggers, run.code, run.debug, run.tensorboard]
    folders += [run.path / "wandb", local]
    files = [
        run.metrics_view,
        run.attempts_view,
        run.progress,
        run.strikes,
        run.node_health,
        run.owners,
        run.path / ".submit.lock",
    ]
    files += [local / "queue.lock", local / "runner.lock"]
    for path in [*folders, *files]:
        mode = os.W_OK | os.X_OK if path in folders else os.W_OK
        if path.exists() and not os.access(path, mode, effective_ids=True):
            yield path


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, PermissionError):  # a closed one is named for itself
        return []


def record_owner(run: Run, plan: Plan, *, now: float) -> None:
    """Put a new owner on record, in owners.jsonl."""
    former = Plan.load(run).owner if run.plan.exists() else None
    if former != plan.owner:
        append_line(run.owners, {"owner": plan.owner, "name": user_name(os.geteuid()), "former": former, "time": now})
