"""What is left of a run, at the pace of its last attempts."""

from __future__ import annotations

import pytest

from relayrun.watch.status.summary import PACE_ATTEMPTS, AttemptPace, RemainingWork, remaining_work

HOUR = 3600.0


def past(base: int, durable: int, start: float, hours: float, *, running: bool = False) -> AttemptPace:
    until = start + hours * HOUR
    end = None if running else until
    return AttemptPace(base_iteration=base, durable_iteration=durable, start_time=start, until=until, end_time=end)


def left(*attempts: AttemptPace, iteration: int, running: bool = False) -> RemainingWork | None:
    return remaining_work(attempts, iteration=iteration, total=1000, nodes=4, running=running, now=1e6)


def test_hours_and_node_hours_at_the_pace_of_whole_attempts() -> None:
    found = left(past(0, 100, 0, 2), past(100, 300, 3 * HOUR, 2), iteration=300)
    assert found is not None
    assert found.iterations == 700
    assert found.seconds == pytest.approx(700 * 4 * HOUR / 300)
    assert found.node_hours == pytest.approx(700 * 4 / 300 * 4)
    assert found.queue_seconds == HOUR
    assert found.earliest_end is None


def test_an_attempt_that_saved_nothing_makes_it_slower() -> None:
    good, lost = past(0, 100, 0, 1), past(100, 100, HOUR, 1)
    fast, slow = left(good, iteration=100), left(good, lost, iteration=100)
    assert fast is not None
    assert slow is not None
    assert slow.seconds == 2 * fast.seconds


def test_an_attempt_that_runs_counts_to_its_newest_save() -> None:
    found = left(past(0, 200, 0, 1, running=True), iteration=250, running=True)
    assert found is not None
    assert found.seconds == pytest.approx(750 / 200 * HOUR)
    assert found.earliest_end == pytest.approx(1e6 + found.seconds)
    assert found.queue_seconds is None


def test_nothing_is_said_before_anything_is_durable() -> None:
    assert left(past(0, 0, 0, 1), iteration=0) is None
    assert left(iteration=0) is None


def test_only_the_last_attempts_count() -> None:
    slow = [past(n, n + 1, n * HOUR, 1) for n in range(9)]
    fast = [past(9 + 100 * n, 109 + 100 * n, (9 + n) * HOUR, 1) for n in range(PACE_ATTEMPTS)]
    found = left(*slow, *fast, iteration=509)
    assert found is not None
    assert found.seconds == pytest.approx(491 / 100 * HOUR)


def test_a_run_at_its_end_needs_nothing() -> None:
    found = left(past(0, 1000, 0, 1), iteration=1000)
    assert found is not None
    assert (found.iterations, found.seconds, found.node_hours) == (0, 0.0, 0.0)
