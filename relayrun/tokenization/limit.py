"""A Slurm job that tokenizes leaves before its time limit, and goes on under the same id.

A deadline inside the process, because Slurm signals only the steps of a job or its batch shell, and submitit's
jobs have neither of ours; `--signal=B:USR2@...` of the Bash launcher comes on top. Open shards are dropped:
the next start makes them again, and keeps those that are recorded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from relayrun.chain.scheduler import Slurm
from relayrun.errors import RelayrunError

LEAD_SECONDS = 120.0
"""How long before the limit the work stops; a tenth of the time that is left at the start where that is less."""


class _TimeIsUp(BaseException):
    """Not an Exception: no task may take it for its own failure."""


@contextlib.contextmanager
def requeued_before_the_limit() -> Iterator[None]:
    """Within a Slurm job: at SIGUSR2, or shortly before the time limit, stop the work and queue the job again.

    Raises RelayrunError then. Elsewhere this does nothing. For the main thread.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TimeIsUp

    former = signal.signal(signal.SIGUSR2, stop)
    left = float(os.environ.get("SLURM_JOB_END_TIME") or "inf") - time.time()
    timer = None
    if 0 < left < threading.TIMEOUT_MAX:
        timer = threading.Timer(left - min(LEAD_SECONDS, left / 10), os.kill, (os.getpid(), signal.SIGUSR2))
        timer.daemon = True
        timer.start()
    try:
        yield
    except _TimeIsUp:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        slurm = Slurm()
        slurm.allow_requeue(job)  # tokenize.sh asks for --no-requeue: nothing else is to start it again
        slurm.requeue(job)
        raise RelayrunError("the time limit is near; the job is queued again and goes on with what is missing",
                            where=f"Slurm job {job}") from None  # fmt: skip
    finally:
        if timer is not None:
            timer.cancel()
        signal.signal(signal.SIGUSR2, former)
