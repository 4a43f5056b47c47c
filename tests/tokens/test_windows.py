from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from relayrun.errors import InputError
from relayrun.tokens.order import datasets
from relayrun.tokens.order.datasets import WindowDataset
from relayrun.tokens.shards.manifest import DatasetManifest
from relayrun.tokens.shards.shard import INDEX_HEADER, INDEX_MAGIC, ShardWriter


def dataset(folder: Path, sizes: list[int], dtypes: list[type[np.generic]] | None = None) -> DatasetManifest:
    """Shards that hold 0, 1, 2, ... over all of them; a size of 0 is a shard without documents."""
    prefixes, first = [], 0
    for i, size in enumerate(sizes):
        prefix = folder / f"s{i:03}"
        prefixes.append(str(prefix))
        if size:
            writer = ShardWriter(prefix, dtypes[i] if dtypes else np.uint16)
            writer.add(np.arange(first, first + size), [size // 2, size - size // 2])
            writer.finish()
        else:
            Path(f"{prefix}.bin").write_bytes(b"")
            Path(f"{prefix}.idx").write_bytes(INDEX_HEADER.pack(INDEX_MAGIC, 1, 8, 0, 1) + bytes(8))
        first += size
    return DatasetManifest.build(prefixes)


@pytest.mark.parametrize("seq_length", [1, 2, 3, 7, 16, 40])
def test_every_token_but_the_first_is_a_label_exactly_once(tmp_path: Path, seq_length: int) -> None:
    windows = WindowDataset(dataset(tmp_path, [10, 0, 1, 1, 25, 0, 4]), seq_length)
    assert len(windows) == (41 - 1) // seq_length
    read = [windows.read(i) for i in range(len(windows))]
    assert all(window.dtype == np.int64 and window.shape == (seq_length + 1,) for window in read)
    labels = np.concatenate([window[1:] for window in read])
    inputs = np.concatenate([window[:-1] for window in read])
    assert labels.tolist() == list(range(1, len(windows) * seq_length + 1))
    assert (inputs + 1 == labels).all()


@pytest.mark.parametrize(("tokens", "length"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_window_needs_one_token_more_than_its_inputs(tmp_path: Path, tokens: int, length: int) -> None:
    assert len(WindowDataset(dataset(tmp_path, [tokens]), 4)) == length


def test_token_types_may_differ_between_shards(tmp_path: Path) -> None:
    windows = WindowDataset(dataset(tmp_path, [9, 9, 9, 9], [np.uint16, np.int32, np.uint8, np.int64]), 35)
    assert windows.read(0).tolist() == list(range(36))


def test_ids_above_the_range_of_int16_stay_what_they_are(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "s", np.uint16)
    writer.add([65_535, 40_000, 1], [3])
    writer.finish()
    assert WindowDataset(DatasetManifest.build([tmp_path / "s"]), 2).read(0).tolist() == [65_535, 40_000, 1]


def test_what_lies_behind_the_last_document_is_not_read(tmp_path: Path) -> None:
    manifest = dataset(tmp_path, [4, 5])
    with open(manifest.shards[0].prefix + ".bin", "ab") as file:
        file.write(b"\xff\xff\xff\xff")
    manifest = DatasetManifest.build([shard.prefix for shard in manifest.shards])
    assert WindowDataset(manifest, 8).read(0).tolist() == list(range(9))


@pytest.mark.parametrize("i", [-1, 3, 10**12])
def test_a_window_that_is_not_there_is_an_index_error(tmp_path: Path, i: int) -> None:
    with pytest.raises(IndexError, match=r"outside of range\(3\)"):
        WindowDataset(dataset(tmp_path, [13]), 4).read(i)


def test_few_files_are_open_at_a_time_and_none_before_the_first_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_bins() -> int:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue
        return sum(link.startswith(str(tmp_path)) for link in links)

    monkeypatch.setattr(datasets, "MAX_OPEN_FILES", 5)
    windows = WindowDataset(dataset(tmp_path, [3] * 60), 2)
    assert open_bins() == 0
    rng = np.random.default_rng(0)
    for i in rng.integers(0, len(windows), 300):
        assert windows.read(int(i))[0] == 2 * i
        assert open_bins() <= 5
    del windows
    assert open_bins() == 0


def test_a_shard_that_became_shorter_is_named(tmp_path: Path) -> None:
    windows = WindowDataset(dataset(tmp_path, [10, 10]), 5)
    os.truncate(tmp_path / "s001.bin", 8)
    assert windows.read(0).tolist() == list(range(6))
    with pytest.raises(InputError, match=r"s001\.bin: token file has become shorter: no token 4"):
        windows.read(2)


def test_a_shard_that_went_away_is_named(tmp_path: Path) -> None:
    windows = WindowDataset(dataset(tmp_path, [10]), 5)
    os.unlink(tmp_path / "s000.bin")
    with pytest.raises(FileNotFoundError, match=r"s000\.bin"):
        windows.read(0)
