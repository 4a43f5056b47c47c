"""megatron-core's own data classes say what is right: blending, masks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from relayrun.tokens.order.datasets import DatasetSpec, WindowDataset
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


@pytest.mark.parametrize("seq_length", [16, 129])
@pytest.mark.parametrize("name", DATASETS)
def test_the_order_that_tests_take_is_gptdatasets_over_the_shards_as_if_merged(
    tmp_path: Path, name: str, seq_length: int
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from tests.training.megatron_order import MegatronOrder, first_epoch

    lengths = DATASETS[name](np.random.default_rng(5)).tolist()
    parts = [write(tmp_path / f"{name}{part}", lengths[part::2], seed=part) for part in range(2)]
    merged = ShardWriter(tmp_path / "merged", np.uint16)
    for part in parts:
        merged.add(Shard.open(part).ids(), Shard.open(part).lengths())
    merged.finish()
    manifest = DatasetManifest.build(parts)
    order = MegatronOrder(DatasetSpec(name="d", seed=1234, seq_length=seq_length, manifest=manifest))
    whole = str(tmp_path / "merged")
    dataset = first_epoch(IndexedDataset(whole), whole, seq_length=seq_length, seed=1234)
    assert len(order) == len(dataset) == len(WindowDataset(manifest, seq_length)) > 10
    for i in range(len(dataset)):
        item = dataset[i]
        assert order.read(0, i)[:-1].tolist() == item["tokens"].tolist()
        assert order.read(0, i)[1:].tolist() == item["labels"].tolist()


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
