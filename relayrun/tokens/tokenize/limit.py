"""A Slurm job that tokenizes leaves before its time limit, and goes on under the same id.

A deadline inside the process, because Slurm signals only the steps of a job or its batch shell, and submitit's
jobs have neither of ours; `--signal=B:USR2@...` of the Bash launcher comes on top. Open shards are dropped:
the next start makes them again, and keeps those that are recorded. Two starts in a row that finish no shard end
the job: its shards do not fit into its time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import RelayrunError, SchedulerError

EXIT_MARGIN_SECONDS = 120.0
"""How long before the limit the work stops; a tenth of the time that is left at the start where that is less."""


class _TimeIsUp(BaseException):
    """Not an Exception: no task may take it for its own failure."""


def slurm_job_id() -> str | None:
    """Id of the Slurm job that this process runs in; None outside.

    An element of an array by its number (`12_3`): the plain id of its last element is that of the whole array,
    and to queue that again would end all the others.
    """
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array else os.environ.get("SLURM_JOB_ID")


class JobRequeued(RelayrunError):
    """The time limit is near, and the job is queued again: no failure."""


@contextlib.contextmanager
def requeue_before_time_limit(progress: Callable[[], int]) -> Iterator[None]:
    """Within a Slurm job: at SIGUSR2, or shortly before the time limit, stop the work and queue the job again.

    `progress` counts the finished shards. Raises RelayrunError at the limit. Elsewhere this does nothing. For the
    main thread.
    """
    job = slurm_job_id()
    if job is None:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # once: what follows must not be interrupted
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise _TimeIsUp

    before, began = progress(), time.time()
    left = _job_end_time(job) - began
    former, former_alarm = signal.getsignal(signal.SIGUSR2), signal.getsignal(signal.SIGALRM)
    try:
        signal.signal(signal.SIGUSR2, stop)
        signal.signal(signal.SIGALRM, stop)
        if 0 < left < threading.TIMEOUT_MAX:  # a timer of the kernel: with a thread, workers could not be forks
            signal.setitimer(signal.ITIMER_REAL, left - min(EXIT_MARGIN_SECONDS, left / 10))
        yield
    except _TimeIsUp:
        whole = time.time() - began > left / 2  # else it was asked to leave early, for a preemption perhaps
        if whole and progress() == before and int(os.environ.get("SLURM_RESTART_COUNT") or 0):
            raise RelayrunError(
                "no shard was finished before the time limit, for the second time",
                where=f"Slurm job {job}",
                hint="give the jobs more time, or more tasks (smaller shards)",
            ) from None
        Slurm().requeue(job)  # although tokenize.sh asks for --no-requeue: nothing else is to start it again
        raise JobRequeued(
            "the time limit is near; the job is queued again and goes on with what is missing", where=f"Slurm job {job}"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former_alarm)
        signal.signal(signal.SIGUSR2, former)


def _job_end_time(job: str) -> float:
    """When the time limit is reached, in seconds since 1970. Slurm 22.05 does not say so in the environment."""
    if given := os.environ.get("SLURM_JOB_END_TIME"):
        return float(given)
    with contextlib.suppress(SchedulerError):
        found = Slurm(patience=60).query(job)
        if found is not None and found.end_time is not None:
            return found.end_time
    return float("inf")
