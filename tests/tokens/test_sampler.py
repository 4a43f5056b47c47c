"""The order of a mixture, its state, and what a checkpoint's state refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from relayrun.errors import FatalTrainingError
from relayrun.tokens.order.sampler import MixturePart, MixtureSampler


class Numbers:
    """A data set of a user's own: the protocol, and nothing else."""

    def __init__(self, windows: int, first: int = 0) -> None:
        self.windows, self.first = windows, first

    def __len__(self) -> int:
        return self.windows

    def read(self, epoch: int, i: int) -> np.ndarray:
        assert 0 <= i < self.windows
        return np.full(5, self.first + 1000 * epoch + i)


def order(weights: Mapping[str, float], seed: int = 1, **records: dict[str, Any]) -> MixtureSampler:
    sizes = {"a": 7, "b": 50, "c": 3}
    parts = {
        name: MixturePart(
            dataset=Numbers(sizes[name], 10**6 * "abc".index(name)),
            weight=weight,
            record={"fingerprint": name * 64, **records.get(name, {})},
        )
        for name, weight in weights.items()
    }
    return MixtureSampler(parts, {"seed": seed, "seq_length": 4})


def test_epochs_follow_each_other_in_each_data_set() -> None:
    mixed = order({"a": 1, "b": 1})
    read = [int(mixed.row(k).tokens[0]) for k in range(40)]
    assert [value for value in read if value < 10**6] == [*range(7), *range(1000, 1007), *range(2000, 2006)]
    assert [value - 10**6 for value in read if value >= 10**6] == list(range(20))
    assert mixed.locate(39) in (("a", 2, 5), ("b", 0, 19))


def test_a_mixture_changed_on_resume_goes_on_in_every_data_set() -> None:
    """b leaves and returns; c is new; a stays: each is read without a gap and without a repeat."""
    read: dict[str, list[tuple[int, int]]] = {"a": [], "b": [], "c": []}
    state: dict[str, Any] | None = None
    for weights, samples in (({"a": 1, "b": 3}, 41), ({"a": 2, "c": 1}, 30), ({"a": 1, "b": 1, "c": 1}, 33)):
        mixed = order(weights)
        at = mixed.resume(json.loads(json.dumps(state))) if state else 0
        for k in range(at, at + samples):
            name, epoch, i = mixed.locate(k)
            assert int(mixed.row(k).tokens[0]) == 10**6 * "abc".index(name) + 1000 * epoch + i
            read[name].append((epoch, i))
        state = mixed.state(at + samples)
        assert sum(state["counts"].values()) == at + samples
    assert state is not None
    assert [phase["start"] for phase in state["phases"]] == [0, 41, 71]
    for name, size in (("a", 7), ("b", 50), ("c", 3)):
        assert read[name] == [divmod(position, size) for position in range(len(read[name]))]
        assert state["counts"][name] == len(read[name])
    assert len(json.dumps(state)) < 2000


def test_a_resume_from_an_older_checkpoint_begins_the_new_mixture_there() -> None:
    first = order({"a": 1})
    old, new = first.state(10), first.state(20)
    for state, start in ((old, 10), (new, 20), (old, 10)):
        mixed = order({"b": 1})
        assert mixed.resume(state) == start
        assert mixed.locate(start) == ("b", 0, 0)
        assert [phase.start for phase in mixed.schedule.phases] == [0, start]


def test_each_difference_is_named() -> None:
    state = order({"a": 1, "b": 1}).state(10)
    with pytest.raises(FatalTrainingError, match=r"repeated: seed was 1, is 2\n"):
        order({"a": 1, "b": 1}, seed=2).resume(state)
    with pytest.raises(FatalTrainingError) as caught:
        order({"a": 1, "b": 1}, a={"fingerprint": "f" * 64, "order": "a:b"}).resume(state)
    text = str(caught.value)
    assert "fingerprint of data set 'a' was 'aaaaaaaaaaaa…', is 'ffffffffffff…'" in text
    assert "order of data set 'a' was None, is 'a:b'" in text
    assert "'b'" not in text


def test_other_windows_of_a_data_set_are_refused_and_those_of_one_that_left_do_not_matter() -> None:
    mixed = order({"a": 1, "b": 1})
    state = mixed.state(10)
    mixed.parts["a"].dataset.windows = 8  # type: ignore[attr-defined]
    other = MixtureSampler(mixed.parts, mixed.settings)
    with pytest.raises(FatalTrainingError, match="windows of data set 'a' was 7, is 8"):
        other.resume(state)
    del mixed.parts["a"]
    assert MixtureSampler(mixed.parts, mixed.settings).resume(state) == 10


@pytest.mark.parametrize(
    "damage",
    [
        {"consumed_samples": None},
        {"consumed_samples": -1},
        {"consumed_samples": True},
        {"consumed_samples": 11},
        {"counts": {"a": 4, "b": 6}},
        {"phases": []},
        {"datasets": {}},
        {"version": 2},
        {"counts": None},
    ],
)
def test_a_damaged_state_or_a_wrong_ledger_is_refused(damage: dict[str, Any]) -> None:
    mixed = order({"a": 1, "b": 1})
    with pytest.raises(FatalTrainingError, match="data state of the checkpoint is damaged"):
        mixed.resume(mixed.state(10) | damage)
    with pytest.raises(FatalTrainingError, match="damaged"):
        mixed.resume({})


def test_samples_of_a_data_set_that_left_are_located_but_not_read() -> None:
    mixed = order({"b": 1})
    mixed.resume(order({"a": 1}).state(9))
    assert mixed.locate(8) == ("a", 1, 1)
    with pytest.raises(KeyError):
        mixed.row(8)
