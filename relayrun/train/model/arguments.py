"""`model.transformer` as arguments of megatron-core's TransformerConfig, checked against the one that is installed."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from typing import Any

import torch.nn.functional as functional
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from relayrun.config.compose.schema import ModelSection
from relayrun.config.sections.latent_attention import LatentAttentionFields
from relayrun.config.sections.transformer import LLAMA_DEFAULTS
from relayrun.errors import FatalTrainingError
from relayrun.train.model.activations import ACTIVATION_FUNCTIONS


def transformer_arguments(model: ModelSection, *, on_gpu: bool) -> dict[str, Any]:
    """What `model.transformer` says, by the names of the fields.

    Raises FatalTrainingError if the installed megatron-core lacks a field that is set.
    """
    settings = model.transformer
    given = settings.model_dump() | {name: getattr(settings, name) for name in LLAMA_DEFAULTS}
    if settings.multi_latent_attention:
        given |= {name: getattr(settings, name) for name in LatentAttentionFields.model_fields}
        given |= {"rotary_base": model.rotary_base, "rotary_percent": model.rotary_percent}
    kind = MLATransformerConfig if settings.multi_latent_attention else TransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    if missing := sorted(set(given) - known):
        raise FatalTrainingError(
            f"megatron-core {version('megatron-core')}, which the ranks have, knows no {', '.join(missing)}",
            hint="leave it out of model.transformer, or install a version that has it",
        )
    function = ACTIVATION_FUNCTIONS[settings.activation_func]
    # the one kernel that computes what the settings say: the others leave out an offset or a bound
    plain = settings.glu_linear_offset == 0 and settings.activation_func_clamp_value is None
    fused = on_gpu and function is functional.silu and settings.gated_linear_unit and plain
    given |= {"activation_func": function, "bias_activation_fusion": fused}
    if settings.window_size is not None:
        given["window_size"] = tuple(settings.window_size)
    return given
