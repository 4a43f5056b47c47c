"""The one place that constructs schedulers. Each is imported when it is used: a host pays for one of them alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import CONTROLLER_PATIENCE, Scheduler

if TYPE_CHECKING:
    from relayrun.control.scheduler.local import LocalScheduler
    from relayrun.control.scheduler.slurm import Slurm


def scheduler_for_plan(
    plan: Plan, run: Run, *, patience: float = CONTROLLER_PATIENCE, ordered: bool = False
) -> Scheduler:
    """Return the scheduler that a plan names. `patience`: seconds for which a question to Slurm is repeated. `ordered`:
    a person waits for an order, see `SlurmCommands`."""
    return scheduler_class(plan.scheduler).for_run(run, patience=patience, ordered=ordered)


def scheduler_class(name: str) -> type[Scheduler]:
    """Return the class of the scheduler that a plan or a campaign names: SCHEDULER in the module of that name."""
    found: type[Scheduler] = importlib.import_module(f"{__package__}.{name}").SCHEDULER
    return found


def slurm_scheduler(*, patience: float = CONTROLLER_PATIENCE, ordered: bool = False) -> Slurm:
    """Return the Slurm of this machine. `patience` and `ordered`: see `scheduler_for_plan`."""
    from relayrun.control.scheduler.slurm import Slurm

    return Slurm(patience=patience, ordered=ordered)


def local_scheduler(run: Run) -> LocalScheduler:
    """Return the scheduler of the run's own queue on this machine."""
    from relayrun.control.scheduler.local import LocalScheduler

    return LocalScheduler(run)
