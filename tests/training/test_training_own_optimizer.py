"""Muon, optimizers by import path, and groups with a rate or a decay of their own, in real training."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.checkpoints import assert_same_bytes, contents

from .conftest import Harness

pytestmark = pytest.mark.slow

Make = Callable[..., Harness]
CODE = "tests.training.user_code"
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
MUON = {"name": "muon", "muon_extra_scale_factor": 0.2, "muon_use_nesterov": True}
SIGNS = {"class": f"{CODE}:Signs", "arguments": {"beta": 0.8}, "lr": 1e-4}
ROWS = {"class": f"{CODE}:Rows", "weight_decay": 0.0, "lr": 1e-4}
GROUPS = [
    {"match": "*.linear_fc?.weight", "lr_mult": 0.5, "weight_decay": 0.3},
    {"match": "decoder.layers.1.*norm.weight", "weight_decay": 0.2},
    {"match": "embedding.*", "lr_mult": 0.0, "weight_decay": 0.0},
]
KINDS = {"muon": MUON, "signs": SIGNS, "rows": ROWS, "groups": {"groups": GROUPS}, "both": MUON | {"groups": GROUPS}}
NO_DROPOUT = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def made_with(harness: Make, optimizer: dict[str, Any], **sections: dict[str, Any]) -> Harness:
    return harness(**({"training": {"steps": 8}, "optimizer": {"lr_warmup_steps": 0} | optimizer} | sections))


def losses(made: Harness) -> dict[int, str]:
    return {n: step["loss"].hex() for attempt in made.attempts for n, step in attempt.steps().items()}


def test_the_update_of_muon_is_that_of_the_mathematics(tmp_path: Path) -> None:
    program = Path(__file__).with_name("muon_update.py")
    done = warm.run([sys.executable, program])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["from torch.optim.Muon"] < 0.02, "whose iteration runs in bf16"
    assert found["from float64"] < 1e-5
    assert found["split qkv from the parts"] == 0.0
    assert 0.6 < found["singular values"][0] < found["singular values"][1] < 1.3
    assert found["from AdamW"] == 0.0


@pytest.mark.long
@pytest.mark.parametrize("parallel", [{}, TP2, PP2], ids=["DP2", "TP2", "PP2"])
@pytest.mark.parametrize("optimizer", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resume_is_the_run_in_one_piece_to_the_last_bit(
    harness: Make, optimizer: dict[str, Any], parallel: dict[str, Any], precision: str
) -> None:
    settings = {"parallel": parallel, "training": {"steps": 8, "precision": precision}}
    whole, pieces = made_with(harness, optimizer, **settings), made_with(harness, optimizer, **settings)
    whole.train()
    pieces.config["training"]["stop_after"] = 4
    pieces.train()
    del pieces.config["training"]["stop_after"]
    pieces.train()
    assert losses(pieces) == losses(whole)
    assert len(losses(whole)) == 8
    assert_same_bytes(whole.run.checkpoint(8), pieces.run.checkpoint(8))


@pytest.mark.long
def test_a_resume_with_groups_and_the_distributed_optimizer_is_exact(harness: Make) -> None:
    settings = {"parallel": {"use_distributed_optimizer": True}}
    whole, pieces = (made_with(harness, {"groups": GROUPS}, **settings) for _ in range(2))
    whole.train()
    pieces.config["training"]["stop_after"] = 4
    pieces.train()
    del pieces.config["training"]["stop_after"]
    pieces.train()
    assert losses(pieces) == losses(whole)
    assert_same_bytes(whole.run.checkpoint(8), pieces.run.checkpoint(8))


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [MUON, SIGNS, {"groups": GROUPS}], ids=["muon", "signs", "groups"])
def test_a_change_of_layout_stays_within_rounding(harness: Make, optimizer: dict[str, Any]) -> None:
    """From each layout to the next: the state is that of the parameters, not of the ranks."""
    settings = {"model": NO_DROPOUT, "training": {"steps": 12}}
    if optimizer.get("class"):  # a sign is no continuous function
        optimizer = optimizer | {"lr": 1e-6}
    whole = made_with(harness, optimizer, **settings)
    reference = whole.train().steps()
    changed = made_with(harness, optimizer, **settings)
    for parallel, stop in (({}, 3), (TP2, 6), (PP2, 9), ({}, 12)):
        changed.config["parallel"] = parallel
        changed.config["training"]["stop_after"] = stop
        changed.revision += 1
        for iteration, step in changed.train().steps().items():
            assert abs(step["loss"] - reference[iteration]["loss"]) < 1e-5, (iteration, parallel)
    assert [attempt.outcome.iteration for attempt in changed.attempts] == [3, 6, 9, 12]


@pytest.mark.long
def test_a_tensor_of_another_shape_fits_the_layout_that_it_was_saved_with(harness: Make) -> None:
    made = made_with(harness, ROWS, training={"steps": 2})
    made.train()
    made.config["parallel"] = TP2
    made.config["training"]["steps"] = 4
    attempt = made.start()
    assert attempt.wait() != [0, 0]
    assert "is saved for another tensor parallel size" in attempt.output()
    assert "go on with the layout that it was saved with" in attempt.output()


@pytest.mark.long
def test_groups_change_what_they_name_and_nothing_else(harness: Make) -> None:
    plain, grouped = made_with(harness, {}, training={"steps": 1}), made_with(harness, {}, training={"steps": 1})
    for made in (plain, grouped):
        made.config["optimizer"] |= {"lr_warmup_steps": 0}
        made.config["model"] = made.config["model"] | {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    grouped.config["optimizer"]["groups"] = GROUPS
    for made in (plain, grouped):
        made.train()
    one, other = (contents(made.run.checkpoint(1)) for made in (plain, grouped))
    weights = [name for name in one if name != "common" and name.startswith(("decoder", "embedding", "output"))]
    differ = {
        name for name in weights if isinstance(one[name], torch.Tensor) and not torch.equal(one[name], other[name])
    }
    for moved in ("embedding.word_embeddings", "decoder.layers.mlp.linear_fc1", "decoder.layers.mlp.linear_fc2"):
        assert any(name.startswith(moved) for name in differ), sorted(differ)
    norms = {name for name in differ if "norm" in name}
    assert norms, "those of layer 1, which checkpoints keep with the linear layers"
    assert all("layer_norm_weight (1, " in name for name in norms), norms
    assert not any("linear_qkv.weight" in name or "proj" in name or "output" in name for name in differ)
    assert other["common"]["optimizer_groups"][0]["lr_mult"] == 0.5
    assert "optimizer_groups" not in one["common"]


@pytest.mark.long
@pytest.mark.parametrize("distributed", [False, True])
def test_changed_groups_are_said_and_hold_from_there_on(harness: Make, distributed: bool) -> None:
    made = made_with(
        harness, {"groups": GROUPS}, training={"steps": 2}, parallel={"use_distributed_optimizer": distributed}
    )
    made.train()
    made.config["optimizer"] = made.config["optimizer"] | {"groups": GROUPS[:1]}
    made.config["training"]["steps"] = 4
    said = "optimizer.groups is now [{'match': '*.linear_fc?.weight', 'lr_mult': 0.5, 'weight_decay': 0.3}], was [{"
    assert made.train().output().count(said) == 1
    made.config["training"]["steps"] = 5
    assert "optimizer.groups is now" not in made.train().output()
    del made.config["optimizer"]["groups"]
    made.config["training"]["steps"] = 6
    assert "optimizer.groups is now []" in made.train().output()


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"groups": [{"match": "decoder.*router*", "lr_mult": 0.5}]}, "decoder.*router* matches no parameter of this"),
        ({"class": "no_such_module:X"}, "no_such_module:X cannot be imported: ModuleNotFoundError"),
        ({"class": f"{CODE}:z_loss"}, "is no class that inherits torch.optim.Optimizer"),
        ({"class": f"{CODE}:NoDecay"}, "NoDecay cannot be made with lr, weight_decay: TypeError"),
        (SIGNS | {"arguments": {"gamma": 1}}, "Signs cannot be made with lr, weight_decay, gamma: TypeError"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_error_that_ends_the_chain(harness: Make, optimizer: dict[str, Any], said: str) -> None:
    attempt = made_with(harness, optimizer).start()
    assert attempt.wait() == [3, 3], attempt.output()
    assert said in attempt.outcome.reason
    assert "optimizer." in attempt.outcome.reason


@pytest.mark.long
def test_one_kind_of_optimizer_is_not_the_other_and_weights_go_on(harness: Make) -> None:
    made = made_with(harness, MUON, training={"steps": 2})
    made.train()
    made.config["optimizer"] = {"lr": 1e-3}
    made.config["training"]["steps"] = 4
    attempt = made.start()
    assert attempt.wait() == [3, 3], attempt.output()
    assert "optimizer was muon when this checkpoint was saved, and is adam" in attempt.outcome.reason


@pytest.mark.long
def test_an_export_to_megatron_lm_leaves_out_the_state_of_muon_and_says_so(harness: Make, tmp_path: Path) -> None:
    made = made_with(harness, MUON, training={"steps": 1})
    made.train()
    command = [sys.executable, "-m", "relayrun.cli", "export", "megatron", str(made.run.path)]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out")], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "the state of muon is left out: load it with --finetune, or --no-load-optim" in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [MUON, SIGNS], ids=["muon", "signs"])
def test_experts_resume_exactly_and_move_to_other_ranks(
    harness: Make, optimizer: dict[str, Any], precision: str
) -> None:
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_aux_loss_coeff": 0.01}
    settings = {
        "model": NO_DROPOUT | {"transformer": experts},
        "training": {"steps": 8, "precision": precision},
        "parallel": {"expert_model_parallel_size": 2},
    }
    whole, pieces, moved = (made_with(harness, optimizer, **settings) for _ in range(3))
    reference = whole.train().steps()
    for made in (pieces, moved):
        made.config["training"]["stop_after"] = 4
        made.train()
        del made.config["training"]["stop_after"]
    moved.config["parallel"] = {}
    pieces.train()
    assert losses(pieces) == losses(whole)
    assert_same_bytes(whole.run.checkpoint(8), pieces.run.checkpoint(8))
    if optimizer is MUON:  # a sign is no continuous function, and its groups have a count, which does not move
        for iteration, step in moved.train().steps().items():
            assert abs(step["loss"] - reference[iteration]["loss"]) < (1e-5 if precision == "fp32" else 2e-2)
