"""Which scheduler a plan names."""

from __future__ import annotations

from relayrun.rundir.layout import RunDir
from relayrun.rundir.plan import Plan
from relayrun.scheduler.base import PATIENCE, Scheduler
from relayrun.scheduler.local import LocalScheduler
from relayrun.scheduler.slurm import Slurm


def for_plan(plan: Plan, run: RunDir, *, patience: float = PATIENCE) -> Scheduler:
    """The scheduler that a plan names; `patience` in seconds is `Slurm`'s."""
    if plan.scheduler == "slurm":
        return Slurm(patience=patience)
    return LocalScheduler(run)
