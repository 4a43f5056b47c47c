"""Mixtral: a Llama with experts in the place of every feed-forward network, of which a router takes the best few.

An expert's w1 is its gate, w3 its up projection, w2 its down projection. The router's probabilities are the softmax of
the chosen scores, in both: all of them first and then scaled to a sum of 1 there, the chosen ones alone here.
"""

from __future__ import annotations

from relayrun.train.export.joins import GATE_UP
from relayrun.train.export.llama import ATTENTION_WEIGHTS, EMBEDDING_WEIGHTS, LAST_WEIGHTS, LAYER_PREFIX
from relayrun.train.export.model_mapping import EXPERTS, ModelMapping, Weight

MLP_PREFIX = "decoder.layers.mlp."
EXPERT_PREFIX = LAYER_PREFIX + "block_sparse_moe.experts.{expert}."

EXPERT_WEIGHTS = (
    Weight(
        "decoder.layers.pre_mlp_layernorm.weight",
        ("hidden",),
        (LAYER_PREFIX + "post_attention_layernorm.weight",),
        also=MLP_PREFIX + "linear_fc1.layer_norm_weight",  # what megatron-core's local layers call it
    ),
    Weight(MLP_PREFIX + "router.weight", ("experts", "hidden"), (LAYER_PREFIX + "block_sparse_moe.gate.weight",)),
    Weight(
        f"decoder.layers.{EXPERTS}linear_fc1.weight",
        ("expert_gate_up", "hidden"),
        (EXPERT_PREFIX + "w1.weight", EXPERT_PREFIX + "w3.weight"),
        GATE_UP,
    ),
    Weight(f"decoder.layers.{EXPERTS}linear_fc2.weight", ("hidden", "expert_ffn"), (EXPERT_PREFIX + "w2.weight",)),
)

MIXTRAL = ModelMapping(
    name="Mixtral",
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    weights=(EMBEDDING_WEIGHTS, *ATTENTION_WEIGHTS, *EXPERT_WEIGHTS, *LAST_WEIGHTS),
    settings={
        "kv_channels": "head_dim",
        "num_moe_experts": "num_local_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": "intermediate_size",
    },
    config={"hidden_act": "silu", "sliding_window": None},
    defaults={"hidden_act": "silu", "num_local_experts": 8, "num_experts_per_tok": 2},
)
