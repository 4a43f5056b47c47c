"""Modules of the layers: TransformerEngine's, local ones that need only torch, or a user's; norms; activations.

The local layers are megatron-core's local layer spec with another core attention and another norm. Names and shapes in
a checkpoint are equal with both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as functional
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from relayrun.config.compose.layout_rules import expert_layer_pattern
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.train import megatron_versions
from relayrun.train.model.attention import CausalAttention, LatentAttention
from relayrun.train.model.experts import local_experts
from relayrun.train.model.packed_documents import document_attention
from relayrun.train.user_code import describe_error, import_user_object

Implementation = Literal["local", "transformer_engine"]


def layer_implementation(config: RunConfig) -> Implementation:
    """Resolve `training.transformer_impl`. Raises FatalTrainingError if TransformerEngine is missing."""
    wanted = config.training.transformer_impl
    if wanted == "auto":
        # cases that TransformerEngine lacks, or computes more slowly
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
    """Return the spec of the layers of one virtual stage of this rank, and the norm after the last."""
    if chosen == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = _transformer_engine_layer, TENorm
    else:
        layer, norm = _local_layer, NormWithExtraState
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


BEFORE_MLP = "pre_mlp_layernorm."
LATENT_NAMES = {
    BEFORE_MLP: "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""TransformerEngine's names of norms in a checkpoint of layers with latent attention, whose linear layers contain the
norms before them. A norm before experts is separate there, too."""


def _local_layer(transformer: TransformerConfig, experts: int | None) -> ModuleSpec:
    layer: ModuleSpec = get_gpt_layer_local_spec(
        normalization="RMSNorm",  # else megatron-core warns that Apex is not installed
        **_attention_arguments(transformer),
    )
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    names = dict(parts.sharded_state_dict_keys_map)
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, None) is WrappedTorchNorm:
            setattr(attention, name, NormWithExtraState)
    attention.core_attention = CausalAttention
    if transformer.multi_latent_attention:
        # megatron-core 0.16.1 assumes TransformerEngine and calls isinstance with a class that is None: TypeError
        if not HAVE_TE:
            multi_latent_attention.HAVE_TE = False
        parts.self_attention.module = LatentAttention
        parts.input_layernorm = NormWithExtraState
        if transformer.qk_layernorm:
            attention.q_layernorm = attention.kv_layernorm = Norm
        names |= LATENT_NAMES
    if experts is not None:
        parts.mlp = local_experts(transformer)
        parts.pre_mlp_layernorm = NormWithExtraState
        names.pop(BEFORE_MLP, None)
    parts.sharded_state_dict_keys_map = names
    return _with_xielu(layer, transformer)


def _attention_arguments(transformer: TransformerConfig) -> dict[str, bool]:
    names = ("qk_layernorm", "qk_l2_norm", "multi_latent_attention")
    return {name: getattr(transformer, name) for name in names}


def _with_xielu(layer: ModuleSpec, transformer: TransformerConfig) -> ModuleSpec:
    if transformer.activation_func is activation_inside_layer:
        layer.submodules.mlp = megatron_versions.with_feed_forward(layer.submodules.mlp, XieluMLP)
    return layer


class Norm(torch.nn.Module):
    """Norm for megatron-core's layer specs, of the kind `config.normalization`, with its arguments.

    RMSNorm has a weight per channel, LayerNorm a bias, too.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        # stored as the difference from 1, or unchanged
        self._offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self._eps = eps
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1 - self._offset, dtype=config.params_dtype))
        self.bias: torch.nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        # each tensor-parallel rank sees a part of the sequence, so megatron-core sums the gradients
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] → the same shape."""
        weight = self.weight + self._offset if self._offset else self.weight
        if self.bias is None:
            return functional.rms_norm(hidden, weight.shape, weight, self._eps)
        return functional.layer_norm(hidden, weight.shape, weight, self.bias, self._eps)


class NormWithExtraState(Norm):
    """Norm with the empty extra state that TransformerEngine's norm has in its place.

    So a checkpoint of local layers has every key that a program with TransformerEngine reads: of the last norm, and of
    the norms of queries and keys. Other norms are parts of linear layers there.
    """

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: object) -> None:
        """Ignore TransformerEngine's state for fp8."""


def squared_relu(values: torch.Tensor) -> torch.Tensor:
    """Return relu(x)²."""
    return functional.relu(values).square()


def quick_gelu(values: torch.Tensor) -> torch.Tensor:
    """Return x · sigmoid(1.702 x), an approximation of gelu."""
    return values * torch.sigmoid(1.702 * values)


def activation_inside_layer(values: torch.Tensor) -> torch.Tensor:
    """Placeholder in the config for an activation that each layer has as a module."""
    raise AssertionError("the layer has its own")


ACTIVATION_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
    "xielu": activation_inside_layer,
}
"""Activation functions of the feed-forward layers. Functions that megatron-core compiles on first use are written anew:
on a CPU that takes longer than a run."""


class Xielu(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """Activation xIELU (arXiv 2411.13010) as in Apertus: a parabola on the right, an exponential on the left.

    p x² + x/2 for x > 0, n (exp(min(x, -1e-6)) - 1 - x) + x/2 else; p = softplus(alpha_p), n = 1/2 + softplus(alpha_n).
    The two weights are scalars of the layer, equal on all tensor-parallel ranks.
    """

    _BETA = 0.5
    _BELOW_ZERO = -1e-6

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)

        def weight(wanted: float) -> torch.nn.Parameter:
            """Return the weight whose softplus is `wanted`."""
            return torch.nn.Parameter(torch.tensor([wanted]).expm1().log().to(config.params_dtype))

        self.alpha_p, self.alpha_n = weight(0.8), weight(0.8 - self._BETA)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[..., width / tensor-parallel size] → the same shape."""
        # every rank has a part of the width, so the weights' gradients are summed over the ranks
        positive, negative = map(copy_to_tensor_model_parallel_region, (self.alpha_p, self.alpha_n))
        right = functional.softplus(positive) * values * values
        left = (values.clamp(max=self._BELOW_ZERO).expm1() - values) * (self._BETA + functional.softplus(negative))
        return torch.where(values > 0, right, left) + self._BETA * values


class XieluMLP(MLP):  # type: ignore[misc]
    """Feed-forward layer of megatron-core with its own `Xielu`."""

    def __init__(self, config: TransformerConfig, *positional: Any, **named: Any) -> None:
        super().__init__(config, *positional, **named)
        self.activation_func = Xielu(config)


MODEL_METHODS = ("set_input_tensor", "sharded_state_dict")
"""Methods that pipeline and checkpoint call on a model."""


def build_user_model(
    path: str, transformer: TransformerConfig, **known: Any
) -> ModuleSpec | TransformerBlockSubmodules | torch.nn.Module:
    """Call the function at `path` with the TransformerConfig and the values of `known` that it names; return its
    result.

    Raises ConfigError if the function cannot be imported, raises an error, or returns another type.
    """
    function = import_user_object(path)
    try:
        names = inspect.signature(function).parameters
        found = function(transformer, **{name: value for name, value in known.items() if name in names})
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} failed: {describe_error(error)}", where="model.spec") from error
    if not isinstance(found, (ModuleSpec, TransformerBlockSubmodules, torch.nn.Module)):
        raise ConfigError(
            f"{path} returned {type(found).__name__}, which is no ModuleSpec, TransformerBlockSubmodules or module",
            where="model.spec",
        )
    if isinstance(found, torch.nn.Module) and (lacks := [name for name in MODEL_METHODS if not hasattr(found, name)]):
        raise ConfigError(
            f"{path} returned {type(found).__name__}, which has no {' and no '.join(lacks)}",
            where="model.spec",
            hint="return a model of megatron-core, such as GPTModel, or a class that inherits one",
        )
    return found
