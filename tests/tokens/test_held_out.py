"""Validation sets: in the order that the config names, sample by number, the same for every seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relayrun.config.compose.schema import RunConfig
from relayrun.tokens.mixture.build_datasets import VALIDATION_SEED, validation_sets
from relayrun.tokens.order.datasets import WindowOrder
from relayrun.tokens.order.document_packing import DocumentWindowOrder
from relayrun.tokens.shards.manifest import Manifest
from tests.tokens.test_packing import shard

CUT = {"window": 12, "overlap": 2, "bos": 1, "eos": 2}


def config(**data: Any) -> RunConfig:
    values: dict[str, Any] = {
        "project": "tests",
        "name": "held-out",
        "model": {
            "num_layers": 1,
            "hidden_size": 16,
            "ffn_hidden_size": 16,
            "num_attention_heads": 1,
            "num_query_groups": 1,
        },
        "data": {"tokenizer": "none", "datasets": ["none"], "validation": {"held": ["none"]}} | data,
        "training": {"steps": 4, "micro_batch_size": 1, "global_batch_size": 2, "seq_length": 16, "seed": 5},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"interval": 4},
        "job": {"time": "10"},
        "cluster": {"name": "test", "scheduler": "local"},
    }
    return RunConfig.model_validate(values)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder, lengths = tmp_path_factory.mktemp("shards"), np.random.default_rng(4).integers(1, 60, 50).tolist()
    shard(folder / "train", lengths[::-1])
    shard(folder / "held", lengths)
    return Manifest.build(
        {"train": [folder / "train"]},
        {"held": [folder / "held"]},
        vocabulary_size=100_000,
        eod=2,
        tokenizer="none",
    )


def test_a_validation_set_is_cut_and_packed_as_the_order_says(manifest: Manifest) -> None:
    made = config(order="document-window", document_window=CUT)
    (held,) = validation_sets(made, manifest).values()
    cut = made.data.validation_cut
    assert cut is not None
    rows = DocumentWindowOrder(
        manifest.validation["held"], cut, seq_length=16, seed=VALIDATION_SEED, name="held", eod=2, padding=2
    )
    assert len(held) == len(rows)
    for k in range(2 * len(held)):
        own, other = held.row(k), rows.row(*divmod(k, len(rows)))
        assert own.tokens.tolist() == other.tokens.tolist()
        assert own.lengths == other.lengths
        assert own.loss_mask is not None
        assert other.loss_mask is not None
        assert own.loss_mask.tolist() == other.loss_mask.tolist()


@pytest.mark.parametrize("order", ["window", "a:b"])
def test_with_another_order_it_is_read_as_one_stream(manifest: Manifest, order: str) -> None:
    made = config(order=order)
    assert made.data.validation_cut is None
    (held,) = validation_sets(made, manifest).values()
    stream = WindowOrder(manifest.validation["held"], seq_length=16, seed=VALIDATION_SEED, name="held")
    assert [held.row(k).tokens.tolist() for k in range(len(held) + 3)] == [
        stream.read(*divmod(k, len(held))).tolist() for k in range(len(held) + 3)
    ]
    assert held.row(0).lengths is None


def test_the_order_of_validation_sets_is_the_datas_own_not_that_of_one_data_set(manifest: Manifest) -> None:
    one = {"train": {"path": "none", "weight": 1.0, "order": "window"}}
    made = config(datasets=[], mixture=one, order="document-window", document_window=CUT)
    assert made.data.cut_by_document == {}
    assert made.data.masks_loss
    assert made.data.attends_documents
    assert config(datasets=[], mixture=one).data.validation_cut is None
    assert not config(datasets=[], mixture=one, order="document-window", validation={}).data.masks_loss
    with pytest.raises(ValueError, match=r"does not fit a row of training\.seq_length 16"):
        config(datasets=[], mixture=one, order="document-window", document_window={"window": 20})
