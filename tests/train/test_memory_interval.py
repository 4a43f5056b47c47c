"""How often the state is copied to memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayrun.train.checkpoint.memory_interval import (
    COPY_TIME_SHARE,
    SHORTEST_INTERVAL,
    MedianCopyAndStepTime,
    MemoryCopySchedule,
    StepSlowdown,
)

seconds = st.floats(1e-4, 1e3)


@given(copy=seconds, beside=st.just(0.0) | seconds, neighbour=st.just(0.0) | seconds, step=seconds)
def test_the_smallest_interval_costs_less_than_its_share_and_waits_for_no_neighbour(
    copy: float, beside: float, neighbour: float, step: float
) -> None:
    measured = MedianCopyAndStepTime(copy=copy, beside=beside, neighbour=neighbour, step=step)
    k = measured.interval
    assert measured.cost(k) <= COPY_TIME_SHARE * (1 + 1e-9)
    assert k * step >= 2 * neighbour * (1 - 1e-9)
    assert (
        k == SHORTEST_INTERVAL or measured.cost(k - 1) >= COPY_TIME_SHARE * (1 - 1e-9) or (k - 1) * step < 2 * neighbour
    )


def test_a_fixed_interval_has_its_multiples_copied() -> None:
    interval = MemoryCopySchedule(5, at=10)
    assert [at for at in range(10, 26) if interval.due(at)] == [15, 20, 25]
    assert interval.record_copy(15, copy=9, beside=0, neighbour=0, step=1) is None


def test_the_interval_follows_what_is_measured_and_not_every_breath_of_it() -> None:
    interval = MemoryCopySchedule(None, at=0)
    chosen: dict[int, int] = {}
    copies, copy = [], 0.2
    for at in range(1, 400):
        if not interval.due(at):
            continue
        copies.append(at)
        if at > 200:
            copy = 0.4
        copied = copy * (1 + 0.001 * (at % 7))
        if interval.record_copy(at, copy=copied, beside=0.0, neighbour=0.5, step=1.0) is not None:
            chosen[at] = interval.steps
    assert copies[:4] == [2, 4, 6, 17]  # two that are not measured, and 0.2 s of 11 s are below 2 %
    assert next(iter(chosen.values())) == 11
    assert list(chosen.values())[-1] == pytest.approx(21, abs=1)
    assert len(chosen) <= 5


def test_steps_that_copies_on_their_way_make_longer_count_as_a_cost_of_copies() -> None:
    """A copy takes 0.1 s, and beside its way two steps of 1 s take 1.2 s each."""
    interval, steps = MemoryCopySchedule(None, at=0), StepSlowdown()
    cost, since = 0.0, 0
    for at in range(1, 1000):
        if interval.due(at):
            interval.record_copy(at, copy=0.1, beside=steps.added_seconds, neighbour=2.0, step=1.0)
            steps.record_copy()
            since = 0
            cost += (0.1 + 2 * 0.2) * (at > 500)
        steps.record_step(1.2 if since < 2 else 1.0, samples=8, under_way=since < 1)
        since += 1
    assert interval.steps == pytest.approx(25.5, abs=0.5)
    assert cost / 500 <= COPY_TIME_SHARE


def test_steps_beside_copies_that_are_no_longer_than_others_cost_nothing() -> None:
    interval, steps = MemoryCopySchedule(None, at=0), StepSlowdown()
    for at in range(1, 300):
        if interval.due(at):
            interval.record_copy(at, copy=0.1, beside=steps.added_seconds, neighbour=0.5, step=1.0)
            steps.record_copy()
        steps.record_step(1.0 + 0.3 * (at % 3 - 1), samples=8, under_way=False)
    assert interval.steps == 6


def test_copies_after_every_step_would_leave_no_step_to_compare_with() -> None:
    """A copy takes 0.01 s, and the step beside its way 1.1 s instead of 1 s: after each step they would cost 11 %."""
    interval, steps = MemoryCopySchedule(None, at=0, known=1), StepSlowdown()
    beside, cost = False, 0.0
    for at in range(1, 1000):
        if interval.due(at):
            interval.record_copy(at, copy=0.01, beside=steps.added_seconds, neighbour=0.4, step=1.0)
            steps.record_copy()
            beside = True
            cost += (0.01 + 0.1) * (at > 500)
        steps.record_step(1.1 if beside else 1.0, samples=8, under_way=False)
        beside = False
    assert interval.steps == pytest.approx(5.5, abs=0.5)
    assert cost / 500 <= COPY_TIME_SHARE * 1.1


def test_steps_of_a_larger_batch_are_not_held_against_those_of_a_smaller_one() -> None:
    """A batch that ramps up: from one size to the next a step takes twice as long, beside a copy or not."""
    interval, steps = MemoryCopySchedule(None, at=0), StepSlowdown()
    chosen: list[int] = []
    for at in range(1, 400):
        larger = at > 200
        step = 2.0 if larger else 1.0
        if interval.due(at):
            interval.record_copy(at, copy=0.03, beside=steps.added_seconds, neighbour=0.5, step=step)
            steps.record_copy()
        steps.record_step(step, samples=16 if larger else 8, under_way=False)
        chosen.append(interval.steps)
    assert set(chosen) == {2}


def test_a_later_round_begins_with_what_was_chosen_before() -> None:
    interval = MemoryCopySchedule(None, at=40, known=11)
    assert [at for at in range(40, 60) if interval.due(at)][:1] == [51]
