"""Megatron's plain `torch` format: one file with the weights of the whole model, for tools that want it.

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0000100/mp_rank_00/model_optim_rng.pt    {model, args, iteration, checkpoint_version}

As tensor- and pipeline-parallel size 1 have it, under the names of Megatron's `--transformer-impl`. The format
holds the model in one file, and so does memory while it is made.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch

from relayrun.export import llama
from relayrun.export.checkpoint_source import CheckpointSource
from relayrun.export.huggingface import DTYPES
from relayrun.export.reader import CheckpointReader
from relayrun.training.model.size import padded

_LOCAL = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Names of the norms that Transformer Engine fuses into the layer behind them."""


def write(source: CheckpointSource, folder: Path, *, dtype: str, transformer_impl: str) -> int:
    """Write into `folder`; return the number of parameters, padding included. Raises as `huggingface.write`."""
    model = source.config.model
    reader = CheckpointReader(source.folder, source.checksum)
    vocabulary = padded(source.manifest.vocabulary_size, model.make_vocab_size_divisible_by)
    llama.check(reader.shapes, model, vocabulary, source.folder)
    of = reader.dtype if dtype == "auto" else DTYPES[dtype]
    rename: Callable[[str], str] = (lambda name: _LOCAL.get(name, name)) if transformer_impl == "local" else str
    weights: dict[str, torch.Tensor] = {}
    for key, shape in reader.shapes.items():
        if not key.startswith("decoder.layers."):
            weights[key] = reader.read(key, start=[0] * len(shape), shape=shape, dtype=of)
            continue
        for layer in range(model.num_layers):
            name = f"decoder.layers.{layer}.{rename(key.removeprefix('decoder.layers.'))}"
            start = [layer] + [0] * (len(shape) - 1)
            weights[name] = reader.read(key, start=start, shape=(1, *shape[1:]), dtype=of)[0]
    target = folder / f"iter_{source.iteration:07}" / "mp_rank_00"
    target.mkdir(parents=True)
    state = {
        "model": weights,
        "args": _arguments(source, vocabulary, of, transformer_impl),
        "iteration": source.iteration,
        "checkpoint_version": 3.0,
    }
    torch.save(state, target / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{source.iteration}\n")
    return sum(tensor.numel() for tensor in weights.values())


def _arguments(source: CheckpointSource, vocabulary: int, dtype: torch.dtype, transformer_impl: str) -> Namespace:
    """What Megatron's tools read of a model, under the names of its arguments."""
    model, training = source.config.model, source.config.training
    return Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        group_query_attention=model.num_query_groups != model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.hidden_size // model.num_attention_heads,
        seq_length=training.seq_length,
        max_position_embeddings=training.seq_length,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        rotary_percent=1.0,
        use_rope_scaling=model.rope_scaling_factor is not None,
        rope_scaling_factor=model.rope_scaling_factor or 8.0,
        normalization="RMSNorm",
        norm_epsilon=model.norm_epsilon,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=False,
        untie_embeddings_and_output_weights=model.untie_embeddings_and_output_weights,
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        padded_vocab_size=vocabulary,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        transformer_impl=transformer_impl,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        iteration=source.iteration,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )
