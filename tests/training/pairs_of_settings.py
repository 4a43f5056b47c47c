"""Run by test_training_pairs.py, one process a rank: each pair of settings of a model is refused, or it trains. JSON.

    python -m tests.training.pairs_of_settings RANK WORLD_SIZE PORT LAYOUT

On one rank it walks all pairs, on more each setting beside the layout. A pair is refused by the settings' own rules,
before anything is queued, or it trains: all gradients are finite, each weight has one, and a setting that changes loss
or gradients alone changes them beside the other, too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

warnings.simplefilter("ignore")
rank, world_size, port, layout = sys.argv[1:]
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

import numpy as np  # noqa: E402
from pydantic import ValidationError  # noqa: E402

from relayrun.config.compose.schema import RunConfig  # noqa: E402
from relayrun.errors import RelayrunError  # noqa: E402
from relayrun.train import distributed  # noqa: E402
from relayrun.train.model import cpu_patches  # noqa: E402

cpu_patches.patch_for_cpu()

from relayrun.train.model.gpt import MicroBatch, ModelStage  # noqa: E402
from relayrun.train.model.size import possible_names  # noqa: E402
from relayrun.train.optimizer.parameter_groups import parameter_names  # noqa: E402

VOCABULARY, LENGTH, EOD = 64, 32, 5
EXPERTS = {"num_moe_experts": 4}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
}


def transformer(**fields: Any) -> dict[str, dict[str, Any]]:
    return {"model": {"transformer": fields}}


CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "kv_channels": transformer(kv_channels=16),
    "qk_layernorm": transformer(qk_layernorm=True),
    "qk_l2_norm": transformer(qk_l2_norm=True),
    "add_qkv_bias": transformer(add_qkv_bias=True),
    "add_bias_linear": transformer(add_bias_linear=True, add_qkv_bias=True),  # which it brings
    "attention_output_gate": transformer(attention_output_gate=True),
    "softmax_scale": transformer(softmax_scale=0.3),
    "window_size": transformer(window_size=[7, 0]),
    "no_rope_freq": transformer(no_rope_freq=2),
    "rotary_interleaved": transformer(rotary_interleaved=True),
    "LayerNorm": transformer(normalization="LayerNorm"),
    "zero centred": transformer(layernorm_zero_centered_gamma=True),
    "gelu": transformer(activation_func="gelu"),
    "squared_relu": transformer(activation_func="squared_relu"),
    "xielu": transformer(activation_func="xielu", gated_linear_unit=False),
    "two matrices": transformer(gated_linear_unit=False),
    "glu_linear_offset": transformer(glu_linear_offset=1.0),
    "clamp": transformer(activation_func_clamp_value=5.0),
    "experts": transformer(**EXPERTS, moe_aux_loss_coeff=0.01),
    "experts, alltoall": transformer(**EXPERTS, moe_token_dispatcher_type="alltoall"),
    "experts, sigmoid": transformer(**EXPERTS, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    "experts, shared": transformer(**EXPERTS, moe_shared_expert_intermediate_size=32, moe_shared_expert_gate=True),
    "experts, every second layer": transformer(**EXPERTS, moe_layer_freq=2),
    "experts, capacity": transformer(**EXPERTS, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True),
    "experts, top 1 on input": transformer(
        **EXPERTS, moe_router_topk=1, moe_apply_probs_on_input=True, moe_router_pre_softmax=True
    ),
    "latent attention": {"model": {"num_query_groups": 4, "transformer": LATENT}},
    "dropout": {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}},
    "tied": {"model": {"untie_embeddings_and_output_weights": False}},
    "rope scaling": {"model": {"rope_scaling_factor": 8.0}},
    "rotary_percent": {"model": {"rotary_percent": 0.5}},
    "bf16": {"training": {"precision": "bf16"}},
    "recompute": {"training": {"recompute_granularity": "full"}},
    "recompute attention": {"training": {"recompute_granularity": "selective"}},
    "fused loss": {"training": {"cross_entropy_loss_fusion": True, "precision": "bf16"}},
    "token mean": {"training": {"loss_mean": "token"}},
    "documents": {"data": {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}},
    "distributed optimizer": {"parallel": {"use_distributed_optimizer": True}},
    "overlap": {"parallel": {"use_distributed_optimizer": True, "overlap_grad_reduce": True}},
}
WAYS = ("experts, alltoall", "fused loss")
"""Choices of a way to the same numbers, beside what they need."""


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Sections with all values; a value of a later part holds."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            both = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = merged(found[name], value) if both else value
    return found


def config(changes: dict[str, Any]) -> RunConfig:
    sections: dict[str, Any] = {
        "project": "tests",
        "name": "pairs",
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
        },
        "data": {"tokenizer": "none", "datasets": ["none"]},
        "training": {"steps": 1, "micro_batch_size": 2, "global_batch_size": 4, "seq_length": LENGTH, "threads": 1},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"interval": 1},
        "job": {"time": "1", "ntasks_per_node": int(world_size)},
        "cluster": {"name": "t", "scheduler": "local"},
    }
    return RunConfig.model_validate_json(json.dumps(merged(sections, json.loads(layout), changes)))


@dataclass
class Found:
    """A model of some settings: how it ended, and a hash of the loss and gradients of its first step if it has one."""

    said: str
    digest: str = ""


def found(ranks: distributed.Ranks, changes: dict[str, Any]) -> Found:
    """`refused: why`, `trains`, or what is wrong."""
    try:
        settings = config(changes)
    except (ValidationError, RelayrunError) as error:
        return Found(f"refused: {error.errors()[0]['msg'] if isinstance(error, ValidationError) else error}")
    tokens = np.random.default_rng(0).integers(EOD, VOCABULARY, (2, LENGTH + 1))
    model = ModelStage(settings, ranks, VOCABULARY, eod=EOD)
    model.train_mode(True)
    model.zero_grad()
    loss = model.run([MicroBatch(tokens=tokens)] * 2, train=True).total
    model.sharded_state_dict({})
    weights = [each for chunk in model.chunks for each in chunk.named_parameters()]
    if not np.isfinite(loss) or not all(bool(weight.main_grad.isfinite().all()) for _, weight in weights):
        return Found("the loss or a gradient is not finite")
    without = [name for name, weight in weights if not weight.main_grad.any() and "local_experts" not in name]
    if without:
        return Found(f"no gradient: {', '.join(without)}")
    if unknown := {name for _, name in parameter_names(model.chunks)} - {*possible_names(settings.model)}:
        return Found(f"names of which optimizer.groups would be refused: {unknown}")
    digest = hashlib.sha256(np.float64(loss).tobytes())
    for _, weight in weights:
        digest.update(weight.main_grad.float().numpy().tobytes())
    return Found("trains", digest.hexdigest())


def outcome(ranks: distributed.Ranks, changes: dict[str, Any]) -> Found:
    """The same, where an error ends all ranks but if there is one alone."""
    try:
        return found(ranks, changes)
    except Exception as error:
        if ranks.world_size > 1:
            raise RuntimeError(f"of {changes}") from error
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Found(f"{type(error).__name__} at {where.filename}:{where.lineno}: {str(error)[:200]}")


def main() -> None:
    ranks = distributed.start_process_groups(config({}))
    plain = found(ranks, {}).digest
    alone = {name: outcome(ranks, changes) for name, changes in CHOICES.items()}
    answers = {name: each.said for name, each in alone.items()}
    for names in itertools.combinations(CHOICES, 2) if ranks.world_size == 1 else ():
        changes = merged(*(CHOICES[name] for name in names))
        both = outcome(ranks, changes)
        for name, other in (names, names[::-1]):
            more = changes != CHOICES[other] and alone[name].digest != plain and name not in WAYS
            if both.said == "trains" and more and both.digest == alone[other].digest:
                both.said = f"{name} changes nothing"
        answers[" + ".join(names)] = both.said
    print(json.dumps(answers if rank == "0" else {}))
    distributed.stop_process_groups()


main()
