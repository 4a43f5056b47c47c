"""Rules between the layout of a run's ranks and its model: experts, latent attention, and FP8.

Each `check_...` function raises ValueError if the settings contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from relayrun.config.compose.trainers import CommonConfig, check_multiple
from relayrun.config.sections.checkpoint import CheckpointSection
from relayrun.config.sections.data import DataSection
from relayrun.config.sections.model import ModelSection
from relayrun.config.sections.optimizer import OptimizerSection
from relayrun.config.sections.parallel import ParallelSection
from relayrun.config.sections.training import TrainingSection


class LayoutConfig(CommonConfig):
    """The sections of a native run, and the sizes of its groups of ranks."""

    trainer: Literal["native"] = "native"
    model: ModelSection
    data: DataSection
    training: TrainingSection
    optimizer: OptimizerSection
    checkpoint: CheckpointSection
    parallel: ParallelSection = ParallelSection()

    @property
    def virtual_stages(self) -> int:
        """Parts of the model on a pipeline stage."""
        layers = self.parallel.num_layers_per_virtual_pipeline_stage
        return self.model.num_layers // self.parallel.pipeline_model_parallel_size // layers if layers else 1

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share a replica of the model and a sequence: tensor x pipeline x context parallel."""
        own = self.parallel
        return own.tensor_model_parallel_size * own.pipeline_model_parallel_size * own.context_parallel_size


def expert_layer_pattern(pattern: int | Sequence[int], layers: int, experts: int | None) -> list[bool]:
    """Return for each layer, True if it has experts: every `pattern`-th from the first on, or each with a 1."""
    if experts is None:
        return [False] * layers
    if isinstance(pattern, int):
        return [number % pattern == 0 for number in range(layers)]
    return [bool(each) for each in pattern]


def expert_layers(model: ModelSection) -> list[bool]:
    """Return for each layer of a model, True if it has experts."""
    settings = model.transformer
    return expert_layer_pattern(settings.moe_layer_freq, model.num_layers, settings.num_moe_experts)


def check_expert_layout(config: LayoutConfig) -> None:
    """Raise ValueError if experts or latent attention do not fit the layout or another setting."""
    experts = config.model.transformer.num_moe_experts
    if experts is None:
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (size := getattr(config.parallel, name)) not in (1, None):
                raise ValueError(
                    f"parallel.{name} {size} splits experts over ranks, and the model has none; "
                    "set model.transformer.num_moe_experts, or leave it out"
                )
    else:
        _check_router(config.model, experts)
        _check_expert_parallelism(config, experts)
        _check_expert_settings(config)
    if config.model.transformer.multi_latent_attention:
        _check_latent_attention(config)


def _check_router(model: ModelSection, experts: int) -> None:
    settings = model.transformer
    chosen, groups = settings.moe_router_topk, settings.moe_router_num_groups
    if chosen > experts:
        raise ValueError(
            f"model.transformer.moe_router_topk {chosen} is above num_moe_experts {experts}: "
            "a token goes to different experts"
        )
    kinds = settings.moe_router_load_balancing_type
    sinkhorn = kinds == "sinkhorn"
    if (
        chosen == 1
        and settings.moe_router_score_function == "softmax"
        and not (settings.moe_router_pre_softmax or sinkhorn)
    ):
        raise ValueError(
            "model.transformer.moe_router_topk 1 weighs its one expert by 1, from which the router learns nothing; "
            "set model.transformer.moe_router_pre_softmax=true"
        )
    if settings.moe_router_enable_expert_bias and settings.moe_router_score_function != "sigmoid":
        raise ValueError(
            "model.transformer.moe_router_enable_expert_bias needs model.transformer.moe_router_score_function=sigmoid"
        )
    factors = settings.moe_aux_loss_coeff
    if isinstance(kinds, list) != isinstance(factors, list) or (
        isinstance(kinds, list) and isinstance(factors, list) and len(kinds) != len(factors)
    ):
        raise ValueError(
            "model.transformer.moe_aux_loss_coeff has one factor for each moe_router_load_balancing_type: "
            "lists of the same length, or one of each"
        )
    if isinstance(kinds, list) and (alone := [kind for kind in kinds if kind in ("sinkhorn", "none")]):
        raise ValueError(f"model.transformer.moe_router_load_balancing_type: {alone[0]} is no loss; write it alone")
    if sinkhorn and factors:
        raise ValueError("model.transformer.moe_aux_loss_coeff: sinkhorn has no loss; set 0")
    if settings.moe_router_group_topk is not None:
        if groups is None or experts % groups or settings.moe_router_group_topk > groups:
            raise ValueError(
                f"model.transformer.moe_router_group_topk {settings.moe_router_group_topk} is chosen from "
                f"moe_router_num_groups {groups}: groups of equal size, at least so many, among {experts} experts"
            )
        name, why = "model.transformer.moe_router_topk", ": each chosen group gives as many experts"
        check_multiple(name, chosen, "moe_router_group_topk", settings.moe_router_group_topk, why)


def _check_expert_parallelism(config: LayoutConfig, experts: int) -> None:
    parallel, settings = config.parallel, config.model.transformer
    size, own = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    tensor = parallel.tensor_model_parallel_size
    check_multiple("model.transformer.num_moe_experts", experts, "parallel.expert_model_parallel_size", size)
    _check_expert_ranks(config)
    if tensor > 1 and not parallel.sequence_parallel:
        raise ValueError(
            "experts with parallel.tensor_model_parallel_size above 1 need parallel.sequence_parallel=true: each "
            "tensor-parallel rank sends its own tokens to them"
        )
    dispatcher, on_gpus = settings.moe_token_dispatcher_type, config.job.gpus_per_node > 0
    if dispatcher == "alltoall" and min(own, size) > 1 and not on_gpus:
        raise ValueError(
            "model.transformer.moe_token_dispatcher_type alltoall gathers a different number of tokens from each "
            "rank that has a part of an expert, which gloo, without GPUs (job.gpus_per_node 0), cannot; set allgather, "
            "or parallel.expert_tensor_parallel_size=1"
        )
    _check_expert_widths(config)
    if parallel.separates_experts and (bare := _stages_without_experts(config)):
        setting = "expert_model_parallel_size above 1" if size > 1 else f"expert_tensor_parallel_size {own}"
        raise ValueError(
            f"pipeline stage {bare[0]} has no layer with experts (model.transformer.moe_layer_freq); with "
            f"parallel.{setting} every stage needs one: change one of the two, or parallel.pipeline_model_parallel_size"
        )


def _check_expert_widths(config: LayoutConfig) -> None:
    parallel, settings = config.parallel, config.model.transformer
    tensor = ("tensor_model_parallel_size", parallel.tensor_model_parallel_size)
    own = tensor
    if parallel.expert_tensor_parallel_size is not None:
        own = ("expert_tensor_parallel_size", parallel.expert_tensor_parallel_size)
    width, shared = settings.moe_ffn_hidden_size, settings.moe_shared_expert_intermediate_size
    for name, channels, (setting, parts) in (
        ("model.transformer.moe_ffn_hidden_size", width or 0, own),
        ("model.ffn_hidden_size", config.model.ffn_hidden_size if width is None else 0, own),
        ("model.transformer.moe_shared_expert_intermediate_size", shared or 0, tensor),
    ):
        check_multiple(name, channels, f"parallel.{setting}", parts)


def _check_expert_ranks(config: LayoutConfig) -> None:
    """Check that the ranks of a pipeline stage can be divided among the parts of its experts."""
    parallel = config.parallel
    size, own = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    tensor = parallel.tensor_model_parallel_size
    replicas = config.data_parallel_size * parallel.context_parallel_size
    if own == tensor and replicas % size:
        raise ValueError(
            f"experts are split over ranks that are data- or context-parallel: {replicas} of them (data "
            f"{config.data_parallel_size} x context {parallel.context_parallel_size}) are no multiple of "
            f"parallel.expert_model_parallel_size {size}"
        )
    if tensor * replicas % (own * size):
        raise ValueError(
            f"experts are split over the ranks of a pipeline stage: {tensor * replicas} of them (tensor {tensor} x "
            f"data {config.data_parallel_size} x context {parallel.context_parallel_size}) are no multiple of "
            f"parallel.expert_tensor_parallel_size {own} x expert_model_parallel_size {size}"
        )


def _stages_without_experts(config: LayoutConfig) -> list[int]:
    stages, layers = config.parallel.pipeline_model_parallel_size, expert_layers(config.model)
    each = len(layers) // (stages * config.virtual_stages)  # layers of a part; a stage has every `stages`-th part
    having = {number // each % stages for number, experts in enumerate(layers) if experts}
    return [stage for stage in range(stages) if stage not in having]


def _check_expert_settings(config: LayoutConfig) -> None:
    """Check experts against other sections, and settings of experts among themselves."""
    settings, training = config.model.transformer, config.training
    split = max(config.parallel.tensor_model_parallel_size, config.parallel.expert_tensor_size) > 1
    if settings.add_bias_linear and (split or settings.moe_shared_expert_intermediate_size is not None):
        raise ValueError(
            "model.transformer.add_bias_linear: biases of experts are not split over tensor-parallel ranks, and shared "
            "experts have none; set it to false"
        )
    if settings.moe_shared_expert_overlap and settings.moe_token_dispatcher_type != "alltoall":
        raise ValueError(
            "model.transformer.moe_shared_expert_overlap needs model.transformer.moe_token_dispatcher_type=alltoall"
        )
    if settings.moe_pad_expert_input_to_capacity and settings.moe_expert_capacity_factor is None:
        raise ValueError(
            "model.transformer.moe_pad_expert_input_to_capacity pads to a capacity; set moe_expert_capacity_factor"
        )
    if settings.moe_apply_probs_on_input and settings.moe_router_topk != 1:
        raise ValueError("model.transformer.moe_apply_probs_on_input needs model.transformer.moe_router_topk=1")
    if "mlp" in (training.recompute_modules or []) and all(expert_layers(config.model)):
        raise ValueError(
            "training.recompute_modules: mlp is of layers without experts, and all layers have experts; write moe"
        )


def _check_latent_attention(config: LayoutConfig) -> None:
    model, parallel = config.model, config.parallel
    if model.num_query_groups != model.num_attention_heads:
        raise ValueError(
            f"model.num_query_groups {model.num_query_groups}: with multi_latent_attention every head has keys and "
            f"values of its own; set it to num_attention_heads, {model.num_attention_heads}"
        )
    if model.rope_scaling_factor is not None:
        raise ValueError(
            "model.rope_scaling_factor is Llama's; multi_latent_attention stretches positions by "
            "model.transformer.rope_type=yarn and rotary_scaling_factor"
        )
    if model.rotary_percent != 1 and model.transformer.rope_type == "yarn":
        raise ValueError(
            f"model.rotary_percent {model.rotary_percent:g}: megatron-core's YaRN turns all channels; set "
            "model.transformer.rope_type=rope, or model.rotary_percent=1"
        )
    if model.transformer.qk_layernorm and parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        # megatron-core sums the gradients of a norm called q_layernorm over tensor-parallel ranks, which all have it
        raise ValueError(
            "model.transformer.qk_layernorm with multi_latent_attention and parallel.tensor_model_parallel_size above "
            "1 needs parallel.sequence_parallel=true: else megatron-core counts the norm's gradients once a rank"
        )


def check_fp8_layout(config: LayoutConfig) -> None:
    """Raise ValueError if FP8 does not support the sizes of a model, or if `fp8` contradicts a setting."""
    settings = config.model.transformer
    if settings.fp8 is None:
        return
    if config.training.resolved_precision != "bf16":
        raise ValueError("model.transformer.fp8 keeps all but products in bf16; set training.precision=bf16")
    if settings.first_last_layers_bf16:
        stage = config.model.num_layers // config.parallel.pipeline_model_parallel_size
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if (layers := getattr(settings, name)) > stage:
                raise ValueError(
                    f"model.transformer.{name} {layers} is above the {stage} layers of a pipeline stage, of which "
                    "megatron-core leaves so many in bf16 at most"
                )
    _check_fp8_sizes(config)


def _check_fp8_sizes(config: LayoutConfig) -> None:
    """Refuse sizes without FP8 kernels: axes must be multiples of 16; with mxfp8, of the 32 numbers of a scale.
    TransformerEngine needs a multiple of 8 along the axis of tokens. Inputs of experts are padded."""
    recipe = config.model.transformer.fp8_recipe
    multiple = 32 if recipe == "mxfp8" else 16
    tokens = config.training.seq_length * config.training.micro_batch_size // config.parallel.context_parallel_size
    of_tokens = 32 if recipe == "mxfp8" else 8
    if tokens % of_tokens:
        raise ValueError(
            f"model.transformer.fp8: a micro-batch has {tokens} tokens on a rank (training.micro_batch_size x "
            f"training.seq_length), no multiple of {of_tokens}, as products in 8 bits ({recipe}) need"
        )
    for what, size in _fp8_axes(config):
        if size % multiple:
            raise ValueError(
                f"model.transformer.fp8: {what} comes to {size} on a rank, no multiple of {multiple}, as products in 8 "
                f"bits ({recipe}) need; change it, or leave out fp8"
            )


def _fp8_axes(config: LayoutConfig) -> Iterator[tuple[str, int]]:
    """Yield the axes of matrices on a rank with their settings, without the axes of tokens."""
    model, parallel = config.model, config.parallel
    settings, tensor = model.transformer, parallel.tensor_model_parallel_size
    yield "model.hidden_size", model.hidden_size
    heads, shared = model.num_attention_heads // tensor, settings.qk_pos_emb_head_dim
    if settings.multi_latent_attention:
        narrow, key, value = settings.kv_lora_rank, settings.qk_head_dim, settings.v_head_dim
        yield "model.transformer.kv_lora_rank", narrow
        yield "model.transformer.kv_lora_rank + qk_pos_emb_head_dim", narrow + shared
        yield "model.transformer.q_lora_rank", settings.q_lora_rank or 0
        yield "qk_head_dim + qk_pos_emb_head_dim of all heads", heads * (key + shared)
        yield "qk_head_dim + v_head_dim of all heads", heads * (key + value)
        yield "v_head_dim of all heads", heads * value
    else:
        queries = heads * model.head_channels
        into = queries * (2 if settings.attention_output_gate else 1)
        into += 2 * model.num_query_groups // tensor * model.head_channels
        yield "model.num_attention_heads x channels of a head", queries
        yield "channels of all queries, keys and values", into
    having = expert_layers(model)
    if not all(having):
        yield "model.ffn_hidden_size", model.ffn_hidden_size // tensor
    if any(having):
        name = "ffn_hidden_size" if settings.moe_ffn_hidden_size is None else "transformer.moe_ffn_hidden_size"
        width = settings.moe_ffn_hidden_size or model.ffn_hidden_size
        yield f"model.{name}", width // parallel.expert_tensor_size
        yield (
            "model.transformer.moe_shared_expert_intermediate_size",
            (settings.moe_shared_expert_intermediate_size or 0) // tensor,
        )
