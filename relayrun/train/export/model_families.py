"""The built-in mappings, of Llama, Qwen3, Mixtral and Apertus (`model_families.yaml`), and the mapping of a model."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import ModelSection
from relayrun.errors import ConfigError, InputError
from relayrun.train.export.model_mapping import GATE_UP, QKV, SAME, ModelMapping, Weight

LAYER_PREFIX, ATTENTION_PREFIX = "model.layers.{layer}.", "decoder.layers.self_attention."
"""Beginnings of names, for mappings of one's own."""
_JOINS = {"": SAME, "qkv": QKV, "gate_up": GATE_UP}
_TABLES = yaml_file.read_yaml(Path(__file__).with_suffix(".yaml")).values
_PARTS = {
    part: [
        Weight(key, tuple(each["shape"]), tuple(each["names"]), _JOINS[each.get("join", "")], each.get("also"))
        for key, each in own.items()
    ]
    for part, own in _TABLES["parts"].items()
}
CONFIG_NAMES: Mapping[str, str] = _TABLES["names"]
"""Settings of `model` by their names in config.json."""
BUILT_IN_MAPPINGS = LLAMA, QWEN3, MIXTRAL, APERTUS = tuple(
    ModelMapping(name=name, **own | {"weights": tuple(each for part in own["weights"] for each in _PARTS[part])})
    for name, own in _TABLES["families"].items()
)

_HOW_IT_IS_COMPUTED = frozenset({"moe_grouped_gemm", "moe_router_dtype"})
"""Settings of `model.transformer` that change the results of a model by rounding only."""

_KNOWN = frozenset({*CONFIG_NAMES.values(), *_TABLES["known"]})
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
