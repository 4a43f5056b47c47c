"""What training in 8 bits asks of the sizes of a model, of its layout and of other settings of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from relayrun.config.compose.expert_layout import expert_layers
from relayrun.config.sections.model import ModelSection
from relayrun.config.sections.parallel import ParallelSection
from relayrun.config.sections.training import TrainingSection


class Fp8LayoutConfig(Protocol):
    """The parts of a run's config that are looked at; `schema`, which has all of it, imports this module."""

    model: ModelSection
    parallel: ParallelSection
    training: TrainingSection


def check_fp8_layout(config: Fp8LayoutConfig) -> None:
    """Raise ValueError if the products of a model cannot be computed in 8 bits, or `fp8` contradicts a setting."""
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


def _check_fp8_sizes(config: Fp8LayoutConfig) -> None:
    """Refuse matrices that the kernels have no way for: axes are multiples of 16, of a scale's 32 numbers with mxfp8.

    TransformerEngine asks for 8 along the axis of tokens. Those of experts are filled up.
    """
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


def _fp8_axes(config: Fp8LayoutConfig) -> Iterator[tuple[str, int]]:
    """Yield the axes of matrices on a rank, each with the setting that it comes from; not those of tokens."""
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
