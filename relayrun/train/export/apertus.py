"""Apertus: a Llama with norms of queries and keys as Qwen 3 has them, and xIELU (arXiv 2411.13010) without a gate.

xIELU has two numbers that are trained in every layer. transformers keeps two more beside them that are not.
"""

from __future__ import annotations

from dataclasses import replace

from relayrun.train.export.llama import ATTENTION_WEIGHTS, EMBEDDING_WEIGHTS, LAST_WEIGHTS, LAYER_PREFIX
from relayrun.train.export.model_mapping import ModelMapping, Weight
from relayrun.train.export.qwen3 import QK_NORM_WEIGHTS

MLP_PREFIX = "decoder.layers.mlp."

XIELU_WEIGHTS = (
    Weight(MLP_PREFIX + "linear_fc1.layer_norm_weight", ("hidden",), (LAYER_PREFIX + "feedforward_layernorm.weight",)),
    Weight(MLP_PREFIX + "linear_fc1.weight", ("ffn", "hidden"), (LAYER_PREFIX + "mlp.up_proj.weight",)),
    Weight(MLP_PREFIX + "activation_func.alpha_p", (1,), (LAYER_PREFIX + "mlp.act_fn.alpha_p",)),
    Weight(MLP_PREFIX + "activation_func.alpha_n", (1,), (LAYER_PREFIX + "mlp.act_fn.alpha_n",)),
    Weight(MLP_PREFIX + "linear_fc2.weight", ("hidden", "ffn"), (LAYER_PREFIX + "mlp.down_proj.weight",)),
)
INPUT_NORM, *REST = ATTENTION_WEIGHTS

APERTUS = ModelMapping(
    name="Apertus",
    model_type="apertus",
    architecture="ApertusForCausalLM",
    weights=(
        EMBEDDING_WEIGHTS,
        replace(INPUT_NORM, names=(LAYER_PREFIX + "attention_layernorm.weight",)),
        *REST,
        *QK_NORM_WEIGHTS,
        *XIELU_WEIGHTS,
        *LAST_WEIGHTS,
    ),
    constants={LAYER_PREFIX + "mlp.act_fn.beta": 0.5, LAYER_PREFIX + "mlp.act_fn.eps": -1e-6},
    transformer={"qk_layernorm": True, "gated_linear_unit": False, "activation_func": "xielu"},
    settings={"kv_channels": "head_dim"},
    config={"hidden_act": "xielu", "attention_bias": False},
    defaults={"hidden_act": "xielu"},
)
