"""Which scheduler a plan names."""

from __future__ import annotations

from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.scheduler.base import PATIENCE, Scheduler
from relayrun.scheduler.local import LocalScheduler
from relayrun.scheduler.slurm import Slurm


def for_plan(plan: Plan, run: Run, *, patience: float = PATIENCE) -> Scheduler:
    """The scheduler that a plan names; `patience` in seconds is `Slurm`'s."""
    if plan.scheduler == "slurm":
        return Slurm(patience=patience)
    return LocalScheduler(run)
