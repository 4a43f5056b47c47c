"""What the supervisor learns of a job's times while it can: the scheduler soon forgets them.

`relayrun.watch.goodput` makes accounts of them.
"""

from __future__ import annotations

import contextlib
import os

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.scheduler.base import Scheduler
from relayrun.errors import RelayrunError

SCRIPT_TIME_VARIABLE = "RELAYRUN_SCRIPT_TIME"
"""Where job.sh keeps when it began, in seconds since 1970."""


def job_script_time() -> float | None:
    """When the first lines of this job's script ran, in seconds since 1970; None in a job of an earlier version."""
    with contextlib.suppress(ValueError):
        return float(os.environ.get(SCRIPT_TIME_VARIABLE, ""))
    return None


def previous_job_end(previous: Attempt, scheduler: Scheduler, *, own: str) -> float | None:
    """When the job of the attempt before ended, in seconds since 1970, while the scheduler still knows it.

    None where nobody does, and where that job is this one, queued again.
    """
    started = previous.read_begin()
    if started is None or started.job_id == own:
        return None
    with contextlib.suppress(RelayrunError, OSError):  # it is for the run's accounts alone
        job = scheduler.query(started.job_id)
        return None if job is None or job.live else job.end_time
    return None
