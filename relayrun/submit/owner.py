"""One owner of a run at a time: who submitted it last, and whose jobs alone go on with it.

A singleton holds among the jobs of one user, and Slurm may show nobody the jobs of others. So two people of a group
could run one directory at once, each superseding the other's attempts.
"""

from __future__ import annotations

import os

from relayrun.chain.watch import read_heartbeats
from relayrun.errors import RunDirError
from relayrun.files import append_line
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.rundir.triggers import user_name


def refuse_another(run: Run, *, take_over: bool, now: float) -> None:
    """Raise RunDirError where another user owns the run, unless this one takes it over and nothing of it runs."""
    if not run.plan.exists():
        return
    plan = Plan.load(run)
    if plan.owner is None or plan.owner == os.geteuid():
        return
    name = user_name(plan.owner)
    if not take_over:
        raise RunDirError(
            f"this run is {name}'s, who submitted it last",
            where=run.path,
            hint=f"let {name} submit, or take it over with --take-over when {name}'s jobs have ended",
        )
    attempt = run.newest_begun()
    if attempt is None or attempt.read_end() is not None:
        return
    signs = [beat.time for beat in read_heartbeats(attempt)]
    began = attempt.read_begin()
    last = max([*signs, began.start_time if began else 0.0])
    patience = max(plan.hang_timeout, plan.start_timeout if not signs else 0.0)
    if now - last < patience:
        raise RunDirError(
            f"attempt {attempt.number}, in a job of {name}, gave a sign of life {now - last:.0f} s ago",
            where=run.path,
            hint=f"end it after a checkpoint with `relayrun stop {run.path}`; without a sign for {patience:.0f} s it "
            "counts as gone",
        )


def record(run: Run, plan: Plan, *, now: float) -> None:
    """Put a new owner on record, in owners.jsonl."""
    former = Plan.load(run).owner if run.plan.exists() else None
    if former != plan.owner:
        append_line(run.owners, {"owner": plan.owner, "name": user_name(os.geteuid()), "former": former, "time": now})
