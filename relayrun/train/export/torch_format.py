"""Megatron's plain `torch` format: one file with the weights of the whole model, for tools that want it.

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0000100/mp_rank_00/model_optim_rng.pt    {model, args, iteration, checkpoint_version}

As tensor- and pipeline-parallel size 1 have it, under the names of Megatron's `--transformer-impl`. With the optimizer,
also {optimizer, opt_param_scheduler}. The format holds the model in one file, and so does memory while it is made.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from relayrun.config.compose.schema import ModelSection
from relayrun.control.trainers.megatron_lm_checkpoints import TRACKER_FILE
from relayrun.errors import InputError
from relayrun.train.export import megatron_arguments, optimizer_state
from relayrun.train.export.checkpoint_source import CheckpointSource
from relayrun.train.export.choose import require_llama
from relayrun.train.export.huggingface import DTYPES
from relayrun.train.export.model_mapping import EMBEDDING, FINAL_NORM, OUTPUT
from relayrun.train.export.reader import CheckpointReader
from relayrun.train.model.size import pad_to_multiple

_LAYER_PREFIX = "decoder.layers."
_LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Names of the norms that Transformer Engine fuses into the layer behind them."""


_PARAMETER_ORDER = {
    "transformer_engine": (
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ),
    "local": (
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ),
}
"""Weights of a layer as the modules of either implementation list them: Adam's state is numbered so."""


def write_torch_format(
    source: CheckpointSource, folder: Path, *, dtype: str, transformer_impl: str, with_optimizer: bool = False
) -> int:
    """Write into `folder`; return the number of parameters, padding included.

    Raises as `huggingface.write`, and InputError if an optimizer's state is asked for that is not there.
    """
    model, config = source.config.model, source.config
    reader = CheckpointReader(source.folder, source.checksum)
    vocabulary = pad_to_multiple(source.manifest.vocabulary_size, model.make_vocab_size_divisible_by)
    require_llama(model, source.folder).check(reader.shapes, model, vocabulary, source.folder)
    of = reader.dtype if dtype == "auto" else DTYPES[dtype]
    rename: Callable[[str], str] = (lambda name: _LOCAL_NAMES.get(name, name)) if transformer_impl == "local" else str

    def read(key: str, layer: int | None, dtype: torch.dtype, prefix: str = "") -> torch.Tensor:
        shape = reader.shapes[key]
        start = [layer or 0] + [0] * (len(shape) - 1)
        part = shape if layer is None else (1, *shape[1:])
        tensor = reader.read(prefix + key, start=start, shape=part, dtype=dtype)
        return tensor if layer is None else tensor[0]

    weights: dict[str, torch.Tensor] = {}
    for key in reader.shapes:
        if not key.startswith(_LAYER_PREFIX):
            weights[key] = read(key, None, of)
            continue
        for layer in range(model.num_layers):
            weights[f"{_LAYER_PREFIX}{layer}.{rename(key.removeprefix(_LAYER_PREFIX))}"] = read(key, layer, of)
    common = reader.common()
    position = megatron_arguments.checkpoint_position(common, config, source.iteration)
    arguments = megatron_arguments.megatron_arguments(config, vocabulary, of, position) | {
        "transformer_impl": transformer_impl,
        "ckpt_format": "torch",
        "no_save_optim": not with_optimizer,
        "no_save_rng": True,
    }
    state: dict[str, Any] = {
        "model": weights,
        "args": Namespace(**arguments),
        "iteration": source.iteration,
        "checkpoint_version": 3.0,
    }
    if with_optimizer:
        if "optimizer" not in common:
            raise InputError("this checkpoint has no optimizer", where=source.folder, hint="leave out --optimizer")
        adam = optimizer_state.find_adam_state(reader, common["optimizer"])
        bf16 = config.training.resolved_precision == "bf16"
        state["optimizer"] = _optimizer(adam, _numbered(model, transformer_impl), read, bf16=bf16)
        state["opt_param_scheduler"] = megatron_arguments.scheduler_state(config, position)
    target = folder / f"iter_{source.iteration:07}" / "mp_rank_00"
    target.mkdir(parents=True)
    torch.save(state, target / "model_optim_rng.pt")
    (folder / TRACKER_FILE).write_text(f"{source.iteration}\n")
    return sum(tensor.numel() for tensor in weights.values())


def _numbered(model: ModelSection, transformer_impl: str) -> tuple[list[tuple[str, int | None]], ...]:
    """The weights by group of the optimizer: matrices, then what has no weight decay."""
    layers = [
        (_LAYER_PREFIX + name, layer)
        for layer in range(model.num_layers)
        for name in _PARAMETER_ORDER[transformer_impl]
    ]
    every: list[tuple[str, int | None]] = [(EMBEDDING, None), *layers, (FINAL_NORM, None)]
    if model.untie_embeddings_and_output_weights:
        every.append((OUTPUT, None))
    norms = [each for each in every if "norm" in each[0]]
    return [each for each in every if each not in norms], norms


def _optimizer(
    adam: optimizer_state.AdamState,
    groups: tuple[list[tuple[str, int | None]], ...],
    read: Callable[..., torch.Tensor],
    *,
    bf16: bool,
) -> dict[str, Any]:
    """Adam's state as torch numbers it, with the fp32 weights where the model's are bf16."""
    step = torch.tensor(float(adam.step), dtype=torch.float32)
    every = [each for group in groups for each in group]
    state = {
        number: {
            "step": step.clone(),
            **{
                name: read(*each, torch.float32, f"{optimizer_state.OPTIMIZER_PREFIX}{name}.")
                for name in optimizer_state.ADAM_MOMENTS
            },
        }
        for number, each in enumerate(every)
    }
    settings, number, numbered = adam.with_defaults(), 0, []
    for group, each in zip(settings, groups, strict=True):
        numbered.append(group | {"params": list(range(number, number + len(each)))})
        number += len(each)
    inner = {"state": state, "param_groups": numbered}
    if not bf16:
        return inner
    prefix = "" if adam.main is None else f"{optimizer_state.OPTIMIZER_PREFIX}{adam.main}."
    return {
        "optimizer": inner,
        "fp32_from_fp16_params": [[read(*each, torch.float32, prefix) for each in group] for group in groups],
    }
