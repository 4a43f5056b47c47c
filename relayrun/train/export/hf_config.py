"""From the section `model` of a run config to a config.json of transformers, and back, by a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relayrun.config.compose.schema import ModelSection
from relayrun.config.sections.transformer import TransformerSection
from relayrun.errors import InputError
from relayrun.train.export.model_mapping import ModelMapping

ROPE_CONTEXT = 8192
"""Original context of Llama 3.1's rotary scaling, as megatron-core and the schema have it."""
_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ROPE_CONTEXT}
_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "rope_theta": 10_000.0}
"""Values in transformers where a config.json names none and a mapping no other."""


def to_huggingface_config(
    mapping: ModelMapping,
    model: ModelSection,
    *,
    vocabulary: int,
    seq_length: int,
    dtype: str,
    bos: int | None,
    eos: int | None,
) -> dict[str, Any]:
    """Return config.json as values, in the names that every transformers reads which has the class."""
    own = model.transformer
    base = float(model.rotary_base)
    scaling, context = None, seq_length
    if model.rope_scaling_factor is not None:
        scaling = {"rope_type": "llama3", "factor": float(model.rope_scaling_factor), **_SCALING}
        context = max(seq_length, int(ROPE_CONTEXT * model.rope_scaling_factor))
    return {
        "architectures": [mapping.architecture],
        "model_type": mapping.model_type,
        "vocab_size": vocabulary,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.head_channels,
        "max_position_embeddings": context,
        "rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": base},  # of transformers 5
        "rope_theta": base,
        "rope_scaling": scaling,
        "rms_norm_eps": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "attention_dropout": 0.0,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": dtype,
        "use_cache": True,
        **mapping.config,
        **{name: value for key, name in mapping.settings.items() if (value := getattr(own, key)) is not None},
    }


def from_huggingface_config(
    mapping: ModelMapping, config: Mapping[str, Any], divisible_by: int, *, where: object
) -> ModelSection:
    """Return the model section of a config.json, of transformers 4 or 5.

    Raises InputError if it is none that a run can train.
    """
    config = {**_DEFAULTS, **mapping.defaults, **{name: value for name, value in config.items() if value is not None}}
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise InputError(
            f"does not describe {mapping.with_article}: hidden_size {hidden!r}, num_attention_heads {heads!r}",
            where=where,
        )
    rope = config.get("rope_parameters") or (config.get("rope_scaling") or {})
    fixed = {name: (config.get(name, _like(value)), value) for name, value in mapping.config.items()}
    fixed["quantization_config"] = (config.get("quantization_config"), None)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "llama3":
        fixed |= {f"rope_scaling.{name}": (rope.get(name), value) for name, value in _SCALING.items()}
    elif kind != "default":
        fixed["rope_scaling.rope_type"] = (kind, "llama3")
    base = rope.get("rope_theta", config["rope_theta"])
    fixed["rope_theta"] = (base, int(base))
    for name, (found, wanted) in fixed.items():
        if found != wanted:
            raise InputError(
                f"{name} is {found!r}; only {wanted!r} can be imported",
                where=where,
                hint=f"a run can train {mapping.with_article} that has it so; see docs/export.md",
            )
    transformer = dict(mapping.transformer) | {
        setting: config[name] for setting, name in mapping.settings.items() if config.get(name) is not None
    }
    if transformer.get("kv_channels") == hidden // heads:
        del transformer["kv_channels"]
    try:
        return ModelSection(
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden,
            ffn_hidden_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=config.get("num_key_value_heads") or heads,
            rotary_base=int(base),
            rope_scaling_factor=float(rope["factor"]) if kind == "llama3" else None,
            norm_epsilon=float(config["rms_norm_eps"]),
            init_method_std=float(config["initializer_range"]),
            untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
            make_vocab_size_divisible_by=divisible_by,
            transformer=TransformerSection.model_validate(transformer),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"does not describe {mapping.with_article}: {error}", where=where) from None


def _like(wanted: object) -> object:
    """What transformers takes where config.json has no such entry and the mapping names no default."""
    return False if isinstance(wanted, bool) else None
