"""`relayrun check --oracle` shrinks every config that a submit takes, and keeps its switches."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.lab import loss_oracle
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["aux_loss", "seq_aux_loss", "global_aux_loss"]


def drawn(draw: random.Random) -> dict[str, dict[str, Any]]:
    """Sections of a large config, which may contradict each other."""
    pick = draw.choice
    tensor, pipeline, context, replicas = pick([1, 2, 8]), pick([1, 2, 4]), pick([1, 2, 4]), pick([1, 2, 3, 8])
    parallel: dict[str, Any] = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    parallel |= {"context_parallel_size": context, "sequence_parallel": tensor > 1}
    if pipeline > 1 and pick([True, False]):
        parallel["num_layers_per_virtual_pipeline_stage"] = pick([1, 2])
    if pick([True, False]):
        parallel |= {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": pick([1, 2])}
        parallel |= {"overlap_grad_reduce": True, "overlap_param_gather": pick([True, False])}
    transformer: dict[str, Any] = {}
    if pick([True, False]):
        transformer |= {"num_moe_experts": pick([8, 160]), "moe_router_topk": pick([1, 6, 8]), "moe_z_loss_coeff": 0.1}
        transformer |= {"moe_router_load_balancing_type": KINDS, "moe_aux_loss_coeff": [0.1, 0.1, 0.1]}
        transformer |= {"moe_router_pre_softmax": True, "moe_shared_expert_intermediate_size": pick([None, 2048])}
        transformer |= pick([{}, {"moe_router_num_groups": 8, "moe_router_group_topk": 4}])
        transformer |= {"moe_layer_freq": pick([1, 2, [0] + [1] * 31]), "moe_input_jitter_eps": pick([None, 0.1])}
        parallel |= {"expert_model_parallel_size": pick([1, 2, 8]), "expert_tensor_parallel_size": pick([None, 1])}
    transformer |= pick([{}, {"window_size": [4095, 0], "window_attn_skip_freq": pick([None, 4, [0, 1] * 16])}])
    transformer |= pick([{}, {"kv_channels": 128}, {"no_rope_freq": 4}, {"qk_layernorm": True}])
    model = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
    if pick([True, False]):
        transformer |= {"multi_latent_attention": True}
        groups = 32
    else:
        groups = pick([1, 4, 8, 32])
    training = {"micro_batch_size": pick([1, 4]), "global_batch_size": 768, "loss_mean": pick([None, "token"])}
    return {
        "parallel": parallel,
        "model": model | {"num_query_groups": groups, "transformer": transformer, "hidden_dropout": 0.1},
        "data": {"tokenizer": "none", "datasets": ["none"], "eod_mask_loss": pick([True, False])},
        "training": training | {"steps": 9, "seq_length": 4096, "precision": "bf16"},
        "job": {"time": "1", "ntasks_per_node": tensor * pipeline * context * replicas},
    }


SWITCHES = ("qk_layernorm", "moe_router_load_balancing_type", "moe_router_pre_softmax", "multi_latent_attention")


def test_a_config_that_is_taken_can_be_shrunk() -> None:
    draw, taken = random.Random(3), 0
    rest = {"optimizer": {"lr": 1e-3}, "checkpoint": {"interval": 1}, "cluster": {"name": "t", "scheduler": "local"}}
    while taken < 150:
        try:
            config = RunConfig.model_validate({"project": "tests", "name": "oracle", **rest, **drawn(draw)})
        except ValidationError:
            continue
        taken += 1
        small, one = loss_oracle.shrink(config)
        assert (small.world_size <= 16, one.world_size) == (True, 1)
        assert small.world_size > 1 or config.world_size == 1
        assert small.model.hidden_size <= 256
        assert small.training.micro_batch_size * small.data_parallel_size <= small.training.global_batch_size
        for name in SWITCHES:
            assert getattr(small.model.transformer, name) == getattr(config.model.transformer, name)
        assert small.model.transformer.router_losses == config.model.transformer.router_losses
        assert "model.hidden_dropout: 0.1 -> 0.0" in list(loss_oracle._changes(config, small))


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/runs/*.yaml")), ids=lambda path: path.stem)
def test_a_config_that_ships_can_be_shrunk(path: Path) -> None:
    config = resolve.load_run_config(path)
    if isinstance(config, RunConfig):
        loss_oracle.shrink(config)


@pytest.mark.slow
@pytest.mark.parametrize(("own", "reference"), [("nan", 1.0), (5.0, "inf"), (1.0, "nan"), ("inf", "inf")])
def test_what_is_no_number_never_counts_as_equal(tmp_path: Path, own: float | str, reference: float | str) -> None:
    """In a process of its own, which imports torch."""
    code = f"""if True:
        import pathlib
        import numpy as np
        from relayrun.lab.loss_terms import difference
        folder = pathlib.Path({str(tmp_path)!r})
        for name, value in (("one", float({reference!r})), ("layout", float({own!r}))):
            value = np.full(3, np.inf if np.isnan(value) else value)  # as they are measured
            np.savez(folder / f"{{name}}.npz", **{{"token/value": np.ones(1), "token/w": value}})
        print(difference("token", [folder / "layout.npz"], folder / "one.npz")[0])
    """
    done = warm.run([sys.executable, "-c", code])
    assert done.stdout.split() == ["inf"], done.stderr
