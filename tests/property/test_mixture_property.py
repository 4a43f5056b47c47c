"""The laws of the draw: to the document."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayrun.tokens.mixture.shard_selection import (
    WEIGHT_TOLERANCE,
    nearest_end,
    normalise_weights,
    select_shards,
    tokens_per_dataset,
)


def shares(count: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(0.01, 100), min_size=count, max_size=count).map(normalise_weights)


@given(shares(5))
def test_weights_sum_to_one(weights: list[float]) -> None:
    assert sum(weights) == pytest.approx(1.0)


Sizes = list[list[int]]


@st.composite
def mixtures(draw: st.DrawFn, *, datasets: st.SearchStrategy[int]) -> tuple[Sizes, list[float]]:
    count = draw(datasets)
    size = st.one_of(st.integers(1, 10), st.integers(1, 10**12), st.sampled_from([1, 1000]))
    sizes = draw(st.lists(st.lists(size, min_size=1, max_size=30), min_size=count, max_size=count))
    return sizes, draw(shares(count))


@pytest.mark.slow
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=30).filter(any), st.integers(0, 10**14))
def test_whole_shards_and_a_rest_are_the_target(sizes: list[int], target: int) -> None:
    take = select_shards(sizes, target)
    assert take.passes * sum(sizes) + sum(sizes[: take.shards]) + take.rest == target
    assert take.rest == 0 or 0 < take.rest < sizes[take.shards]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50), st.integers(0, 60_000))
def test_no_end_of_a_document_is_nearer(lengths: list[int], tokens: int) -> None:
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    found = nearest_end(ends, tokens)
    assert abs(int(ends[found]) - tokens) == int(np.abs(ends - tokens).min())
    assert found == len(lengths) or ends[found + 1] > ends[found]


@pytest.mark.slow
@given(mixtures(datasets=st.integers(1, 9)), st.booleans())
def test_the_first_or_the_last_dataset_is_used_up_exactly(mixture: tuple[Sizes, list[float]], repeat: bool) -> None:
    sizes, weights = mixture
    available = [sum(own) for own in sizes]
    targets = tokens_per_dataset(available, weights, repeat=repeat)
    ratios = [target / have for target, have in zip(targets, available, strict=True)]
    assert 1 in ratios
    assert all(ratio >= 1 - 1e-9 for ratio in ratios) if repeat else max(ratios) == 1
    for target, weight in zip(targets, weights, strict=True):
        assert abs(target - weight * sum(targets)) <= 1 + len(sizes) / 2 + 1e-9 * target


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[Sizes], list[float]]:
    """Tokens of every document, by dataset and shard, and the weights."""
    count = draw(st.integers(1, 6))
    shard = st.lists(st.integers(1, 200), min_size=1, max_size=40)
    dataset = st.lists(shard, min_size=1, max_size=6)
    return draw(st.lists(dataset, min_size=count, max_size=count)), draw(shares(count))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(documents(), st.none() | st.integers(10_000, 10_000_000))
def test_every_weight_holds_to_a_document(mixture: tuple[list[Sizes], list[float]], tokens: int | None) -> None:
    datasets, weights = mixture
    sizes = [[sum(shard) for shard in dataset] for dataset in datasets]
    targets = tokens_per_dataset([sum(own) for own in sizes], weights, tokens=tokens)
    reached, longest = [], []
    for dataset, own, target in zip(datasets, sizes, targets, strict=True):
        take = select_shards(own, target)
        cut = 0
        if take.rest:
            ends = np.cumsum([0, *dataset[take.shards]], dtype=np.int64)
            cut = int(ends[nearest_end(ends, take.rest)])
        reached.append(take.passes * sum(own) + sum(own[: take.shards]) + cut)
        longest.append(max(length for shard in dataset for length in shard))
    for own_tokens, weight, document in zip(reached, weights, longest, strict=True):
        off = abs(own_tokens - weight * sum(reached))
        assert off <= document / 2 + weight * sum(longest) / 2 + 1 + len(weights)
        if all(length <= WEIGHT_TOLERANCE * goal for length, goal in zip(longest, targets, strict=True)):
            assert off <= WEIGHT_TOLERANCE * weight * sum(reached) * 1.001 + 1 + len(weights)
