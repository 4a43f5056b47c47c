"""The Llama in two notations: megatron-core's keys, as a torch_dist checkpoint has them, and Hugging Face's names.

| megatron-core | shape | Hugging Face |
|---|---|---|
| embedding.word_embeddings.weight | [padded vocabulary, H] | model.embed_tokens.weight, without the padding |
| decoder.layers.self_attention.linear_qkv.layer_norm_weight | [L, H] | input_layernorm.weight |
| decoder.layers.self_attention.linear_qkv.weight | [L, G (A/G + 2) D, H] | self_attn.{q,k,v}_proj.weight |
| decoder.layers.self_attention.linear_proj.weight | [L, H, A D] | self_attn.o_proj.weight |
| decoder.layers.mlp.linear_fc1.layer_norm_weight | [L, H] | post_attention_layernorm.weight |
| decoder.layers.mlp.linear_fc1.weight | [L, 2 F, H] | mlp.{gate,up}_proj.weight, one behind the other |
| decoder.layers.mlp.linear_fc2.weight | [L, H, F] | mlp.down_proj.weight |
| decoder.final_layernorm.weight | [H] | model.norm.weight |
| output_layer.weight, if not tied | [padded vocabulary, H] | lm_head.weight |

L layers, H hidden size, F feed-forward size, A attention heads, G query groups, D = H/A. linear_qkv holds for
each query group its A/G queries, then its key, then its value. Rotary positions turn the two halves of a head
against each other in both (rotary_interleaved is off), so nothing is permuted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from relayrun.config.schema import Model
from relayrun.errors import InputError

ROPE_CONTEXT = 8192
"""Original context of Llama 3.1's rotary scaling, as megatron-core and the schema have it."""

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"


@dataclass(frozen=True)
class Piece:
    """A tensor of megatron-core, or one layer's part of it, and what it is in Hugging Face's names."""

    key: str
    layer: int | None
    rows: int | None
    """How many of the tensor's first rows are taken; None: all."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the tensors that it is in a Hugging Face folder, by their names."""
    split: Callable[[torch.Tensor], list[torch.Tensor]]
    """Splits the tensor into those of `shapes`, in that order."""
    join: Callable[[list[torch.Tensor]], torch.Tensor]
    """Joins the tensors of `shapes` into this one: the inverse of `split`."""


def megatron_shapes(model: Model, padded_vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that a checkpoint of this model holds, by its key."""
    layers, hidden, ffn = model.num_layers, model.hidden_size, model.ffn_hidden_size
    head = hidden // model.num_attention_heads
    layer = "decoder.layers."
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (padded_vocabulary, hidden),
        layer + "self_attention.linear_qkv.layer_norm_weight": (layers, hidden),
        layer + "self_attention.linear_qkv.weight": (layers, hidden + 2 * model.num_query_groups * head, hidden),
        layer + "self_attention.linear_proj.weight": (layers, hidden, hidden),
        layer + "mlp.linear_fc1.layer_norm_weight": (layers, hidden),
        layer + "mlp.linear_fc1.weight": (layers, 2 * ffn, hidden),
        layer + "mlp.linear_fc2.weight": (layers, hidden, ffn),
        FINAL_NORM: (hidden,),
    }
    if model.untie_embeddings_and_output_weights:
        shapes[OUTPUT] = (padded_vocabulary, hidden)
    return shapes


def check(found: dict[str, tuple[int, ...]], model: Model, padded_vocabulary: int, where: object) -> None:
    """Raise InputError unless the model is a Llama, and these are its weights, no more and no less."""
    given = [f"transformer.{name}" for name in sorted(model.transformer.of_the_weights)]
    given += ["rotary_percent"] if model.rotary_percent != 1 else []
    if given:
        raise InputError(
            f"only Llamas are exported, and this model has model.{given[0]}",
            where=where,
            hint="read its checkpoint with megatron-core's dist_checkpointing",
        )
    wanted = megatron_shapes(model, padded_vocabulary)
    problems = [
        f"{key} has the shape {list(found[key])}, not {list(shape)}" if key in found else f"{key} is missing"
        for key, shape in wanted.items()
        if found.get(key) != shape
    ]
    problems += [f"{key} is no weight of a Llama" for key in found if key not in wanted]
    if problems:
        more = f", and {len(problems) - 1} more differences" if len(problems) > 1 else ""
        raise InputError(
            f"this checkpoint is not the model of its run's config: {problems[0]}{more}",
            where=where,
            hint="give the config that it was trained with",
        )


def pieces(model: Model, vocabulary: int) -> Iterator[Piece]:
    """Return the whole model in the order of Hugging Face's files."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    yield _whole(EMBEDDING, "model.embed_tokens.weight", (vocabulary, hidden), rows=vocabulary)
    for layer in range(model.num_layers):
        name, key = f"model.layers.{layer}.", "decoder.layers."
        yield _whole(
            key + "self_attention.linear_qkv.layer_norm_weight", name + "input_layernorm.weight", (hidden,), layer=layer
        )
        yield _qkv(model, layer)
        yield _whole(
            key + "self_attention.linear_proj.weight", name + "self_attn.o_proj.weight", (hidden, hidden), layer=layer
        )
        yield _whole(
            key + "mlp.linear_fc1.layer_norm_weight", name + "post_attention_layernorm.weight", (hidden,), layer=layer
        )
        gate_up = {f"{name}mlp.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
        yield Piece(key + "mlp.linear_fc1.weight", layer, None, gate_up, lambda fc1: list(fc1.chunk(2)), torch.cat)
        yield _whole(key + "mlp.linear_fc2.weight", name + "mlp.down_proj.weight", (hidden, ffn), layer=layer)
    yield _whole(FINAL_NORM, "model.norm.weight", (hidden,))
    if model.untie_embeddings_and_output_weights:
        yield _whole(OUTPUT, "lm_head.weight", (vocabulary, hidden), rows=vocabulary)


def _whole(key: str, name: str, shape: tuple[int, ...], *, layer: int | None = None, rows: int | None = None) -> Piece:
    return Piece(key, layer, rows, {name: shape}, lambda tensor: [tensor], lambda parts: parts[0])


def _qkv(model: Model, layer: int) -> Piece:
    hidden, groups = model.hidden_size, model.num_query_groups
    head = hidden // model.num_attention_heads
    queries = model.num_attention_heads // groups
    name = f"model.layers.{layer}.self_attn."

    def split(qkv: torch.Tensor) -> list[torch.Tensor]:
        by_group = qkv.view(groups, (queries + 2) * head, hidden)
        bounds = [0, queries * head, (queries + 1) * head, (queries + 2) * head]
        return [by_group[:, start:end].reshape(-1, hidden) for start, end in itertools.pairwise(bounds)]

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.view(groups, -1, hidden) for part in parts], dim=1).view(-1, hidden)

    shapes = {
        name + "q_proj.weight": (hidden, hidden),
        name + "k_proj.weight": (groups * head, hidden),
        name + "v_proj.weight": (groups * head, hidden),
    }
    return Piece("decoder.layers.self_attention.linear_qkv.weight", layer, None, shapes, split, join)


def to_config(
    model: Model,
    *,
    vocabulary: int,
    seq_length: int,
    dtype: str,
    bos: int | None,
    eos: int | None,
) -> dict[str, Any]:
    """Return config.json as values, in the names that every transformers since 4.43 reads."""
    scaling, context = None, seq_length
    if model.rope_scaling_factor is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": float(model.rope_scaling_factor),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ROPE_CONTEXT,
        }
        context = max(seq_length, int(ROPE_CONTEXT * model.rope_scaling_factor))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.hidden_size // model.num_attention_heads,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rope_theta": float(model.rotary_base),
        "rope_scaling": scaling,
        "rms_norm_eps": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": dtype,
        "use_cache": True,
    }
