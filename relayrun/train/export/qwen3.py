"""Qwen 3, dense: a Llama whose queries and keys have a norm of their own, and whose heads have a size of their own."""

from __future__ import annotations

from relayrun.train.export.llama import (
    ATTENTION_PREFIX,
    ATTENTION_WEIGHTS,
    EMBEDDING_WEIGHTS,
    LAST_WEIGHTS,
    LAYER_PREFIX,
    MLP_WEIGHTS,
)
from relayrun.train.export.model_mapping import ModelMapping, Weight

QK_NORM_WEIGHTS = (
    Weight(ATTENTION_PREFIX + "q_layernorm.weight", ("head",), (LAYER_PREFIX + "self_attn.q_norm.weight",)),
    Weight(ATTENTION_PREFIX + "k_layernorm.weight", ("head",), (LAYER_PREFIX + "self_attn.k_norm.weight",)),
)

QWEN3 = ModelMapping(
    name="Qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    weights=(EMBEDDING_WEIGHTS, *ATTENTION_WEIGHTS, *QK_NORM_WEIGHTS, *MLP_WEIGHTS, *LAST_WEIGHTS),
    transformer={"qk_layernorm": True},
    settings={"kv_channels": "head_dim"},
    config={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    defaults={"hidden_act": "silu", "head_dim": 128},
)
