"""Qwen 2 for `relayrun export hf --mapping qwen2:QWEN2`: a Llama with biases behind queries, keys and values."""

from dataclasses import replace

from relayrun.train.export.model_families import ATTENTION_PREFIX, LAYER_PREFIX, LLAMA
from relayrun.train.export.model_mapping import QKV, Weight

BIASES = Weight(
    ATTENTION_PREFIX + "linear_qkv.bias",  # its name in a checkpoint: all layers in one tensor
    ("qkv",),  # the shape of one layer
    tuple(f"{LAYER_PREFIX}self_attn.{part}_proj.bias" for part in "qkv"),
    QKV,  # the query groups one behind the other there, all queries, keys and values here
)
QWEN2 = replace(
    LLAMA,
    name="Qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    weights=(*LLAMA.weights, BIASES),
    transformer={"add_qkv_bias": True},  # model.transformer must say so, and an import says so
    settings={},
    config={"hidden_act": "silu", "use_sliding_window": False},  # the same in every config.json
)
