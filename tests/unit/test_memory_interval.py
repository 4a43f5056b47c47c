"""How often the state is copied to memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayrun.training.checkpoint.memory_interval import SHARE, CopyInterval, Measured

seconds = st.floats(1e-4, 1e3)


@given(copy=seconds, neighbour=st.just(0.0) | seconds, step=seconds)
def test_the_smallest_interval_costs_less_than_its_share_and_waits_for_no_neighbour(
    copy: float, neighbour: float, step: float
) -> None:
    measured = Measured(copy=copy, neighbour=neighbour, step=step)
    k = measured.interval
    assert measured.cost(k) <= SHARE * (1 + 1e-9)
    assert k * step >= neighbour * (1 - 1e-9)
    assert k == 1 or measured.cost(k - 1) >= SHARE * (1 - 1e-9) or (k - 1) * step < neighbour


def test_a_fixed_interval_has_its_multiples_copied() -> None:
    interval = CopyInterval(5, at=10)
    assert [at for at in range(10, 26) if interval.due(at)] == [15, 20, 25]
    assert interval.copied(15, copy=9, neighbour=0, step=1) is None


def test_the_interval_follows_what_is_measured_and_not_every_breath_of_it() -> None:
    interval = CopyInterval(None, at=0)
    chosen: dict[int, int] = {}
    copies, copy = [], 0.2
    for at in range(1, 400):
        if not interval.due(at):
            continue
        copies.append(at)
        if at > 200:
            copy = 0.4
        if interval.copied(at, copy=copy * (1 + 0.001 * (at % 7)), neighbour=0.5, step=1.0) is not None:
            chosen[at] = interval.steps
    assert copies[:4] == [1, 2, 3, 14]  # two that are not measured, and 0.2 s of 11 s are below 2 %
    assert next(iter(chosen.values())) == 11
    assert list(chosen.values())[-1] == pytest.approx(21, abs=1)
    assert len(chosen) <= 5


def test_a_later_round_begins_with_what_was_chosen_before() -> None:
    interval = CopyInterval(None, at=40, known=11)
    assert [at for at in range(40, 60) if interval.due(at)][:1] == [51]
