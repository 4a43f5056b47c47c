from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relayrun.errors import ConfigError
from relayrun.tokens.order.datasets import WindowOrder
from relayrun.tokens.shards.manifest import DatasetManifest
from relayrun.tokens.shards.shard import ShardWriter


def dataset(folder: Path, sizes: list[int]) -> DatasetManifest:
    first = 0
    for i, size in enumerate(sizes):
        writer = ShardWriter(folder / f"s{i}", np.uint16)
        writer.add(np.arange(first, first + size), [size])
        writer.finish()
        first += size
    return DatasetManifest.build([folder / f"s{i}" for i in range(len(sizes))])


@pytest.fixture
def manifest(tmp_path: Path) -> DatasetManifest:
    return dataset(tmp_path, [150, 151, 100])  # 100 windows of 4


def test_every_epoch_has_every_window_once_in_another_order(manifest: DatasetManifest) -> None:
    order = WindowOrder(manifest, seq_length=4, seed=1)
    assert order.windows_per_epoch == 100
    epochs = []
    for epoch in range(3):
        epochs.append([order.window(epoch, i) for i in range(100)])
        assert sorted(epochs[-1]) == list(range(100))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_sample_is_its_window(manifest: DatasetManifest) -> None:
    order = WindowOrder(manifest, seq_length=4, seed=1)
    for place in ((0, 0), (0, 1), (0, 99), (1, 0), (2, 50)):
        window = order.window(*place)
        assert order.read(*place).tolist() == list(range(4 * window, 4 * window + 5))


def test_the_order_depends_on_seed_and_name_alone(manifest: DatasetManifest) -> None:
    def windows(**settings: object) -> list[int]:
        order = WindowOrder(manifest, seq_length=4, **{"seed": 1, **settings})  # type: ignore[arg-type]
        return [order.window(0, i) for i in range(100)]

    assert windows() == windows()
    assert windows() != windows(seed=2)
    assert windows() != windows(name="other")


def test_the_order_never_changes_between_versions(manifest: DatasetManifest) -> None:
    """A checkpoint of an older relayrun must go on with the same samples."""
    order = WindowOrder(manifest, seq_length=4, seed=28)
    assert [order.window(*divmod(k, 100)) for k in (*range(6), 10**12)] == [82, 90, 91, 3, 34, 68, 87]


def test_without_shuffle_every_epoch_is_the_stream(manifest: DatasetManifest) -> None:
    order = WindowOrder(manifest, seq_length=4, seed=1, shuffle=False)
    assert [order.window(*divmod(k, 100)) for k in range(200)] == [*range(100), *range(100)]


def test_a_data_set_below_one_sample_is_refused(manifest: DatasetManifest) -> None:
    assert WindowOrder(manifest, seq_length=400, seed=1).windows_per_epoch == 1
    with pytest.raises(ConfigError, match="401 tokens, fewer than one sample: seq_length 401 needs 402"):
        WindowOrder(manifest, seq_length=401, seed=1)


def test_a_split_holds_out_the_last_windows_and_trains_on_the_others(manifest: DatasetManifest) -> None:
    training = WindowOrder(manifest, seq_length=4, seed=1, split=0.1)
    held_out = WindowOrder(manifest, seq_length=4, seed=1, split=0.1, held_out=True)
    assert (len(training), len(held_out)) == (90, 10)
    for epoch in range(2):
        assert sorted(training.window(epoch, i) for i in range(90)) == list(range(90))
        assert sorted(held_out.window(epoch, i) for i in range(10)) == list(range(90, 100))
    labels = {token for i in range(90) for token in training.read(0, i)[1:].tolist()}
    assert labels.isdisjoint({token for i in range(10) for token in held_out.read(0, i)[1:].tolist()})


def test_a_split_keeps_a_window_on_both_sides(manifest: DatasetManifest) -> None:
    assert len(WindowOrder(manifest, seq_length=4, seed=1, split=1e-9, held_out=True)) == 1
    assert len(WindowOrder(manifest, seq_length=4, seed=1, split=0.9999)) == 1


def test_an_epoch_has_no_window_outside_of_it(manifest: DatasetManifest) -> None:
    order = WindowOrder(manifest, seq_length=4, seed=1)
    for epoch, i in ((0, 100), (0, -1), (-1, 0)):
        with pytest.raises(IndexError):
            order.read(epoch, i)
