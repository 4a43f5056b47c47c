from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayrun.config.sections.training import GlobalBatchSizes
from relayrun.tokens.order.batches import BatchReader, SampleSource
from relayrun.tokens.order.datasets import ValidationSet, WindowOrder
from relayrun.tokens.order.sampler import MixturePart, MixtureSampler
from relayrun.tokens.shards.manifest import DatasetManifest
from relayrun.tokens.shards.shard import ShardWriter

SEQ_LENGTH = 3


def write(folder: Path, shards: list[list[int]]) -> DatasetManifest:
    """Shards of documents of the given lengths; the ids count up over all of them."""
    first = 0
    for i, lengths in enumerate(shards):
        writer = ShardWriter(folder / f"s{i}", np.uint16 if i % 2 else np.int32)
        writer.add(np.arange(first, first + sum(lengths)), lengths)
        writer.finish()
        first += sum(lengths)
    return DatasetManifest.build([folder / f"s{i}" for i in range(len(shards))])


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> DatasetManifest:
    return write(tmp_path_factory.mktemp("data"), [[100, 17], [3], [200, 1, 50]])  # 123 windows


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int]:
    """(data-parallel size, micro-batch size, accumulation steps)"""
    return draw(st.integers(1, 16)), draw(st.integers(1, 3)), draw(st.integers(1, 3))


def iteration(order: SampleSource, layout: tuple[int, int, int], consumed: int, count: int) -> Iterator[np.ndarray]:
    """All ranks of `layout` for `count` iterations: per iteration the samples by number, int64 [gbs, seq + 1]."""
    size, micro, steps = layout
    readers = [
        BatchReader(
            order,
            data_parallel_rank=rank,
            data_parallel_size=size,
            micro_batch_size=micro,
            batch_sizes=GlobalBatchSizes(size * micro * steps),
            consumed_samples=consumed,
        )
        for rank in range(size)
    ]
    try:
        for _ in range(count):
            shares = [next(reader) for reader in readers]
            yield np.concatenate([shares[rank][step].tokens for step in range(steps) for rank in range(size)])
    finally:
        for reader in readers:
            reader.close()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(layouts(), st.integers(1, 3)), min_size=1, max_size=5), st.integers(0, 2**40))
def test_restarts_and_layouts_do_not_change_the_sequence(
    manifest: DatasetManifest, attempts: list[tuple[tuple[int, int, int], int]], seed: int
) -> None:
    """Attempts of any layout and global batch, each from the state of the one before through JSON."""

    def mixed() -> MixtureSampler:
        return MixtureSampler(
            {
                "train": MixturePart(
                    dataset=WindowOrder(manifest, seq_length=SEQ_LENGTH, seed=seed), weight=1.0, record={}
                )
            },
            {"seed": seed},
        )

    consumed, seen = 0, []
    saved = json.dumps(mixed().state(0))
    for layout, count in attempts:
        order = mixed()
        consumed = order.resume(json.loads(saved))
        for samples in iteration(order, layout, consumed, count):
            seen.append(samples)
            consumed += len(samples)
        saved = json.dumps(order.state(consumed))
    plain = ValidationSet(name="train", dataset=WindowOrder(manifest, seq_length=SEQ_LENGTH, seed=seed))
    expected = np.stack([plain.row(k).tokens for k in range(consumed)])
    assert (np.concatenate(seen) == expected).all()


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 8), (4, 2), (8, 1), (8, 2), (16, 1)]), st.integers(0, 1000))
def test_two_layouts_of_one_batch_give_the_same_token_hashes(
    manifest: DatasetManifest, layout: tuple[int, int], consumed: int
) -> None:
    def hashes(size: int, micro: int) -> list[str]:
        parts = {
            name: MixturePart(
                dataset=WindowOrder(manifest, seq_length=SEQ_LENGTH, seed=9, name=name), weight=weight, record={}
            )
            for name, weight in (("a", 0.3), ("b", 0.7))
        }
        order = MixtureSampler(parts, {})
        return [
            hashlib.sha256(np.ascontiguousarray(samples).data).hexdigest()
            for samples in iteration(order, (size, micro, 16 // (size * micro)), consumed, 3)
        ]

    assert hashes(*layout) == hashes(4, 1)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(0, 2**32),
    st.integers(0, 3),
)
def test_every_token_is_a_label_exactly_once_per_epoch(
    shards: list[list[int]], seq_length: int, seed: int, epoch: int
) -> None:
    tokens = sum(map(sum, shards))
    if tokens <= seq_length:
        shards = [*shards, [seq_length + 1]]
        tokens += seq_length + 1
    with tempfile.TemporaryDirectory() as folder:
        order = WindowOrder(write(Path(folder), shards), seq_length=seq_length, seed=seed)
        n = order.windows_per_epoch
        assert n == (tokens - 1) // seq_length
        samples = [order.read(epoch, i) for i in range(n)]
    labels = np.concatenate([sample[1:] for sample in samples])
    assert sorted(labels.tolist()) == list(range(1, n * seq_length + 1))
    assert all((sample[:-1] + 1 == sample[1:]).all() for sample in samples)
