"""`model.transformer`: the settings of megatron-core's TransformerConfig that relayrun has no other setting for.

A field of this class has Megatron's name, type and default, but for the four in `OF_A_LLAMA`, whose defaults are what a
Llama has. The fields that are missing here are in `transformer_refused.py`, each with its reason; a test holds that
every field of the installed megatron-core is in one of the two places, or is a setting of a run elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from relayrun.config.sections.base import NonEmptyList, NonNegative, NonNegativeFloat, Positive, Section
from relayrun.config.sections.experts import ExpertFields
from relayrun.config.sections.fp8 import Fp8Fields
from relayrun.config.sections.latent_attention import LatentAttentionFields

LLAMA_DEFAULTS = frozenset({"normalization", "gated_linear_unit", "activation_func", "add_bias_linear"})
"""Fields whose defaults are those of a Llama, where Megatron's are those of a GPT-2."""
NEEDS_TRANSFORMER_ENGINE = frozenset({"fp8", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"})
"""Fields that only layers of TransformerEngine have."""
NOT_SAVED_WITH_WEIGHTS = frozenset(
    {
        "embedding_init_method_std",
        "clone_scatter_output_in_embedding",
        "disable_bf16_reduced_precision_matmul",
        "moe_shared_expert_overlap",
        "moe_router_load_balancing_type",
        "moe_router_bias_update_rate",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_input_jitter_eps",
        "moe_token_dispatcher_type",
        "moe_permute_fusion",
        "moe_router_fusion",
        *Fp8Fields.model_fields,
    }
)
"""Fields that may differ between a run and the checkpoint that it begins with: neither the shapes of weights nor what a
model with these weights computes depend on them, but how it is trained, or how exactly."""


class TransformerSection(ExpertFields, LatentAttentionFields, Fp8Fields, Section):
    """Any other setting of megatron-core's TransformerConfig, by its name there. What is not named is as in a Llama."""

    kv_channels: Positive | None = None
    """Channels of a head; None: hidden_size / num_attention_heads."""
    qk_layernorm: bool = False
    """Normalise queries and keys, each head by itself, with weights that heads share (Qwen 3)."""
    qk_l2_norm: bool = False
    """Normalise queries and keys without weights (Llama 4)."""
    add_qkv_bias: bool = False
    """Biases behind the projections to queries, keys and values (Qwen 2)."""
    add_bias_linear: bool = False
    """Biases behind all projections of attention and feed-forward layers."""
    attention_output_gate: bool = False
    """Weigh attention's output by a gate that is computed beside the queries (Qwen 3 Next)."""
    softmax_scale: Annotated[float, Field(gt=0)] | None = None
    """Factor of attention's scores; None: 1 / root of a head's channels."""
    window_size: Annotated[list[NonNegative], Field(min_length=2, max_length=2)] | None = None
    """Sliding window: [N, 0] lets a token see the N tokens before it, and itself; None: all before it. Mistral's and
    Qwen's sliding_window W counts the token itself: [W - 1, 0]."""
    window_attn_skip_freq: Positive | NonEmptyList[Literal[0, 1]] | None = None
    """N: every N-th layer sees all tokens, the others those in window_size. A list of 0 and 1, one for each layer:
    1 has the window. None: all have."""
    no_rope_freq: Positive | NonEmptyList[Literal[0, 1]] | None = None
    """N: every N-th layer goes without rotary positions. A list of 0 and 1, one for each layer: 1 goes without."""
    rotary_interleaved: bool = False
    """Rotate neighbouring channels with each other (RoFormer), not the halves of a head (Llama)."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """The norms of layers; LayerNorm has biases, and the mean is taken off."""
    layernorm_zero_centered_gamma: bool = False
    """Keep a norm's weights as their distance from 1, so that weight decay and fresh weights are 0."""
    activation_func: Literal["silu", "gelu", "relu", "squared_relu", "quick_gelu", "xielu"] = "silu"
    """What feed-forward layers bend their values with. xielu (arXiv 2411.13010, Apertus) is a layer of relayrun's own,
    with two weights, for gated_linear_unit false."""
    gated_linear_unit: bool = True
    """Three matrices in a feed-forward layer, of which one weighs another's output (SwiGLU with silu); false: two."""
    glu_linear_offset: float = 0.0
    """Added to the output that is weighed, with gated_linear_unit."""
    activation_func_clamp_value: Annotated[float, Field(gt=0)] | None = None
    """Bound of what goes into the gate and what it weighs, with gated_linear_unit; None: none."""
    embedding_init_method_std: NonNegativeFloat | None = None
    """Standard deviation of the embedding's fresh weights; None: model.init_method_std."""
    clone_scatter_output_in_embedding: bool = True
    """With sequence parallelism, copy this rank's part of the embedding's output, so that the whole can be freed."""
    disable_bf16_reduced_precision_matmul: bool = False
    """On GPUs: let no product of bf16 matrices be summed in bf16."""

    def window_of(self, layer: int) -> int | None:
        """Tokens before itself that a token sees in a layer, counted from 0; None: all of them."""
        if self.window_size is None:
            return None
        pattern = self.window_attn_skip_freq
        windowed = bool(pattern[layer]) if isinstance(pattern, list) else pattern is None or (layer + 1) % pattern != 0
        return self.window_size[0] if windowed else None

    @property
    def of_the_weights(self) -> dict[str, Any]:
        """What the shapes of weights or what is computed with them depends on, where it is not at its default."""
        return {name: value for name, value in self.model_dump().items() if name not in NOT_SAVED_WITH_WEIGHTS}

    @model_serializer(mode="wrap")
    def _not_at_default(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A revision holds what somebody set: most of megatron-core is of no concern to most runs."""
        fields = type(self).model_fields
        return {name: value for name, value in handler(self).items() if value != fields[name].default}

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.window_size is not None and self.window_size[1] != 0:
            raise ValueError(
                f"window_size {self.window_size}: the second number is how many tokens behind itself a token sees, "
                "which a language model must not: write 0"
            )
        if self.window_size is None and self.window_attn_skip_freq is not None:
            raise ValueError("window_attn_skip_freq says which layers have the window, and window_size is not set")
        if self.qk_layernorm and self.qk_l2_norm:
            raise ValueError("qk_layernorm and qk_l2_norm are two norms in one place; set one of them")
        if not self.gated_linear_unit:
            for name in ("glu_linear_offset", "activation_func_clamp_value"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is of gated feed-forward layers; set gated_linear_unit: true")
        if self.activation_func == "xielu":
            self._check_xielu()
        if self.multi_latent_attention:
            self._check_latent_attention()
        elif given := sorted(set(self.model_dump()) & set(LatentAttentionFields.model_fields)):
            raise ValueError(f"{', '.join(given)}: only with multi_latent_attention: true")
        if self.num_moe_experts is None and (
            given := [name for name in self.model_dump() if name in ExpertFields.model_fields]
        ):
            raise ValueError(f"{', '.join(given)}: only with num_moe_experts")
        if self.fp8 is not None:
            self.check_recipe()
        elif given := [name for name in self.model_dump() if name in Fp8Fields.model_fields]:
            raise ValueError(f"{', '.join(given)}: only with fp8")
        return self

    def _check_xielu(self) -> None:
        if self.gated_linear_unit:
            raise ValueError("activation_func xielu is of layers with two matrices; set gated_linear_unit: false")
        if self.num_moe_experts is not None:
            raise ValueError("activation_func xielu has weights of its own, which experts have no place for")

    def _check_latent_attention(self) -> None:
        for name in ("rotary_interleaved", "no_rope_freq"):
            if getattr(self, name):
                raise ValueError(f"{name} does not go with multi_latent_attention, which turns part of each head")
        for name in ("kv_channels", "qk_l2_norm", "attention_output_gate", "add_qkv_bias", "softmax_scale"):
            if getattr(self, name):
                raise ValueError(f"{name} does not go with multi_latent_attention, which has heads of its own")

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError if a pattern of layers does not fit so many layers."""
        for name in ("window_attn_skip_freq", "no_rope_freq", "moe_layer_freq"):
            pattern = getattr(self, name)
            if isinstance(pattern, list) and len(pattern) != num_layers:
                raise ValueError(f"transformer.{name} has {len(pattern)} numbers, and there are {num_layers} layers")
        if isinstance(self.no_rope_freq, int) and num_layers % self.no_rope_freq:
            raise ValueError(f"num_layers {num_layers} is no multiple of transformer.no_rope_freq {self.no_rope_freq}")
