"""The time limit of a job: the duration of the start, and the grace period in which an attempt must leave.

The grace period covers the current step, an evaluation that may follow it, the rest of a save, and the last save. The
supervisor (before an attempt) and rank 0 (while it runs) use the same formula. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import AttemptStart, StartTimes
from relayrun.control.rundir.run import Run

GRACE_STEPS = 200
GRACE_SAVES = 10
"""Number of newest measurements that count: the speed of a run changes."""
GRACE_MARGIN = 10.0
"""Seconds for unmeasured parts: the end of the processes, the supervisor's last acts."""


def first_grace_period(time_limit: float) -> float:
    """Return the seconds for a first attempt, without measurements: a quarter of the limit, at most 600."""
    return min(600.0, time_limit / 4)


def measured_grace_period(
    step_seconds: Sequence[float],
    save_seconds: Sequence[float],
    *,
    floor: float,
    ceiling: float,
    under_way: float | None = None,
    evaluation_seconds: Sequence[float] = (),
) -> float | None:
    """Return two steps and 1.5 saves at their 95th percentile, plus a margin, in seconds, within floor and ceiling.

    Oldest measurements first; None without steps or saves. `save_seconds`: from the start of a save to its commit.
    `evaluation_seconds`: one evaluation is added, at its 95th percentile. `under_way`: seconds since the start of an
    unfinished save, whose rest is added.
    """
    steps, saves = step_seconds[-GRACE_STEPS:], save_seconds[-GRACE_SAVES:]
    if not steps or not saves:
        return None
    save = percentile(saves, 0.95)
    rest = 0.0 if under_way is None else max(save - under_way, 0.0)
    evaluations = evaluation_seconds[-GRACE_SAVES:]
    evaluation = percentile(evaluations, 0.95) if evaluations else 0.0
    return min(max(2 * percentile(steps, 0.95) + evaluation + 1.5 * save + rest + GRACE_MARGIN, floor), ceiling)


def current_grace_period(
    begin: AttemptStart,
    step_seconds: Iterable[float],
    save_seconds: Iterable[float],
    *,
    under_way: float | None,
    evaluation_seconds: Iterable[float] = (),
    estimate: float = 0.0,
) -> float:
    """Return the grace period of a running attempt by its measurements so far, in seconds.

    The value from its begin holds until steps and saves are measured, and for good if the bounds are equal. `estimate`:
    of an evaluation if none is measured.
    """
    if begin.min_grace_period == begin.max_grace_period:
        return begin.grace_period
    measured = measured_grace_period(
        list(step_seconds),
        list(save_seconds),
        floor=begin.min_grace_period,
        ceiling=begin.max_grace_period,
        under_way=under_way,
        evaluation_seconds=list(evaluation_seconds) or [estimate],
    )
    return min(begin.grace_period + estimate, begin.max_grace_period) if measured is None else measured


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed. Raises ValueError if empty."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


MEASURED_STARTS = 10
"""Number of newest attempts that count: a run changes its nodes and its size."""
MIN_TRAINING_SHARE = 0.5
"""Share of the time limit for training; if less was left, the end of the attempt says so."""
NO_TRAINING_SHARE = 0.1
"""Share below which an attempt had no time to train: a chain of such attempts ends."""


def start_seconds(run: Run) -> list[float]:
    """Return the seconds from the begin of an attempt to its first step, for the newest attempts that reached it."""
    found = []
    for number in run.attempt_numbers()[-MEASURED_STARTS:]:
        attempt = run.attempt(number)
        begin, started = attempt.read_begin(), StartTimes.read(attempt.started)
        if begin is not None and started is not None:
            found.append(started.loaded - begin.start_time)
    return found


def had_no_time(attempt: Attempt) -> bool:
    """Return whether the start and the grace period took nearly all of the time that the attempt had."""
    begin, started = attempt.read_begin(), StartTimes.read(attempt.started)
    if begin is None or started is None or (end := attempt.job_end_time(begin)) is None:
        return False
    return end - begin.grace_period - started.loaded < NO_TRAINING_SHARE * (end - begin.start_time)


def explain_short_training_time(attempt: Attempt, *, now: float, asked: float = 0.0) -> str:
    """Return in words that an attempt had little of its time limit to train in; empty if it had enough, or no limit.
    `now`: its end, in seconds since 1970. `asked`: seconds that the plan asks for; Slurm may have given less."""
    begin, started = attempt.read_begin(), StartTimes.read(attempt.started)
    if begin is None or (end := attempt.job_end_time(begin)) is None:
        return ""
    limit = end - begin.start_time
    less = limit < 0.9 * asked  # the start of the job takes a part of the request
    advice = f"job.time asks for {asked:.0f} s, and Slurm gave this job less" if less else "raise job.time"
    if started is None:
        over = now >= end
        return f"the time limit of {limit:.0f} s was over before the start was; {advice}" if over else ""
    start = started.loaded - begin.start_time
    left = limit - start - begin.grace_period
    if left >= MIN_TRAINING_SHARE * limit:
        return ""
    rest = f"{left:.0f} s are" if left >= 1 else "nothing is"
    return (
        f"of the time limit of {limit:.0f} s the start took {start:.0f} s, and leaving is "
        f"given {begin.grace_period:.0f} s: "
        f"{rest} left to train in; {advice}"
    )
