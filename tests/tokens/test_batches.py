from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from relayrun.config.sections.training import GlobalBatchSizes
from relayrun.errors import ConfigError, InputError
from relayrun.tokens.order.batches import BatchReader
from relayrun.tokens.order.datasets import ValidationSet, WindowOrder
from relayrun.tokens.order.sample_rows import SampleRow
from relayrun.tokens.shards.manifest import DatasetManifest
from relayrun.tokens.shards.shard import ShardWriter

TWELVE = GlobalBatchSizes(12)


@pytest.fixture
def order(tmp_path: Path) -> ValidationSet:
    writer = ShardWriter(tmp_path / "s", np.uint16)
    writer.add(np.arange(401), [401])
    writer.finish()
    windows = WindowOrder(DatasetManifest.build([tmp_path / "s"]), seq_length=4, seed=5)
    return ValidationSet(name="train", dataset=windows)


def reader(order: ValidationSet, *, batch_sizes: GlobalBatchSizes = TWELVE, **settings: int) -> BatchReader:
    defaults = {"data_parallel_rank": 0, "data_parallel_size": 1, "micro_batch_size": 2, "consumed_samples": 0}
    return BatchReader(order, batch_sizes=batch_sizes, **{**defaults, **settings})


def test_step_rank_and_row_get_the_documented_sample(order: ValidationSet) -> None:
    for rank in range(3):
        with reader(order, data_parallel_rank=rank, data_parallel_size=3, consumed_samples=95) as batches:
            for iteration in range(3):
                batch = next(batches)
                assert len(batch) == 2
                for step, micro_batch in enumerate(batch):
                    rows = micro_batch.tokens
                    assert rows.dtype == np.int64
                    assert rows.shape == (2, 5)
                    for m, row in enumerate(rows):
                        k = 95 + 12 * iteration + (step * 3 + rank) * 2 + m
                        assert row.tolist() == order.row(k).tokens.tolist()
                assert batches.consumed_samples == 95 + 12 * (iteration + 1)


def test_is_an_iterator(order: ValidationSet) -> None:
    with reader(order) as batches:
        assert iter(batches) is batches
        taken = [batch for batch, _ in zip(batches, range(4), strict=False)]
    assert len(taken) == 4


def test_reads_ahead_two_iterations_and_no_more(order: ValidationSet, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    two = threading.Event()
    row = order.row

    def counting(k: int) -> SampleRow:
        asked.append(k)
        if len(asked) == 24:
            two.set()
        return row(k)

    monkeypatch.setattr(order, "row", counting)
    with reader(order):
        assert two.wait(300)
        threading.Event().wait(0.05)
        assert asked == list(range(24))  # the third is begun when there is room for it


def test_a_layout_that_does_not_divide_the_batch_is_refused(order: ValidationSet) -> None:
    with pytest.raises(ConfigError, match=r"12 from sample 0 on is no multiple of micro_batch_size x .* = 2 x 4"):
        reader(order, data_parallel_size=4)


def test_a_stage_of_a_ramp_that_the_layout_does_not_divide_is_refused_unless_it_is_over(order: ValidationSet) -> None:
    sizes = GlobalBatchSizes(16, [4, 4, 60])
    with pytest.raises(ConfigError, match="global batch size 4 from sample 0 on is no multiple"):
        reader(order, batch_sizes=sizes, data_parallel_size=4)
    reader(order, batch_sizes=sizes, data_parallel_size=4, consumed_samples=60).close()


@pytest.mark.parametrize(
    "settings",
    [{"data_parallel_rank": 1}, {"data_parallel_rank": -1}, {"micro_batch_size": 0}, {"consumed_samples": -1}],
)
def test_impossible_numbers_are_refused(order: ValidationSet, settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"data-parallel rank|micro_batch_size"):
        reader(order, **settings)


def test_an_error_of_the_thread_comes_out_of_next_each_time(order: ValidationSet, tmp_path: Path) -> None:
    os.truncate(tmp_path / "s.bin", 0)
    with reader(order) as batches:
        for _ in range(2):
            with pytest.raises(InputError, match=r"s\.bin: token file has become shorter"):
                next(batches)


def test_iterations_before_an_error_are_still_given(order: ValidationSet, monkeypatch: pytest.MonkeyPatch) -> None:
    row = order.row

    def failing(k: int) -> SampleRow:
        if k >= 30:
            raise OSError(5, "Input/output error")
        return row(k)

    monkeypatch.setattr(order, "row", failing)
    with reader(order) as batches:
        next(batches)
        next(batches)
        with pytest.raises(OSError, match="Input/output error"):
            next(batches)
        assert batches.consumed_samples == 24


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_close_ends_the_thread_and_may_be_called_twice(order: ValidationSet, taken: int) -> None:
    before = threading.active_count()
    batches = reader(order)
    for _ in range(taken):
        next(batches)
    batches.close()
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


def test_close_after_an_error_ends_the_thread(order: ValidationSet, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    monkeypatch.setattr(order, "row", lambda k: 1 / 0)
    batches = reader(order)
    batches.close()
    assert threading.active_count() == before
