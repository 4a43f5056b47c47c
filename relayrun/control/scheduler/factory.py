"""The one place that constructs schedulers. Slurm and the local scheduler are imported when they are used."""

from __future__ import annotations

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import CONTROLLER_PATIENCE, Scheduler


def scheduler_for_plan(plan: Plan, run: Run, *, patience: float = CONTROLLER_PATIENCE) -> Scheduler:
    """Return the scheduler that a plan names. `patience`: seconds for which `Slurm` repeats a question."""
    if plan.scheduler == "slurm":
        from relayrun.control.scheduler.slurm import Slurm  # imported only if it is used

        return Slurm(patience=patience)
    from relayrun.control.scheduler.local import LocalScheduler

    return LocalScheduler(run)
