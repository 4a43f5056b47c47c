"""megatron-core's own data classes say what is right: orders, blending, masks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relayrun.tokens.order import index_cache
from relayrun.tokens.order.datasets import DatasetSpec
from relayrun.tokens.order.schedule import Interleave, integer_weights
from relayrun.tokens.shards.manifest import DatasetManifest
from relayrun.tokens.shards.shard import Shard, ShardWriter

megatron = pytest.importorskip("megatron.core.datasets.gpt_dataset")


def write(prefix: Path, lengths: Sequence[int], *, seed: int) -> str:
    writer = ShardWriter(prefix, np.uint16)
    writer.add(np.random.default_rng(seed).integers(0, 60_000, sum(lengths)), lengths)
    writer.finish()
    return str(prefix)


DATASETS = {
    "short": lambda generator: generator.integers(1, 30, 900),
    "long": lambda generator: generator.integers(500, 4000, 12),
    "mixed": lambda generator: np.maximum(1, generator.lognormal(3, 2, 300)).astype(int),
}


def theirs(prefix: str, seq_length: int, seed: int) -> megatron.GPTDataset:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = megatron.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        split="1",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(eod=0, vocab_size=None, unique_identifiers="none"),
    )
    dataset = IndexedDataset(prefix)
    documents = np.arange(len(dataset), dtype=np.int32)
    return megatron.GPTDataset(dataset, prefix, documents, None, Split.train, config)


def ours(  # type: ignore[no-untyped-def]
    prefixes: Sequence[str],
    seq_length: int,
    seed: int,
    cache: Path | None = None,
    split: float = 0.0,
    opening: str | None = None,
):
    from relayrun.tokens.order.megatron import MegatronOrder

    return MegatronOrder(
        DatasetSpec(
            name="d",
            seed=seed,
            seq_length=seq_length,
            split=split,
            manifest=DatasetManifest.build(prefixes),
            cache_dir=None if cache is None else str(cache),
            opening=opening,
        )
    )


@pytest.mark.parametrize("seed", [1, 1234])
@pytest.mark.parametrize("seq_length", [16, 129])
@pytest.mark.parametrize("name", DATASETS)
def test_the_whole_first_epoch_is_that_of_gptdataset(tmp_path: Path, name: str, seq_length: int, seed: int) -> None:
    prefix = write(tmp_path / name, DATASETS[name](np.random.default_rng(5)).tolist(), seed=7)
    order, dataset = ours([prefix], seq_length, seed), theirs(prefix, seq_length, seed)
    assert len(order) == len(dataset) > 10
    for i in range(len(dataset)):
        item = dataset[i]
        sample = order.read(0, i)
        assert sample.dtype == np.int64
        assert sample[:-1].tolist() == item["tokens"].tolist()
        assert sample[1:].tolist() == item["labels"].tolist()


def test_later_epochs_are_other_orders_of_the_same_number_of_windows(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [50] * 40, seed=1)
    order = ours([prefix], 16, 3)
    epochs = [np.stack([order.read(epoch, i) for i in range(len(order))]) for epoch in range(3)]
    assert len({epoch.tobytes() for epoch in epochs}) == 3
    assert all(np.array_equal(order.read(epoch, 5), epochs[epoch][5]) for epoch in (0, 2, 1))


def test_many_shards_are_one_as_if_merged_and_each_token_has_its_document(tmp_path: Path) -> None:
    parts = [write(tmp_path / f"s{i}", [7 + i, 100, 3, 40 * (i + 1)], seed=i) for i in range(3)]
    merged = ShardWriter(tmp_path / "merged", np.uint16)
    for part in parts:
        merged.add(Shard.open(part).ids(), Shard.open(part).lengths())
    merged.finish()
    one, many = ours([str(tmp_path / "merged")], 9, 2), ours(parts, 9, 2)
    for i in range(len(one)):
        assert one.read(1, i).tolist() == many.read(1, i).tolist()
        tokens = []
        for origin in many.origins(1, i):
            shard = Shard.open(origin.prefix)
            start = int(shard.offsets()[origin.document]) // 2 + origin.offset
            tokens += shard.ids()[start : start + origin.tokens].tolist()
        assert tokens == many.read(1, i).tolist()


def test_the_cache_holds_what_would_be_built_and_serves_the_next_opening(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [50] * 40, seed=1)
    plain, cached = ours([prefix], 16, 3), ours([prefix], 16, 3, tmp_path / "cache")
    assert all(plain.read(e, i).tolist() == cached.read(e, i).tolist() for e in (0, 1) for i in range(0, len(plain), 9))
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").glob("*.npy")}
    assert len(files) == 6
    again = ours([prefix], 16, 3, tmp_path / "cache")
    assert again.read(1, 7).tolist() == plain.read(1, 7).tolist()
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").glob("*.npy")} == files


@pytest.mark.slow
def test_of_the_ranks_that_open_a_cache_together_one_compares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each with a lock of its own, as processes have. A damaged one is built once, and seen whole by all."""
    prefix = write(tmp_path / "d", [50] * 40, seed=1)
    right = ours([prefix], 16, 3).read(0, 5).tolist()
    cache = tmp_path / "cache"
    compared: list[int] = []
    compare = index_cache.file_checksum

    def counted(path: Any) -> Any:
        compared.append(1)
        time.sleep(0.02)  # the others come meanwhile
        return compare(path)

    monkeypatch.setattr(index_cache, "file_checksum", counted)

    def open_by_four(opening: str | None) -> int:
        compared.clear()
        caplog.clear()
        ranks = [ours([prefix], 16, 3, cache, opening=opening) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda rank: rank.read(0, 5).tolist(), ranks)) == [right] * 4
        return len(compared)

    assert open_by_four("built") == 0
    assert open_by_four("first") == 3, "files"
    assert open_by_four("first") == 0
    assert open_by_four(None) == 4 * 3, "who shares nothing with the others compares for itself"
    (damaged,) = cache.glob("*-shuffle.npy")
    data = bytearray(damaged.read_bytes())
    data[-3] ^= 8
    damaged.write_bytes(data)
    assert open_by_four("second") == 3
    assert caplog.text.count("the index cache is built anew") == 1
    damaged.write_bytes(data)
    assert open_by_four("second") == 3, "these are not the files that the first one found"
    assert caplog.text.count("the index cache is built anew") == 1
    damaged.unlink()
    assert open_by_four("third") == 2, "up to the missing one"
    (checked,) = cache.glob("*-checked.json")
    checked.write_text("[torn")
    assert open_by_four("third") == 3
    for number in range(index_cache.KEPT_OPENINGS + 1):
        open_by_four(f"opening {number}")
    assert len(json.loads(checked.read_text())) == index_cache.KEPT_OPENINGS


def test_a_damaged_cache_is_built_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bit anywhere in it, a torn or a missing file, and a record that does not fit."""
    prefix = write(tmp_path / "d", [50] * 40, seed=1)
    plain = ours([prefix], 16, 3)
    right = [plain.read(0, i).tolist() for i in range(len(plain))]
    cache = tmp_path / "cache"
    ours([prefix], 16, 3, cache).read(0, 0)
    files = sorted(path for path in cache.iterdir() if path.suffix != ".lock")
    assert sorted(path.suffix for path in files) == [".json", ".npy", ".npy", ".npy"]
    whole = {path: path.read_bytes() for path in files}
    generator = np.random.default_rng(2)

    def flipped(path: Path) -> None:
        data = bytearray(whole[path])
        data[generator.integers(len(data))] ^= 1 << generator.integers(8)
        path.write_bytes(data)

    harms = [*[(path, flipped) for path in files for _ in range(5)]]
    harms += [(path, lambda path: path.write_bytes(whole[path][:-7])) for path in files]
    harms += [(path, Path.unlink) for path in files]
    for path, harm in harms:
        harm(path)
        caplog.clear()
        order = ours([prefix], 16, 3, cache)
        assert [order.read(0, i).tolist() for i in range(len(order))] == right, (path, harm)
        assert {path: path.read_bytes() for path in files} == whole, "mended for the next"
        assert "the index cache" in caplog.text or path.suffix == ".json"


def test_what_a_cache_holds_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each index is synced before its rename, and the record that vouches for them comes last."""
    import os

    prefix = write(tmp_path / "d", [50] * 40, seed=1)
    seen: list[str] = []
    sync, rename = os.fsync, os.replace

    def synced(fd: int) -> None:
        seen.append("sync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name.partition("-")[0])
        sync(fd)

    def renamed(one: str, other: str) -> None:
        seen.append("rename " + Path(other).name.rpartition("-")[2])
        rename(one, other)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    ours([prefix], 16, 3, tmp_path / "cache").read(0, 0)
    assert seen == [
        step
        for name in ("document.npy", "sample.npy", "shuffle.npy", "checksums.json")
        for step in ("sync .tmp", f"rename {name}", "sync cache")
        if name == "checksums.json" or step != "sync cache"
    ]


def test_documents_of_the_held_out_windows_are_not_trained_on(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "d", np.uint16)
    writer.add(np.arange(2001), [20] * 100 + [1])
    writer.finish()
    order = ours([str(tmp_path / "d")], 10, 3, split=0.1)  # 200 windows, 20 held out: labels from 1801 on
    seen = np.concatenate([order.read(0, i) for i in range(len(order))])
    assert seen.max() < 1801
    assert len(order) > 175


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.1, 0.9], [0.7, 0.2, 0.1], [1 / 7] * 7, [0.9] + [0.005] * 20])
def test_blending_counts_are_within_two_of_megatrons_after_every_sample(weights: list[float]) -> None:
    from megatron.core.datasets import helpers

    size = 20_000
    which, position = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    exact = np.asarray(weights) / sum(weights)
    helpers.build_blending_indices(which, position, exact, len(weights), size, False)
    names = [f"{i:02}" for i in range(len(weights))]
    interleave = Interleave(integer_weights(dict(zip(names, exact.tolist(), strict=True))))
    own = np.array([int(interleave.locate(k)[0]) for k in range(size)])
    for i in range(len(weights)):
        assert np.abs(np.cumsum(own == i) - np.cumsum(which == i)).max() <= 2


@pytest.mark.parametrize("share", [0.0, 0.02, 0.4, 1.0])
def test_masks_and_positions_are_those_of_megatron(share: float) -> None:
    import torch

    from relayrun.config.sections.data import DataSection
    from relayrun.tokens.order import sample_rows

    data = DataSection.model_validate({"tokenizer": "none", "mock_data": True, "eod_mask_loss": True})
    masks = sample_rows.RowMasks(data, eod=5, counted=None, vocabulary_size=50)
    generator = np.random.default_rng(3)
    for length in (1, 2, 33):
        inputs = np.where(generator.random((8, length)) < share, 5, generator.integers(6, 50, (8, length)))
        at = np.arange(length)
        starts = at - sample_rows.document_positions(inputs, 5)
        for row in range(8):
            visible, loss_mask, position_ids = megatron._get_ltor_masks_and_position_ids(
                torch.from_numpy(inputs[row]), 5, True, True, True, True
            )
            assert sample_rows.document_positions(inputs, 5)[row].tolist() == position_ids.tolist()
            if length > 1:  # rows have targets
                mask = masks.loss(sample_rows.RowBatch(tokens=inputs))
                assert mask is not None
                assert mask[row].tolist() == loss_mask[:-1].tolist()
            own = (at >= starts[row][:, None]) & (at <= at[:, None])
            assert own.tolist() == (~visible[0]).tolist()  # Megatron's is true where a token is hidden


MASK = [[1] * 8, [1, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 1, 0, 1, 1]]
LOSS_FUNC = {  # by `--calculate-per-token-loss`: what is differentiated, tokens that count, gradient of the first one
    False: ("0x1.81b0d40000000p-1", 14, "0x1.24924a0000000p-6"),
    True: ("0x1.517aba0000000p+5", 14, "0x1.0000000000000p+0"),
}
"""What `loss_func` of pretrain_gpt.py gives for these losses, at Megatron-LM core_r0.16.0 (commit 7d2aeda8) and at
swiss-ai's fork (commit 81d44dbe), as the first of 4 micro-batches; both print 42.1849 / 14."""


@pytest.mark.filterwarnings("ignore:Apex is not installed", "ignore:The given NumPy array")
@pytest.mark.parametrize("per_token", LOSS_FUNC)
def test_a_masked_loss_is_divided_as_by_megatrons_loss_func(per_token: bool) -> None:
    import torch
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    from relayrun.train.model.loss import loss_function

    losses = (torch.arange(1, 25).reshape(3, 8).double() ** 0.5).float().requires_grad_()
    function = loss_function(
        "token" if per_token else "micro_batch", mask=torch.tensor(MASK, dtype=torch.float32), weights=None
    )
    settings = SimpleNamespace(
        calculate_per_token_loss=per_token, timers=None, num_moe_experts=None, mtp_num_layers=None
    )
    reports: list[torch.Tensor] = []
    loss, tokens = forward_step_calc_loss(
        SimpleNamespace(), losses * 1, function, settings, None, False, 4, reports, 1, True
    )
    loss.backward()
    assert (loss.item().hex(), int(tokens), losses.grad[0, 0].item().hex()) == LOSS_FUNC[per_token]
    assert losses.grad[1, 1] == 0
    assert reports[0].tolist() == pytest.approx([42.1849, 14], rel=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_the_mean_of_samples_is_that_of_before_to_the_last_bit(masked: bool) -> None:
    import torch

    from relayrun.train.model.loss import loss_function

    generator = torch.Generator().manual_seed(3)
    losses = torch.rand((5, 33), generator=generator) * 12
    mask = (torch.rand((5, 33), generator=generator) < 0.4).float() if masked else None
    if mask is not None:
        mask[2] = 0
        samples = (losses * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    else:
        samples = losses.mean(dim=1)
    for mean in ("sample",) if masked else ("sample", "micro_batch", "token"):
        loss, report = loss_function(mean, mask=mask, weights=None)(losses)
        assert loss.item().hex() == samples.mean().item().hex()
        assert report.tolist() == [samples.sum().double().item(), 5.0]
        weights = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
        report = loss_function(mean, mask=mask, weights=weights)(losses)[-1]
        assert report.tolist() == [(samples * weights).sum().double().item(), 3.0]


def test_in_an_evaluation_the_tokens_of_samples_that_fill_up_a_batch_do_not_count() -> None:
    import torch

    from relayrun.train.model.loss import loss_function

    losses = torch.arange(1.0, 25.0).reshape(3, 8)
    mask, weights = torch.tensor(MASK, dtype=torch.float32), torch.tensor([1.0, 1.0, 0.0])
    report = loss_function("micro_batch", mask=mask, weights=weights)(losses)[-1]
    assert report.tolist() == [sum(range(1, 10)), 9]
