"""The jobs of many chains, by one question to Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.slurm import Slurm


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job, and why it waits, in Slurm's words; empty where it does not."""

    job: Job
    reason: str


def jobs_by_name(names: Sequence[str], *, patience: float) -> dict[str, list[QueuedJob]]:
    """Return the queued and running jobs, whoever submitted them, by job name.

    The controller is asked again for `patience` seconds. Raises SchedulerError.
    """
    found: dict[str, list[QueuedJob]] = {name: [] for name in names}
    if not names:
        return found
    text = Slurm(patience=patience).ask(
        ["squeue", "--noheader", f"--name={','.join(sorted(found))}", "--format=%i|%T|%r|%j"]
    )
    for line in text.splitlines():
        job_id, state, reason, name = (*line.split("|", 3), "", "", "")[:4]
        if name in found:
            job = Job(id=job_id, name=name, state=state)
            found[name].append(QueuedJob(job=job, reason=reason if job.waits and reason != "None" else ""))
    return found
