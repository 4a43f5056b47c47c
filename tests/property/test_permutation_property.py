from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayrun.tokens.order.permutation import Permutation, _mix, permutation_key


def undone(permutation: Permutation, image: int) -> int:
    """The index that goes to an image, by the rounds backwards."""
    while True:
        left, right = divmod(image, permutation._b)
        keys = reversed(permutation._keys)
        for key in keys:
            right = (right - _mix(left, key)) % permutation._b
            left = (left - _mix(right, next(keys))) % permutation._a
        image = left * permutation._b + right
        if image < permutation.n:
            return image


keys = st.builds(permutation_key, st.integers(0, 2**63), st.text(max_size=5), st.integers(0, 10**6))


@pytest.mark.slow
@pytest.mark.parametrize("epoch", range(2))
def test_is_a_bijection_for_every_n(epoch: int) -> None:
    for n in range(1, 600):
        images = Permutation(n, permutation_key(7, "every n", epoch)).map(np.arange(n))
        assert (np.bincount(images, minlength=n) == 1).all(), n


@pytest.mark.slow
@given(st.integers(1, 300), keys)
def test_one_by_one_it_is_the_same_as_at_once_and_can_be_undone(n: int, key: bytes) -> None:
    permutation = Permutation(n, key)
    images = [permutation(i) for i in range(n)]
    assert sorted(images) == list(range(n))
    assert permutation.map(np.arange(n)).tolist() == images
    assert [undone(permutation, image) for image in images] == list(range(n))


@given(st.data(), keys)
def test_holds_at_sizes_that_no_array_could_have(data: st.DataObject, key: bytes) -> None:
    n = data.draw(st.one_of(st.integers(1, 2**62), st.sampled_from([2**62, 2**62 - 1, 2**31 - 1, 2**32 + 1])))
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    permutation = Permutation(n, key)
    images = [permutation(i) for i in indices]
    assert all(0 <= image < n for image in images)
    assert len(set(images)) == len(images)
    assert [undone(permutation, image) for image in images] == indices
    assert permutation.map(indices).tolist() == images


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(x, y)[0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("n", [1_000, 4_096, 65_537, 100_000, 262_144, 1_000_003])
@pytest.mark.parametrize("epoch", [0, 1])
def test_neighbours_epochs_and_the_identity_are_uncorrelated(n: int, epoch: int) -> None:
    identity = np.arange(n)
    images = Permutation(n, permutation_key(28, "train", epoch)).map(identity)
    following = Permutation(n, permutation_key(28, "train", epoch + 1)).map(identity)
    noise = 4 / math.sqrt(n)
    for lag in (1, 2, math.isqrt(n - 1) + 1):  # the last is the step at which `left` changes
        assert abs(correlation(images[:-lag], images[lag:])) < noise
    assert abs(correlation(images, identity)) < noise
    assert abs(correlation(images, following)) < noise


def test_a_part_of_an_epoch_is_spread_evenly() -> None:
    n, part, bins = 1_000_003, 100_000, 100
    counts = np.bincount(Permutation(n, permutation_key(1, "spread", 0)).map(np.arange(part)) * bins // n)
    expected = part / bins
    chi_squared = float((np.square(counts - expected) / (expected * (1 - part / n))).sum())
    assert abs(chi_squared - (bins - 1)) < 4 * math.sqrt(2 * (bins - 1))


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 7, 8])
def test_small_sizes_favour_no_place_and_no_pair(n: int) -> None:
    """With eight rounds these fail."""
    epochs = 20_000
    places, pairs = np.zeros((n, n)), np.zeros((n, n))
    for epoch in range(epochs):
        permutation = Permutation(n, permutation_key(1, "small", epoch))
        images = [permutation(i) for i in range(n)]
        places[range(n), images] += 1
        pairs[images[:-1], images[1:]] += 1
    expected = epochs / n  # of a place and, by chance, of a pair
    place_z = ((n - 1) / n * np.square(places - expected).sum() / expected - (n - 1) ** 2) / (math.sqrt(2) * (n - 1))
    degrees = n * (n - 1) - 1
    others = pairs[~np.eye(n, dtype=bool)]
    pair_z = (np.square(others - expected).sum() / expected - degrees) / math.sqrt(2 * degrees)
    assert abs(place_z) < 4
    assert abs(pair_z) < 4


def test_keys_differ_by_seed_name_and_epoch() -> None:
    made = [
        permutation_key(seed, name, epoch) for seed in (0, 1, 11) for name in ("", "1", "a") for epoch in (0, 1, 11)
    ]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_other_sizes_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match="n must lie in"):
        Permutation(n, permutation_key(0, "", 0))


def test_a_short_key_and_indices_outside_are_refused() -> None:
    with pytest.raises(ValueError, match="96 bytes"):
        Permutation(3, b"short")
    permutation = Permutation(3, permutation_key(0, "", 0))
    for i in (-1, 3):
        with pytest.raises(IndexError):
            permutation(i)
        with pytest.raises(IndexError):
            permutation.map([0, i])
    assert permutation.map([]).shape == (0,)
    assert permutation.map(np.asfortranarray([[0, 1], [2, 0]])).tolist() == [
        [permutation(0), permutation(1)],
        [permutation(2), permutation(0)],
    ]
