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


def test_a_data_set_below_one_sample_is_refused(manifest: DatasetManifest) -> None:
    assert WindowOrder(manifest, seq_length=400, seed=1).windows_per_epoch == 1
    with pytest.raises(ConfigError, match="401 tokens, fewer than one sample: seq_length 401 needs 402"):
        WindowOrder(manifest, seq_length=401, seed=1)


def documents(order: WindowOrder) -> set[tuple[str, int]]:
    windows = (order.origins(0, i) for i in range(len(order)))
    return {(each.prefix, each.document) for window in windows for each in window}


def test_a_split_holds_out_the_last_documents_and_trains_on_the_others(tmp_path: Path) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        manifest, first = [], 0
        for number in range(3):
            lengths = rng.integers(1, 30, rng.integers(1, 20)).tolist()
            writer = ShardWriter(tmp_path / f"{seed}-{number}", np.uint16)
            writer.add(np.arange(first, first := first + sum(lengths)), lengths)
            writer.finish()
            manifest.append(tmp_path / f"{seed}-{number}")
        shards = DatasetManifest.build(manifest)
        training = WindowOrder(shards, seq_length=4, seed=1, split=0.2)
        held_out = WindowOrder(shards, seq_length=4, seed=1, split=0.2, held_out=True)
        assert not documents(training) & documents(held_out)
        tokens = [np.concatenate([order.read(0, i) for i in range(len(order))]) for order in (training, held_out)]
        assert tokens[0].max() < tokens[1].min()
        assert abs(len(held_out) - round(first / 4 * 0.2)) < 30 / 4
        assert len(training) + len(held_out) >= first // 4 - 2
        assert [training.read(0, i).tolist() for i in range(5)] == [
            list(range(4 * window, 4 * window + 5)) for window in (training.window(0, i) for i in range(5))
        ]


def test_a_split_keeps_a_window_on_both_sides(manifest: DatasetManifest) -> None:
    for split in (1e-9, 0.1, 0.9999):
        sides = [WindowOrder(manifest, seq_length=4, seed=1, split=split, held_out=held) for held in (False, True)]
        assert min(map(len, sides)) >= 20
    with pytest.raises(ConfigError, match=r"data\.split 0\.5 finds no document .* a window of 4"):
        WindowOrder(DatasetManifest(shards=manifest.shards[:1]), seq_length=4, seed=1, split=0.5)


def test_an_epoch_has_no_window_outside_of_it(manifest: DatasetManifest) -> None:
    order = WindowOrder(manifest, seq_length=4, seed=1)
    for epoch, i in ((0, 100), (0, -1), (-1, 0)):
        with pytest.raises(IndexError):
            order.read(epoch, i)
