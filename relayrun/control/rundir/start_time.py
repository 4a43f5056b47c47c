"""How much of a job's time limit its start takes, as `started.json` has it. Standard library only."""

from __future__ import annotations

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import StartTimes
from relayrun.control.rundir.run import Run

MEASURED_STARTS = 10
"""How many of the newest attempts count: a run changes its nodes and its size."""

MIN_TRAINING_SHARE = 0.5
"""Share of the time limit that is for training; where it is less, the end of the attempt says so."""


def start_seconds(run: Run) -> list[float]:
    """From the begin of an attempt to its first step, of the newest attempts that came so far."""
    found = []
    for number in run.attempt_numbers()[-MEASURED_STARTS:]:
        attempt = run.attempt(number)
        begin, started = attempt.read_begin(), StartTimes.read(attempt.started)
        if begin is not None and started is not None:
            found.append(started.loaded - begin.start_time)
    return found


def why_time_was_short(attempt: Attempt, *, now: float, asked: float = 0.0) -> str:
    """That an attempt had little of its time limit to train in, in words; empty where it had enough, or no limit.

    `now`: when it ended, in seconds since 1970. `asked`: seconds that the plan asks for; Slurm may have given less.
    """
    begin, started = attempt.read_begin(), StartTimes.read(attempt.started)
    if begin is None or begin.job_end_time is None:
        return ""
    limit = begin.job_end_time - begin.start_time
    less = limit < 0.9 * asked  # of what was asked for the start of the job has taken a little
    advice = f"job.time asks for {asked:.0f} s, and Slurm gave this job less" if less else "raise job.time"
    if started is None:
        over = now >= begin.job_end_time
        return f"the time limit of {limit:.0f} s was over before the start was; {advice}" if over else ""
    start = started.loaded - begin.start_time
    left = limit - start - begin.lead
    if left >= MIN_TRAINING_SHARE * limit:
        return ""
    rest = f"{left:.0f} s are" if left >= 1 else "nothing is"
    return (
        f"of the time limit of {limit:.0f} s the start took {start:.0f} s, and leaving is given {begin.lead:.0f} s: "
        f"{rest} left to train in; {advice}"
    )
