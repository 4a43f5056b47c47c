"""What a run still needs: seconds of training and node hours, at the pace of its last attempts.

The pace is durable iterations by the whole time of their jobs: start, evaluation, saves and lost work included, so an
attempt that saved nothing makes it slower. Time in the queue is no part of it: nobody knows how long the next job
waits, so what the last ones waited is told beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

PACE_ATTEMPTS = 5
"""Attempts whose pace counts."""


@dataclass(frozen=True, kw_only=True)
class AttemptPace:
    """What one attempt did. Times are seconds since 1970."""

    base_iteration: int
    durable_iteration: int
    """The newest that it made durable; its base where it saved nothing."""
    start_time: float
    until: float
    """Its end; of one that runs, its newest save."""
    end_time: float | None
    """Its end; None while it runs."""


@dataclass(frozen=True, kw_only=True)
class RemainingWork:
    """What is left to do."""

    iterations: int
    seconds: float
    """Seconds of jobs that run; time in the queue is not in it."""
    node_hours: float
    earliest_end: float | None
    """When the last iteration is durable if no job waits, in seconds since 1970; None while no job runs."""
    attempts: int
    """How many attempts the pace is of."""
    queue_seconds: float | None
    """What the last jobs waited behind the end of the one before, on average; None where there was no such pair."""


def remaining_work(
    past: Sequence[AttemptPace], *, iteration: int, total: int, nodes: int, running: bool, now: float
) -> RemainingWork | None:
    """Return what a run at `iteration` still needs of `nodes` nodes; None before anything is durable.

    `past`: its attempts, the oldest first. `running`: whether a job trains now.
    """
    last = past[-PACE_ATTEMPTS:]
    seconds = sum(max(0.0, each.until - each.start_time) for each in last)
    gained = sum(max(0, each.durable_iteration - each.base_iteration) for each in last)
    if not gained or not seconds:
        return None
    left = max(0, total - iteration)
    needed = left * seconds / gained
    waits = [
        max(0.0, after.start_time - before.end_time)
        for before, after in itertools.pairwise(last)
        if before.end_time is not None
    ]
    return RemainingWork(
        iterations=left,
        seconds=needed,
        node_hours=needed * nodes / 3600,
        earliest_end=now + needed if running else None,
        attempts=len(last),
        queue_seconds=sum(waits) / len(waits) if waits else None,
    )
