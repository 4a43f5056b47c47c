"""Apertus: a Llama with norms of queries and keys as Qwen 3 has them, and xIELU (arXiv 2411.13010) without a gate.

xIELU has two numbers that are trained in every layer. transformers keeps two more beside them that are not.
"""

from __future__ import annotations

from dataclasses import replace

from relayrun.train.export.llama import ATTENTION_WEIGHTS, EMBEDDINGS, LAST, OF
from relayrun.train.export.model_mapping import ModelMapping, Weight
from relayrun.train.export.qwen3 import NORMS_OF_HEADS

MLP = "decoder.layers.mlp."

XIELU_WEIGHTS = (
    Weight(MLP + "linear_fc1.layer_norm_weight", ("hidden",), (OF + "feedforward_layernorm.weight",)),
    Weight(MLP + "linear_fc1.weight", ("ffn", "hidden"), (OF + "mlp.up_proj.weight",)),
    Weight(MLP + "activation_func.alpha_p", (1,), (OF + "mlp.act_fn.alpha_p",)),
    Weight(MLP + "activation_func.alpha_n", (1,), (OF + "mlp.act_fn.alpha_n",)),
    Weight(MLP + "linear_fc2.weight", ("hidden", "ffn"), (OF + "mlp.down_proj.weight",)),
)
INPUT_NORM, *REST = ATTENTION_WEIGHTS

APERTUS = ModelMapping(
    name="Apertus",
    model_type="apertus",
    architecture="ApertusForCausalLM",
    weights=(
        EMBEDDINGS,
        replace(INPUT_NORM, names=(OF + "attention_layernorm.weight",)),
        *REST,
        *NORMS_OF_HEADS,
        *XIELU_WEIGHTS,
        *LAST,
    ),
    constants={OF + "mlp.act_fn.beta": 0.5, OF + "mlp.act_fn.eps": -1e-6},
    transformer={"qk_layernorm": True, "gated_linear_unit": False, "activation_func": "xielu"},
    settings={"kv_channels": "head_dim"},
    config={"hidden_act": "xielu", "attention_bias": False},
    defaults={"hidden_act": "xielu"},
)
