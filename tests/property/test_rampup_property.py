"""Batch sizes that ramp, change and jump: every sample is trained or passed over once, the closed forms agree."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayrun.config.sections.training import GlobalBatchSizes
from relayrun.tokens.order.batches import BatchReader, TrainingProgress
from relayrun.tokens.order.sample_rows import SampleRow
from relayrun.tokens.order.schedule import Schedule, integer_weights


@st.composite
def ramps(draw: st.DrawFn, unit: int = 1) -> GlobalBatchSizes:
    """Ramps of either form, or none; all sizes multiples of `unit`."""
    sizes = st.integers(1, 12).map(lambda n: n * unit)
    form = draw(st.sampled_from(["none", "megatron", "stages"]))
    if form == "none":
        return GlobalBatchSizes(draw(sizes))
    if form == "megatron":
        start, increment, count = draw(sizes), draw(sizes), draw(st.integers(1, 9))
        return GlobalBatchSizes(start + increment * count, [start, increment, draw(st.integers(1, 400))])
    ends = sorted(draw(st.sets(st.integers(1, 400), min_size=1, max_size=5)))
    return GlobalBatchSizes(draw(sizes), [[draw(sizes), end] for end in ends])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(ramps(), st.integers(0, 300), st.integers(0, 300))
def test_iterations_and_samples_follow_from_each_other(sizes: GlobalBatchSizes, start: int, count: int) -> None:
    consumed = start
    runs = sizes.runs(7, start)
    for iteration in range(7, 7 + count):
        run = max((run for run in runs if run.iteration <= iteration), key=lambda run: run.iteration)
        assert run.size == sizes.at(consumed)
        assert run.consumed_samples + (iteration - run.iteration) * run.size == consumed
        consumed += sizes.at(consumed)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 40), st.integers(1, 10**9), st.data())
def test_the_size_is_that_of_megatron(
    start: int, increment: int, count: int, samples: int, data: st.DataObject
) -> None:
    """The formula of megatron-core 0.16.1, num_microbatches_calculator.py:422, in exact arithmetic."""
    sizes = GlobalBatchSizes(start + increment * count, [start, increment, samples])
    near = [samples, *(number * samples // count + delta for number in range(count) for delta in (-1, 0, 1))]
    for consumed in [0, *(data.draw(st.lists(st.integers(0, 2 * samples), max_size=20))), *near]:
        if consumed >= 0:
            assert sizes.at(consumed) == start + min(count, consumed * count // samples) * increment


@pytest.mark.slow
def test_the_size_is_what_megatron_itself_says() -> None:
    calculator = pytest.importorskip("megatron.core.num_microbatches_calculator")
    for start, increment, last, samples in ((16, 16, 1024, 5000), (32, 32, 288, 1000), (8, 4, 64, 997)):
        theirs = calculator.RampupBatchsizeNumMicroBatchesCalculator(last, 1, 1, False, 1, start, increment, samples)
        sizes = GlobalBatchSizes(last, [start, increment, samples])
        for consumed in range(samples + 200):
            theirs.update(consumed, False)
            assert sizes.at(consumed) == theirs.current_global_batch_size, consumed


@st.composite
def attempts(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """(data-parallel size, micro-batch size, batch sizes, new mixture or none, iterations, samples passed over)"""
    found = []
    for _ in range(draw(st.integers(1, 7))):
        size, micro = draw(st.integers(1, 16)), draw(st.integers(1, 3))
        mixture = draw(st.none() | st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1))
        over = draw(st.sampled_from([0, 0, 0, 1, 13, 100]))
        found.append((size, micro, draw(ramps(unit=size * micro)), mixture, draw(st.integers(0, 12)), over))
    return found


class Places:
    """Samples that say where in which data set they lie, as a one-row token array would."""

    name = "places"

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def row(self, k: int) -> SampleRow:
        import numpy as np

        name, position = self.schedule.locate(k)
        return SampleRow(tokens=np.array([k, ord(name), position]))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(attempts(), st.data())
def test_every_position_is_trained_or_passed_over_once_whatever_changes(
    plan: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    """Real readers of all ranks; attempts begin from an earlier state through JSON, not always the newest one."""
    schedule = Schedule.from_weights({"a": 1, "b": 2})
    progress = TrainingProgress(plan[0][2])
    saved = [json.dumps({"phases": schedule.to_json(), "progress": progress.state()})]
    trained: list[dict[tuple[str, int], int]] = [{}]  # the iteration by place, by saved state
    for ranks, micro, sizes, mixture, iterations, over in plan:
        number = data.draw(st.integers(max(0, len(saved) - 2), len(saved) - 1))
        del saved[number + 1 :], trained[number + 1 :]
        state = json.loads(saved[number])
        seen = dict(trained[number])
        progress = TrainingProgress.resume(state["progress"], sizes)
        schedule = Schedule.from_json(state["phases"])
        if mixture is not None:
            schedule = schedule.with_phase(progress.consumed_samples, integer_weights(mixture))
        if over:
            progress.pass_over(progress.consumed_samples + over)
        readers = [
            BatchReader(
                Places(schedule),
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                micro_batch_size=micro,
                batch_sizes=sizes,
                consumed_samples=progress.consumed_samples,
            )
            for rank in range(ranks)
        ]
        try:
            for _ in range(iterations):
                size, first = progress.batch_size, progress.consumed_samples
                rows = [row for reader in readers for step in next(reader) for row in step.tokens.tolist()]
                progress.advance()
                assert sorted(row[0] for row in rows) == list(range(first, first + size))
                for k, name, position in rows:
                    assert (chr(name), position) not in seen
                    seen[chr(name), position] = progress.iteration
                    assert progress.iteration_of(k) == progress.iteration
        finally:
            for reader in readers:
                reader.close()
        saved.append(json.dumps({"phases": schedule.to_json(), "progress": progress.state()}))
        trained.append(seen)
    left_out = {schedule.locate(k) for first, end in progress.passed_over for k in range(first, end)}
    assert not left_out & seen.keys()
    for name, count in schedule.counts(progress.consumed_samples).items():
        assert {p for n, p in left_out | seen.keys() if n == name} == set(range(count))
    for k in range(progress.consumed_samples):
        assert progress.iteration_of(k) == seen.get(schedule.locate(k))
