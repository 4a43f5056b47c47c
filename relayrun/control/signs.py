"""Whether an attempt lives, by its own files: Slurm may show nobody the jobs of others (PrivateData=jobs)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import Heartbeat
from relayrun.control.rundir.run import Run


@dataclass(frozen=True, kw_only=True)
class LifeSign:
    """The last sign of life of an attempt that has no end."""

    attempt: int
    job_id: str
    age: float
    """Seconds since then."""
    patience: float
    """Seconds without a sign after which the attempt counts as gone."""


def newest_life_sign(run: Run, plan: Plan, *, now: float) -> LifeSign | None:
    """The newest attempt's last sign, if it has no end and may still live. Raises RunDirError for a damaged record.

    `now`: seconds since 1970.
    """
    attempt = run.newest_begun()
    begin = None if attempt is None else attempt.read_begin()
    if attempt is None or begin is None or attempt.read_end() is not None:
        return None
    beats = attempt.read_heartbeats()
    patience = max(plan.hang_timeout, 0.0 if beats else plan.start_timeout) + longest_heartbeat_interval(beats)
    age = now - max([begin.start_time, *(beat.time for beat in beats)])
    return LifeSign(attempt=attempt.number, job_id=begin.job_id, age=age, patience=patience) if age < patience else None


def longest_heartbeat_interval(beats: Sequence[Heartbeat]) -> float:
    """Seconds for which nodes that go on may leave no sign of life: those between two of their heartbeats."""
    return max((beat.interval for beat in beats), default=0.0)


def is_owned_by_another_user(plan: Plan) -> bool:
    """Whether another user than this process's owns the run."""
    return plan.owner not in (None, os.geteuid())
