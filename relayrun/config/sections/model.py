"""The section `model`, with `model.transformer`: fields of megatron-core's TransformerConfig.

`TransformerSection` inherits the fields of experts (MoE), of FP8 and of multi-latent attention (MLA).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from relayrun.config.sections.base import Fraction, ImportPath, NonEmptyList, Section
from relayrun.config.sections.dataclass_section import NonNegative, NonNegativeFloat, Positive

Balancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]


class ExpertFields(Section):
    """Mixture of experts: several feed-forward layers, of which a router picks some for each token."""

    num_moe_experts: Positive | None = None
    """Experts of a layer, over all ranks; None: one feed-forward layer, no router."""
    moe_layer_freq: Positive | NonEmptyList[Literal[0, 1]] = 1
    """N: the first layer and every N-th after it has experts, the others one feed-forward layer. A list of 0 and 1, one
    for each layer: 1 has experts."""
    moe_ffn_hidden_size: Positive | None = None
    """Width of an expert; None: model.ffn_hidden_size."""
    moe_shared_expert_intermediate_size: Positive | None = None
    """Total width of the shared experts, which process every token; None: no shared experts."""
    moe_shared_expert_gate: bool = False
    """Weigh the output of the shared experts by a gate with its own weights."""
    moe_shared_expert_overlap: bool = False
    """Compute the shared experts while tokens travel; with moe_token_dispatcher_type alltoall, on GPUs."""
    moe_router_load_balancing_type: Balancing | NonEmptyList[Balancing] = "aux_loss"
    """Balancing of experts by the router: a loss over micro-batch, sequence or global batch, by
    assignment (sinkhorn), or not at all. A list: several losses, with as many moe_aux_loss_coeff."""
    moe_router_topk: Positive = 2
    """Number of experts for each token."""
    moe_router_num_groups: Positive | None = None
    """Groups of experts, of which the router picks moe_router_group_topk first; None: one."""
    moe_router_group_topk: Positive | None = None
    """Number of groups from which a token's experts come."""
    moe_router_pre_softmax: bool = False
    """Compute probabilities of all experts before picking the best, not of the picked ones."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor of the picked experts' probabilities, with moe_router_pre_softmax; None: 1."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function from scores to probabilities."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Type in which the router computes and experts are weighed; None: the type of the weights."""
    moe_router_enable_expert_bias: bool = False
    """Balance by a bias of each expert that is moved after every step (arXiv 2408.15664); with sigmoid."""
    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    """Step of an expert's bias in an iteration."""
    moe_aux_loss_coeff: NonNegativeFloat | NonEmptyList[NonNegativeFloat] = 0.0
    """Factor of the balancing loss in the training loss; 0.01 is usual. A list: one for each loss."""
    moe_z_loss_coeff: NonNegativeFloat | None = None
    """Factor of the loss that keeps the router's scores small; 0.001 is usual, None: no such loss."""
    moe_input_jitter_eps: NonNegativeFloat | None = None
    """Noise on the router's input: factors between 1 - eps and 1 + eps; None: none."""
    moe_expert_capacity_factor: NonNegativeFloat | None = None
    """Maximum tokens of an expert, as a multiple of an equal share; None: unlimited."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad every expert's input to its capacity, so that all shapes stay the same."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Tokens that an expert drops beyond its capacity: the least probable, or the last ones."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"
    """Transport of tokens to their experts: every rank receives all and takes its own, or each token is sent to its
    expert. Megatron's flex needs DeepEP, which relayrun does not support."""
    moe_grouped_gemm: bool = False
    """Compute a rank's experts in one product of many matrices; needs TransformerEngine."""
    moe_permute_fusion: bool = False
    """Sort tokens by their experts in one kernel; needs TransformerEngine."""
    moe_router_fusion: bool = False
    """Compute the router's choice in one kernel; needs TransformerEngine."""
    moe_apply_probs_on_input: bool = False
    """Weigh the input of an expert instead of its output; with moe_router_topk 1."""

    @property
    def router_losses(self) -> dict[str, float]:
        """Factor of each loss of the routers that is on: a moe_router_load_balancing_type, or z_loss."""
        kinds, factors = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        pairs = zip(kinds, factors, strict=True) if isinstance(factors, list) else [(kinds, factors)]
        found = {str(kind): factor for kind, factor in pairs if kind != "none"} | {"z_loss": self.moe_z_loss_coeff}
        return {kind: factor for kind, factor in found.items() if factor and self.num_moe_experts}


FP8_RECIPES_OF_FIELD: dict[str, tuple[str, ...]] = {
    "fp8_margin": ("delayed",),
    "fp8_amax_history_len": ("delayed",),
    "fp8_amax_compute_algo": ("delayed",),
    "fp8_wgrad": ("delayed",),
    "fp8_multi_head_attention": ("delayed",),
    "tp_only_amax_red": ("delayed",),
    "fp8_dot_product_attention": ("delayed", "tensorwise"),
    "first_last_layers_bf16": ("tensorwise", "mxfp8", "blockwise"),
}
"""Recipes that read a field, if not all do: megatron-core ignores the field with another recipe."""


class Fp8Fields(Section):
    """Matrix products in 8 bits, with training.transformer_impl transformer_engine alone."""

    fp8: Literal["e4m3", "hybrid"] | None = None
    """Format of the numbers: e4m3 everywhere, or e5m2 for gradients (hybrid). None: products in training.precision."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] = "delayed"
    """Numbers that share a scale, and the time of its computation. delayed: a tensor, from the steps before.
    tensorwise: a tensor, from its own numbers. blockwise: a block of a tensor. mxfp8: 32 numbers, on Blackwell GPUs."""
    fp8_margin: NonNegative = 0
    """Powers of two left free above the largest number."""
    fp8_amax_history_len: Positive = 1
    """Number of past steps for a delayed scale."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """Selection of the scale from the largest numbers of these steps."""
    fp8_wgrad: bool = True
    """Compute the weights' gradients in 8 bits too; false needs fp8_recipe delayed."""
    fp8_dot_product_attention: bool = False
    """Attend in 8 bits too, with fp8_recipe delayed or tensorwise."""
    fp8_multi_head_attention: bool = False
    """Keep 8 bits between attention and the products around it, with fp8_dot_product_attention."""
    tp_only_amax_red: bool = False
    """Agree on delayed scales over tensor- and context-parallel ranks alone, not over replicas."""
    first_last_layers_bf16: bool = False
    """Leave the first and the last layers in bf16; with any recipe but delayed."""
    num_layers_at_start_in_bf16: NonNegative = 1
    """Number of first layers in bf16, with first_last_layers_bf16; at most the layers of a pipeline stage."""
    num_layers_at_end_in_bf16: NonNegative = 1
    """Number of last layers in bf16, with first_last_layers_bf16; at most the layers of a pipeline stage."""

    def check_recipe(self) -> None:
        """Raise ValueError for a field that the recipe does not read, or that needs another one."""
        changed = {name for name, field in Fp8Fields.model_fields.items() if getattr(self, name) != field.default}
        for name, recipes in FP8_RECIPES_OF_FIELD.items():
            if name in changed and self.fp8_recipe not in recipes:
                raise ValueError(
                    f"{name} does not go with fp8_recipe {self.fp8_recipe}; set fp8_recipe to {' or '.join(recipes)}, "
                    f"or leave {name} out"
                )
        if self.fp8_multi_head_attention and not self.fp8_dot_product_attention:
            raise ValueError("fp8_multi_head_attention needs fp8_dot_product_attention: true")
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if name in changed and not self.first_last_layers_bf16:
                raise ValueError(f"{name} needs first_last_layers_bf16: true")


class LatentAttentionFields(Section):
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from one narrow vector a token."""

    multi_latent_attention: bool = False
    """Use multi-latent attention; it reads the settings of `model.transformer` from q_lora_rank to mscale_all_dim."""
    q_lora_rank: Positive | None = 512
    """Width of the vector that queries come from; None: the residual stream."""
    kv_lora_rank: Positive = 512
    """Width of the vector that keys and values come from."""
    qk_head_dim: Positive = 128
    """Channels of a query's and a key's head without positions."""
    qk_pos_emb_head_dim: Positive = 64
    """Channels of a query's and a key's head with rotary positions."""
    v_head_dim: Positive = 128
    """Channels of a value's head."""
    rope_type: Literal["rope", "yarn"] = "yarn"
    """Rotary positions, unchanged or stretched to a longer context (YaRN, arXiv 2309.00071)."""
    rotary_scaling_factor: float = 40
    """YaRN: factor by which the original context is stretched."""
    original_max_position_embeddings: Positive = 4096
    """YaRN: the original context, in tokens."""
    beta_fast: float = 32
    """YaRN: frequencies with more rotations than this in the original context stay unchanged."""
    beta_slow: float = 1
    """YaRN: frequencies with fewer rotations than this are stretched fully."""
    mscale: float = 1.0
    """YaRN: factor in the scale of attention."""
    mscale_all_dim: float = 0.0
    """YaRN: factor in the scale of attention, for all channels."""


LLAMA_DEFAULTS = frozenset({"normalization", "gated_linear_unit", "activation_func", "add_bias_linear"})
"""Fields with a Llama's defaults in place of Megatron's, which are those of a GPT-2."""
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
"""Fields that may differ between a run and its first checkpoint: they change training or precision, not the shapes of
weights or the function that the model computes."""


class TransformerSection(ExpertFields, LatentAttentionFields, Fp8Fields, Section):
    """Any other setting of megatron-core's TransformerConfig, by its name there. The defaults are a Llama's."""

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
    """Sliding window: [N, 0] lets a token attend to the N tokens before it, and itself; None: all before it. Mistral's
    and Qwen's sliding_window W counts the token itself: [W - 1, 0]."""
    window_attn_skip_freq: Positive | NonEmptyList[Literal[0, 1]] | None = None
    """N: every N-th layer attends to all tokens, the others to those in window_size. A list of 0 and 1, one for each
    layer: 1 has the window. None: all have."""
    no_rope_freq: Positive | NonEmptyList[Literal[0, 1]] | None = None
    """N: every N-th layer has no rotary positions. A list of 0 and 1, one for each layer: 1 has none."""
    rotary_interleaved: bool = False
    """Rotate neighbouring channels with each other (RoFormer), not the halves of a head (Llama)."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Norms of the layers; LayerNorm has biases and subtracts the mean."""
    layernorm_zero_centered_gamma: bool = False
    """Store a norm's weights as their distance from 1, so that weight decay pulls to 1 and initial weights are 0."""
    activation_func: Literal["silu", "gelu", "relu", "squared_relu", "quick_gelu", "xielu"] = "silu"
    """Activation function of the feed-forward layers. xielu (arXiv 2411.13010, Apertus) is a layer of relayrun's own,
    with two weights, for gated_linear_unit false."""
    gated_linear_unit: bool = True
    """Three matrices in a feed-forward layer, of which one weighs another's output (SwiGLU with silu); false: two."""
    glu_linear_offset: float = 0.0
    """Added to the output that is weighed, with gated_linear_unit."""
    activation_func_clamp_value: Annotated[float, Field(gt=0)] | None = None
    """Bound of the gate's input and of the values that it weighs, with gated_linear_unit; None: none."""
    embedding_init_method_std: NonNegativeFloat | None = None
    """Standard deviation of the embedding's initial weights; None: model.init_method_std."""
    clone_scatter_output_in_embedding: bool = True
    """With sequence parallelism, copy this rank's part of the embedding's output, so that the whole can be freed."""
    disable_bf16_reduced_precision_matmul: bool = False
    """On GPUs: never sum products of bf16 matrices in bf16."""

    def window_of(self, layer: int) -> int | None:
        """Return how many earlier tokens a token attends to in a layer (counted from 0); None: all."""
        if self.window_size is None:
            return None
        pattern = self.window_attn_skip_freq
        windowed = bool(pattern[layer]) if isinstance(pattern, list) else pattern is None or (layer + 1) % pattern != 0
        return self.window_size[0] if windowed else None

    @property
    def of_the_weights(self) -> dict[str, Any]:
        """Return the fields off their defaults that affect the shapes of weights or the computation with them."""
        return {name: value for name, value in self.model_dump().items() if name not in NOT_SAVED_WITH_WEIGHTS}

    @model_serializer(mode="wrap")
    def _not_at_default(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keep only values off their defaults in a revision: most of megatron-core does not concern most runs."""
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
        """Raise ValueError if a pattern of layers does not fit the number of layers."""
        for name in ("window_attn_skip_freq", "no_rope_freq", "moe_layer_freq"):
            pattern = getattr(self, name)
            if isinstance(pattern, list) and len(pattern) != num_layers:
                raise ValueError(f"transformer.{name} has {len(pattern)} numbers, and there are {num_layers} layers")
        if isinstance(self.no_rope_freq, int) and num_layers % self.no_rope_freq:
            raise ValueError(f"num_layers {num_layers} is no multiple of transformer.no_rope_freq {self.no_rope_freq}")


class ModelSection(Section):
    """A Llama: RMSNorm, SwiGLU, rotary positions, grouped-query attention (arXiv 2407.21783); see `transformer`."""

    num_layers: Positive
    """Transformer layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    ffn_hidden_size: Positive
    """Width of the feed-forward layers (SwiGLU has three matrices of it)."""
    num_attention_heads: Positive
    """Query heads; a head has hidden_size / num_attention_heads channels, or transformer.kv_channels."""
    num_query_groups: Positive
    """Key-value heads; equal to num_attention_heads for plain multi-head attention."""
    rotary_base: Positive = 500_000
    """Base of the rotary frequencies."""
    rope_scaling_factor: Annotated[float, Field(ge=1)] | None = None
    """Llama 3.1's stretching of the low rotary frequencies, over an original context of 8,192; None: none."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The part of a head's channels that is rotated, the first ones; 1: all."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights."""
    hidden_dropout: Fraction = 0.0
    """Dropout probability after attention and feed-forward layers."""
    attention_dropout: Fraction = 0.0
    """Dropout probability of attention weights."""
    untie_embeddings_and_output_weights: bool = True
    """The output layer has its own weights instead of the embedding's."""
    make_vocab_size_divisible_by: Positive = 128
    """The vocabulary is padded to a multiple of this for every split of the model: a checkpoint fits every layout."""
    mapping: ImportPath | None = None
    """Import path of your own mapping, `package.module:name`: the class of transformers for the model, and the names of
    its weights there, for exports and evaluations (`relayrun help export`). None: the built-in one that fits."""
    transformer: TransformerSection = TransformerSection()
    spec: ImportPath | None = None
    """`module:function`, your own function from megatron-core's TransformerConfig to the layers (ModuleSpec), the block
    (TransformerBlockSubmodules) or the whole model (a module), see `relayrun help own-code`."""

    @property
    def head_channels(self) -> int:
        """Channels of a head."""
        return self.transformer.kv_channels or self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        own_heads = self.transformer.kv_channels or self.transformer.multi_latent_attention
        if self.hidden_size % self.num_attention_heads and not own_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}; "
                "or set transformer.kv_channels"
            )
        self.transformer.check_layers(self.num_layers)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_query_groups {self.num_query_groups}"
            )
        return self
