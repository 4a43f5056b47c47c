"""The batch systems that `cluster.scheduler` names. A new one is an entry here and a module of its name beside `slurm`
and `local` in `control/scheduler`, which assigns its subclass of `Scheduler` to SCHEDULER."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSystem:
    """Facts about a batch system that hold for all its jobs."""

    slurm: bool = False
    """Slurm's commands queue its jobs and start its ranks: their options, variables and containers exist."""
    one_machine: bool = False
    """The terminal of the submit runs the jobs, one after the other."""
    fallback_jobs: bool = False
    """A queued job can wait for the failure of another job."""


BATCH_SYSTEMS = {
    "slurm": BatchSystem(slurm=True, fallback_jobs=True),
    "local": BatchSystem(one_machine=True),
}


def batch_system(name: str) -> BatchSystem:
    """Return the batch system with this name. Raises ValueError for another one."""
    if name not in BATCH_SYSTEMS:
        raise ValueError(f"scheduler {name!r} is none of {', '.join(BATCH_SYSTEMS)}")
    return BATCH_SYSTEMS[name]
