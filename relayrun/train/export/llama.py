"""The Llama: RMSNorm, SwiGLU, rotary positions, grouped queries (arXiv 2407.21783).

linear_qkv holds for each query group its queries, then its key, then its value; linear_fc1 the gate, then the up
projection. The norms stand under the names that TransformerEngine gives them, as parts of the layer behind them.
"""

from __future__ import annotations

from relayrun.train.export.joins import GATE_UP, QKV
from relayrun.train.export.model_mapping import EMBEDDING, FINAL_NORM, OUTPUT, ModelMapping, Weight

LAYER_PREFIX = "model.layers.{layer}."
ATTENTION_PREFIX = "decoder.layers.self_attention."

EMBEDDING_WEIGHTS = Weight(EMBEDDING, ("vocabulary", "hidden"), ("model.embed_tokens.weight",))
ATTENTION_WEIGHTS = (
    Weight(ATTENTION_PREFIX + "linear_qkv.layer_norm_weight", ("hidden",), (LAYER_PREFIX + "input_layernorm.weight",)),
    Weight(
        ATTENTION_PREFIX + "linear_qkv.weight",
        ("qkv", "hidden"),
        (
            LAYER_PREFIX + "self_attn.q_proj.weight",
            LAYER_PREFIX + "self_attn.k_proj.weight",
            LAYER_PREFIX + "self_attn.v_proj.weight",
        ),
        QKV,
    ),
    Weight(ATTENTION_PREFIX + "linear_proj.weight", ("hidden", "queries"), (LAYER_PREFIX + "self_attn.o_proj.weight",)),
)
MLP_WEIGHTS = (
    Weight(
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        ("hidden",),
        (LAYER_PREFIX + "post_attention_layernorm.weight",),
    ),
    Weight(
        "decoder.layers.mlp.linear_fc1.weight",
        ("gate_up", "hidden"),
        (LAYER_PREFIX + "mlp.gate_proj.weight", LAYER_PREFIX + "mlp.up_proj.weight"),
        GATE_UP,
    ),
    Weight("decoder.layers.mlp.linear_fc2.weight", ("hidden", "ffn"), (LAYER_PREFIX + "mlp.down_proj.weight",)),
)
LAST_WEIGHTS = (
    Weight(FINAL_NORM, ("hidden",), ("model.norm.weight",)),
    Weight(OUTPUT, ("vocabulary", "hidden"), ("lm_head.weight",)),
)

LLAMA = ModelMapping(
    name="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    weights=(EMBEDDING_WEIGHTS, *ATTENTION_WEIGHTS, *MLP_WEIGHTS, *LAST_WEIGHTS),
    settings={"kv_channels": "head_dim"},
    config={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    defaults={"hidden_act": "silu"},
)
