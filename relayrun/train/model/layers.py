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
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from relayrun.config.compose.expert_layout import expert_layer_pattern
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import FatalTrainingError
from relayrun.train import megatron_versions
from relayrun.train.model.activations import XieluMLP, activation_inside_layer
from relayrun.train.model.attention import CausalAttention
from relayrun.train.model.document_attention import document_attention
from relayrun.train.model.experts import local_experts
from relayrun.train.model.latent_attention import LatentAttention, patch_latent_attention
from relayrun.train.model.norm import Norm, NormWithState

Implementation = Literal["local", "transformer_engine"]

BEFORE_MLP = "pre_mlp_layernorm."
LATENT_NAMES = {
    BEFORE_MLP: "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Names of norms in a checkpoint where layers have latent attention: TransformerEngine's, whose linear layers have the
norms before them as a part. A norm before experts is one by itself there, too."""


def layer_implementation(config: RunConfig) -> Implementation:
    """What `training.transformer_impl` comes to here. Raises FatalTrainingError if TransformerEngine is missing."""
    wanted = config.training.transformer_impl
    if wanted == "auto":
        # where TransformerEngine has no way, or none as fast
        local = config.data.attends_documents or config.window_over_ranks
        usable = HAVE_TE and torch.cuda.is_available() and not local
        return "transformer_engine" if usable else "local"
    if wanted == "transformer_engine" and not HAVE_TE:
        raise FatalTrainingError(
            "TransformerEngine is not installed where the ranks run, and training.transformer_impl asks for it",
            hint="use a container that has it, or set training.transformer_impl=local",
        )
    return wanted


def block_spec(chosen: Implementation, transformer: TransformerConfig, stage: int) -> TransformerBlockSubmodules:
    """The layers of one virtual stage of this rank, and the norm behind the last."""
    if chosen == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = _transformer_engine_layer, TENorm
    else:
        layer, norm = _local_layer, NormWithState
    first = get_transformer_layer_offset(transformer, vp_stage=stage)
    count = get_num_layers_to_build(transformer, vp_stage=stage)
    experts = expert_layer_pattern(transformer.moe_layer_freq, transformer.num_layers, transformer.num_moe_experts)
    experts = experts[first : first + count]
    # one object for all layers of a kind
    kinds = {kind: layer(transformer, transformer.num_moe_experts if kind else None) for kind in set(experts)}
    return TransformerBlockSubmodules(layer_specs=[kinds[kind] for kind in experts], layer_norm=norm)


def _transformer_engine_layer(transformer: TransformerConfig, experts: int | None) -> ModuleSpec:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    layer: ModuleSpec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=transformer.moe_grouped_gemm, **_attention_arguments(transformer)
    )
    attention = layer.submodules.self_attention
    attention.submodules.core_attention = document_attention(TEDotProductAttention)
    if transformer.multi_latent_attention:
        attention.module = LatentAttention
    return _with_xielu(layer, transformer)


def _local_layer(transformer: TransformerConfig, experts: int | None) -> ModuleSpec:
    layer: ModuleSpec = get_gpt_layer_local_spec(
        normalization="RMSNorm",  # without it megatron-core says that Apex is not installed
        **_attention_arguments(transformer),
    )
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    names = dict(parts.sharded_state_dict_keys_map)
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, None) is WrappedTorchNorm:
            setattr(attention, name, NormWithState)
    attention.core_attention = CausalAttention
    if transformer.multi_latent_attention:
        patch_latent_attention()
        parts.self_attention.module = LatentAttention
        parts.input_layernorm = NormWithState
        if transformer.qk_layernorm:
            attention.q_layernorm = attention.kv_layernorm = Norm
        names |= LATENT_NAMES
    if experts is not None:
        parts.mlp = local_experts(transformer)
        parts.pre_mlp_layernorm = NormWithState
        names.pop(BEFORE_MLP, None)
    parts.sharded_state_dict_keys_map = names
    return _with_xielu(layer, transformer)


def _attention_arguments(transformer: TransformerConfig) -> dict[str, bool]:
    """What megatron-core's functions that make layer specs ask of attention."""
    names = ("qk_layernorm", "qk_l2_norm", "multi_latent_attention")
    return {name: getattr(transformer, name) for name in names}


def _with_xielu(layer: ModuleSpec, transformer: TransformerConfig) -> ModuleSpec:
    if transformer.activation_func is activation_inside_layer:
        layer.submodules.mlp = megatron_versions.with_feed_forward(layer.submodules.mlp, XieluMLP)
    return layer
