"""Which modules the layers are made of: TransformerEngine's, or local ones that need torch alone.

The local ones are megatron-core's local layer spec with another core attention and another norm. Names and shapes
in a checkpoint are the same with both.
"""

from __future__ import annotations

from typing import Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from relayrun.config.schema import RunConfig
from relayrun.errors import FatalTrainingError
from relayrun.training.model.attention import CausalAttention
from relayrun.training.model.document_attention import document_attention
from relayrun.training.model.norm import FinalNorm, RMSNorm

Implementation = Literal["local", "transformer_engine"]


def implementation(config: RunConfig) -> Implementation:
    """What `training.transformer_impl` comes to here. Raises FatalTrainingError if TransformerEngine is missing."""
    wanted = config.training.transformer_impl
    if wanted == "auto":
        usable = HAVE_TE and torch.cuda.is_available() and not config.data.attends_documents
        return "transformer_engine" if usable else "local"
    if wanted == "transformer_engine" and not HAVE_TE:
        raise FatalTrainingError(
            "TransformerEngine is not installed where the ranks run, and training.transformer_impl asks for it",
            hint="use a container that has it, or set training.transformer_impl=local",
        )
    return wanted


def block_spec(chosen: Implementation, transformer: TransformerConfig, stage: int) -> TransformerBlockSubmodules:
    """The layers of one virtual stage of this rank, and the norm behind the last."""
    layer: ModuleSpec
    if chosen == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm

        layer, norm = get_gpt_layer_with_transformer_engine_spec(), TENorm
        layer.submodules.self_attention.submodules.core_attention = document_attention(TEDotProductAttention)
    else:
        layer, norm = get_gpt_layer_local_spec(normalization="RMSNorm"), FinalNorm
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        parts.self_attention.submodules.core_attention = CausalAttention
    layers = get_num_layers_to_build(transformer, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)
