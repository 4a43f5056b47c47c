"""The scheduler that a plan names. Slurm and the local scheduler are imported when they are used."""

from __future__ import annotations

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import CONTROLLER_PATIENCE, Scheduler


def scheduler_for_plan(plan: Plan, run: Run, *, patience: float = CONTROLLER_PATIENCE) -> Scheduler:
    """The scheduler that a plan names; `patience` in seconds is `Slurm`'s."""
    if plan.scheduler == "slurm":
        from relayrun.control.scheduler.slurm import Slurm  # either is paid for by those alone who use it

        return Slurm(patience=patience)
    from relayrun.control.scheduler.local import LocalScheduler

    return LocalScheduler(run)
