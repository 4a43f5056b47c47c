"""The state of a chain by its records: failed attempts in a row, signs of life, the owner, and the times of its jobs.

Reads the run directory and the scheduler, and changes nothing. Slurm may hide the jobs of other users
(PrivateData=jobs), so the heartbeats of an attempt show whether it is alive.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from relayrun.control.job_log import log_line
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import Heartbeat
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Job, Scheduler
from relayrun.errors import RelayrunError


def count_failed_attempts(run: Run, plan: Plan, *, last: int | None = None) -> int:
    """Return the number of attempts in a row without durable progress since the last explicit submit. `last`: number of
    the last attempt to count; None: the newest. An attempt without an end counts too."""
    count = 0
    for number in reversed(run.attempt_numbers()):
        if last is not None and number > last:
            continue
        if number <= plan.submitted_after_attempt:
            break
        attempt = run.attempt(number)
        if attempt.read_begin() is None:
            continue
        record = attempt.read_end()
        if record is not None and record.progress:
            break
        count += 1
    return count


def count_attempts_without_time(run: Run, plan: Plan) -> int:
    """Return the number of newest attempts with an end in a row, since the last submit, that had no time to train."""
    count = 0
    for number in reversed(run.attempt_numbers()):
        record = run.attempt(number).read_end()
        if number <= plan.submitted_after_attempt or (record is not None and not record.no_time):
            break
        count += record is not None
    return count


CLOCK_TOLERANCE = 60.0
"""Seconds from the start of a job to its script that are usual; a tenth is what two clocks may differ by."""
SCRIPT_TIME_VARIABLE = "RELAYRUN_SCRIPT_TIME"
"""Environment variable in which job.sh keeps its start, in seconds since 1970."""


def job_script_time() -> float | None:
    """Return the start of this job's script, in seconds since 1970; None if it is unknown."""
    with contextlib.suppress(ValueError):
        return float(os.environ.get(SCRIPT_TIME_VARIABLE, ""))
    return None


def clock_ahead(job: Job, scheduler: Scheduler) -> float:
    """Return the seconds by which this node's clock is ahead of the scheduler's; 0 if they agree. It is asked
    only if the job's script seems to have started before the job, or long after it."""
    script, start = job_script_time(), job.start_time
    if script is None or start is None or -CLOCK_TOLERANCE / 10 <= script - start <= CLOCK_TOLERANCE:
        return 0.0
    now = scheduler.clock()
    ahead = 0.0 if now is None else time.time() - now
    if abs(ahead) <= CLOCK_TOLERANCE / 10:
        return 0.0
    how = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
    log_line(f"the clock of {socket.gethostname()} is {how} Slurm's; the end of the job is counted from now")
    return ahead


def previous_job_end(previous: Attempt, scheduler: Scheduler, *, own: str) -> float | None:
    """Return the end of the previous attempt's job, in seconds since 1970. None if the scheduler does not know it, or
    if that job is this one, requeued."""
    started = previous.read_begin()
    if started is None or started.job_id == own:
        return None
    with contextlib.suppress(RelayrunError, OSError):  # it is for the run's accounts alone
        job = scheduler.query(started.job_id)
        return None if job is None or job.live else job.end_time
    return None


@dataclass(frozen=True, kw_only=True)
class LifeSign:
    """The last sign of life of an attempt that has no end."""

    attempt: int
    job_id: str
    age: float
    """Seconds since then."""
    patience: float
    """Seconds without a sign after which the attempt counts as gone."""


def newest_life_sign(run: Run, plan: Plan, *, now: float) -> LifeSign | None:
    """Return the newest attempt's last sign of life; None if it has ended, or is silent for too long. `now`: seconds
    since 1970. Raises RunDirError for a damaged record."""
    attempt = run.newest_begun()
    begin = None if attempt is None else attempt.read_begin()
    if attempt is None or begin is None or attempt.read_end() is not None:
        return None
    beats = attempt.read_heartbeats()
    patience = max(plan.chain.hang_timeout, 0.0 if beats else plan.chain.start_timeout)
    patience += longest_heartbeat_interval(beats)
    age = now - max([begin.start_time, *(beat.time for beat in beats)])
    return LifeSign(attempt=attempt.number, job_id=begin.job_id, age=age, patience=patience) if age < patience else None


def longest_heartbeat_interval(beats: Sequence[Heartbeat]) -> float:
    """Return the longest interval of rare heartbeats, for which a healthy node is silent."""
    return max((beat.interval for beat in beats), default=0.0)


def is_owned_by_another_user(plan: Plan) -> bool:
    """Return whether another user than this process's owns the run, or nobody: it is a copy."""
    return plan.owner != os.geteuid()
