"""The built-in mappings (Llama, Qwen3, Mixtral, Apertus), and the choice of the mapping of a model.

Llama: RMSNorm, SwiGLU, rotary positions, grouped queries (arXiv 2407.21783). Qwen3, dense: a Llama whose queries and
keys have a norm, and whose heads have an independent size. Mixtral: a Llama with experts in place of every feed-forward
layer. Apertus: a Llama with Qwen3's norms and xIELU (arXiv 2411.13010) without a gate.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relayrun.config.compose.schema import ModelSection
from relayrun.errors import ConfigError, InputError
from relayrun.train.export.model_mapping import (
    EMBEDDING,
    EXPERTS,
    FINAL_NORM,
    GATE_UP,
    OUTPUT,
    QKV,
    ModelMapping,
    Weight,
)

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


MLP_PREFIX = "decoder.layers.mlp."
EXPERT_PREFIX = LAYER_PREFIX + "block_sparse_moe.experts.{expert}."

EXPERT_WEIGHTS = (
    Weight(
        "decoder.layers.pre_mlp_layernorm.weight",
        ("hidden",),
        (LAYER_PREFIX + "post_attention_layernorm.weight",),
        also=MLP_PREFIX + "linear_fc1.layer_norm_weight",  # in megatron-core's local layers
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


BUILT_IN_MAPPINGS = (LLAMA, QWEN3, MIXTRAL, APERTUS)

_HOW_IT_IS_COMPUTED = frozenset({"moe_grouped_gemm", "moe_router_dtype"})
"""Settings of `model.transformer` that change the results of a model by rounding only."""

_KNOWN = frozenset(
    {
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "rotary_base",
        "rope_scaling_factor",
        "norm_epsilon",
        "init_method_std",
        "hidden_dropout",
        "attention_dropout",
        "untie_embeddings_and_output_weights",
        "make_vocab_size_divisible_by",
        "mapping",
        "transformer",
    }
)
"""Settings of the section `model` that config.json has, or that concern training only; others refuse the export."""


def mapping_for_model(model: ModelSection, path: str | None = None) -> ModelMapping:
    """Return the mapping at the import path `path`, or of the model's own config, or a built-in one that fits. Raises
    ConfigError if the path leads to no mapping, and InputError with the differences if no built-in one fits."""
    path = path or getattr(model, "mapping", None)
    if path is not None:
        return import_mapping(path)
    differences = {mapping.name: _differences(mapping, model) for mapping in BUILT_IN_MAPPINGS}
    for mapping in BUILT_IN_MAPPINGS:
        if not differences[mapping.name]:
            return mapping
    nearest = min(differences, key=lambda name: len(differences[name]))
    raise InputError(
        f"no class of transformers is known for this model; nearest is {nearest}: {', '.join(differences[nearest])}",
        where="model.transformer",
        hint="give a mapping of your own by its import path: --mapping, or model.mapping (`relayrun help export`)",
    )


def mapping_for_config(config: Mapping[str, Any], path: str | None = None, *, where: object) -> ModelMapping:
    """Return the mapping at the import path `path`, or the built-in one of a config.json. Raises ConfigError if the
    path leads to no mapping, InputError without a built-in one and for a mapping of another type."""
    kind = config.get("model_type")
    if path is not None:
        mapping = import_mapping(path)
        if mapping.model_type != kind:
            raise InputError(f"model_type is {kind!r}; {path} is for {mapping.model_type!r}", where=where)
        return mapping
    known = {mapping.model_type: mapping for mapping in BUILT_IN_MAPPINGS}
    if kind not in known:
        raise InputError(
            f"model_type is {kind!r}; only {', '.join(map(repr, known))} can be imported",
            where=where,
            hint="give a mapping of your own by its import path with --mapping (`relayrun help export`)",
        )
    return known[kind]


def import_mapping(path: str) -> ModelMapping:
    """Import a mapping from `package.module:name`. Raises ConfigError."""
    module, _, name = path.partition(":")
    hint = "write package.module:name, a ModelMapping, where this Python finds the module (PYTHONPATH)"
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", path) is None:
        raise ConfigError(f"{path!r} is no import path", where="mapping", hint=hint)
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        words = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} cannot be imported: {words}", where="mapping", hint=hint) from error
    if not isinstance(found, ModelMapping):
        raise ConfigError(f"{path} is {type(found).__name__}, not a ModelMapping", where="mapping", hint=hint)
    return found


def require_llama(model: ModelSection, where: object) -> ModelMapping:
    """Return the Llama's mapping. Raises InputError for another model, which Megatron's folders cannot hold."""
    if own := _own(model):
        raise InputError(
            f"only a Llama goes across the border to Megatron-LM; this has {', '.join(own)}",
            where=where,
            hint="`relayrun export hf` knows more models",
        )
    return LLAMA


def _differences(mapping: ModelMapping, model: ModelSection) -> list[str]:
    own = _own(model)
    lacking = [
        f"{name} is {getattr(model.transformer, name)!r}, not {value!r}"
        for name, value in mapping.transformer.items()
        if getattr(model.transformer, name) != value
    ]
    if "num_moe_experts" in mapping.settings and model.transformer.num_moe_experts is None:
        lacking.append("num_moe_experts is None")
    known = {*mapping.transformer, *mapping.settings, *_HOW_IT_IS_COMPUTED}
    return lacking + [f"{name} is {value!r}" for name, value in own.items() if name not in known]


def _own(model: ModelSection) -> dict[str, Any]:
    found = dict(model.transformer.of_the_weights)
    balancing = model.transformer.moe_router_load_balancing_type
    if "sinkhorn" in balancing:  # it weighs experts differently, also after training
        found["moe_router_load_balancing_type"] = balancing
    for name, setting in ModelSection.model_fields.items():
        if name not in _KNOWN and getattr(model, name) != setting.default:
            found[name] = getattr(model, name)
    return found
