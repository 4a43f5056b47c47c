"""Qwen 3, dense: a Llama whose queries and keys have a norm of their own, and whose heads have a size of their own."""

from __future__ import annotations

from relayrun.train.export.llama import ATTENTION, ATTENTION_WEIGHTS, EMBEDDINGS, LAST, MLP_WEIGHTS, OF
from relayrun.train.export.model_mapping import ModelMapping, Weight

NORMS_OF_HEADS = (
    Weight(ATTENTION + "q_layernorm.weight", ("head",), (OF + "self_attn.q_norm.weight",)),
    Weight(ATTENTION + "k_layernorm.weight", ("head",), (OF + "self_attn.k_norm.weight",)),
)

QWEN3 = ModelMapping(
    name="Qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    weights=(EMBEDDINGS, *ATTENTION_WEIGHTS, *NORMS_OF_HEADS, *MLP_WEIGHTS, *LAST),
    transformer={"qk_layernorm": True},
    settings={"kv_channels": "head_dim"},
    config={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    defaults={"hidden_act": "silu", "head_dim": 128},
)
