"""Over random phases, batches, layouts and restarts, each dataset's positions are 0..n-1, each once."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayrun.tokens.order.schedule import WEIGHT_TOTAL, Interleave, Schedule, integer_weights

NAMES = "abcdefg"


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, float]:
    names = draw(st.sets(st.sampled_from(NAMES), min_size=1))
    weight = st.one_of(st.integers(1, 10), st.floats(1e-12, 1e12), st.sampled_from([1e-300, 1e300]))
    return {name: draw(weight) for name in sorted(names)}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(mixtures(), st.randoms(use_true_random=False))
def test_integer_weights_sum_exactly_and_do_not_depend_on_the_order(mixture: dict[str, float], random: object) -> None:
    weights = integer_weights(mixture)
    assert sum(weights.values()) == WEIGHT_TOTAL
    assert min(weights.values()) >= 1
    items = list(mixture.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert list(integer_weights(dict(items)).items()) == list(weights.items())


def test_doubling_all_weights_changes_nothing() -> None:
    assert integer_weights({"a": 0.25, "b": 0.75}) == integer_weights({"a": 1, "b": 3})


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(mixtures(), st.integers(0, 2**45))
def test_locate_and_counts_agree_anywhere_in_a_phase(mixture: dict[str, float], n: int) -> None:
    interleave = Interleave(integer_weights(mixture))
    before = interleave.counts(n)
    assert sum(before.values()) == n
    for at in range(n, n + 20):
        name, count = interleave.locate(at)
        assert count == before[name]
        before[name] += 1
        assert interleave.counts(at + 1) == before


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(mixtures(), st.integers(0, 2**45))
def test_counts_stay_within_two_of_the_weights(mixture: dict[str, float], n: int) -> None:
    weights = integer_weights(mixture)
    for name, count in Interleave(weights).counts(n).items():
        assert abs(count * WEIGHT_TOTAL - weights[name] * n) < 2 * WEIGHT_TOTAL


@st.composite
def attempts(draw: st.DrawFn) -> list[tuple[dict[str, float] | None, int, int, int, int]]:
    """(new mixture or none, data-parallel size, micro-batch size, accumulation steps, iterations)"""
    one = st.tuples(st.none() | mixtures(), st.integers(1, 16), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
    return draw(st.lists(one, min_size=1, max_size=8))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(mixtures(), attempts(), st.data())
def test_every_position_comes_once_over_phases_layouts_restarts_and_json(
    first: dict[str, float], plan: list[tuple[dict[str, float] | None, int, int, int, int]], data: st.DataObject
) -> None:
    """Attempts begin from the state of an earlier one, through JSON, at times not from the newest one."""
    schedule, consumed = Schedule.from_weights(first), 0
    saved = [json.dumps({"phases": schedule.to_json(), "consumed": 0})]
    lines: dict[int, list[tuple[str, int]]] = {0: []}  # what the run has trained on, by consumed samples
    seen: list[tuple[str, int]] = []
    for mixture, size, micro, steps, iterations in plan:
        number = data.draw(st.integers(max(0, len(saved) - 3), len(saved) - 1))
        del saved[number + 1 :]
        state = json.loads(saved[-1])
        consumed = state["consumed"]
        seen = list(lines[consumed])
        schedule = Schedule.from_json(state["phases"])
        if mixture is not None:
            schedule = schedule.with_phase(consumed, integer_weights(mixture))
        for _ in range(iterations):
            shares = [
                [
                    schedule.locate(consumed + (step * size + rank) * micro + row)
                    for step in range(steps)
                    for row in range(micro)
                ]
                for rank in range(size)
            ]
            seen += [place for share in shares for place in share]
            consumed += size * micro * steps
        lines[consumed] = list(seen)
        saved.append(json.dumps({"phases": schedule.to_json(), "consumed": consumed}))
    positions = defaultdict(list)
    for name, position in seen:
        positions[name].append(position)
    counts = schedule.counts(consumed)
    assert {name: len(found) for name, found in positions.items()} == {n: c for n, c in counts.items() if c}
    for name, found in positions.items():
        assert sorted(found) == list(range(len(found)))
        assert schedule.locate(schedule.sample_of(name, len(found) - 1) or 0) == (name, len(found) - 1)


def test_a_dataset_that_returns_goes_on_where_it_was() -> None:
    half = integer_weights({"a": 1, "b": 1})
    schedule = Schedule([*Schedule.from_weights({"a": 1, "b": 1}).with_phase(10, integer_weights({"b": 1})).phases])
    schedule = schedule.with_phase(16, half)
    assert schedule.counts(16) == {"a": 5, "b": 11}
    assert sorted(schedule.locate(k) for k in (16, 17)) == [("a", 5), ("b", 11)]
    assert schedule.sample_of("a", 5) in (16, 17)
    gone = schedule.with_phase(20, integer_weights({"b": 1}))
    assert gone.sample_of("a", 7) is None
    assert gone.sample_of("a", 6) in (18, 19)


def test_the_same_weights_make_no_phase_and_an_unused_phase_is_dropped() -> None:
    schedule = Schedule.from_weights({"a": 1, "b": 3})
    assert schedule.with_phase(100, integer_weights({"a": 2, "b": 6})).phases == schedule.phases
    other = schedule.with_phase(100, integer_weights({"a": 1}))
    again = other.with_phase(100, integer_weights({"b": 1}))
    assert [(phase.start, list(phase.weights)) for phase in again.phases] == [(0, ["a", "b"]), (100, ["b"])]
    assert other.with_phase(80, integer_weights({"a": 1, "b": 3})).phases == schedule.phases


def test_the_state_of_forty_phases_of_seven_datasets_is_small() -> None:
    schedule = Schedule.from_weights(dict.fromkeys(NAMES, 1.0))
    for number in range(1, 40):
        schedule = schedule.with_phase(number, integer_weights(dict.fromkeys(NAMES[: 1 + number % 7], 1)))
    assert len(json.dumps(schedule.to_json())) < 8_000
