"""Plain state in Megatron-LM's checkpoints: a run's settings as its arguments, and Adam's state in its forms.

| form | tensors for each weight K, by prefix | plain part |
|---|---|---|
| plain, fp32 | `optimizer.state.`{exp_avg, exp_avg_sq}`.K` | {state: {common_step}, param_groups} |
| plain, bf16 | and fp32_param | {optimizer: {state: {common_step}, param_groups}} |
| fully_reshardable | `optimizer.state.`{param, exp_avg, exp_avg_sq}`.K` | {optimizer: {param_groups, with step}} |
| fully_sharded_model_space | {fp32_param, exp_avg, exp_avg_sq}, each part of a weight flat | the same |

The last two belong to Megatron's distributed optimizer, the last one to megatron-core before 0.14. Its other forms
(`dp_reshardable`, `dp_zero_gather_scatter`) hold its buffers, which depend on the layout of its ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from relayrun.config.compose.megatron_flags import megatron_checkpoint_args
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import InputError
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.train.export.megatron_settings import MEGATRON_TABLES
from relayrun.train.export.torch_dist import CheckpointReader, TorchDistSavePlan


def checkpoint_position(common: dict[str, Any], config: RunConfig, iteration: int) -> TrainingProgress:
    """Return the position of a checkpoint in its data. `common`: its common part, without progress after an import."""
    sizes = config.training.batch_sizes
    if "progress" in common:
        return TrainingProgress.resume(common["progress"], sizes)
    return TrainingProgress(sizes, iteration=iteration)


def megatron_arguments(
    config: RunConfig, vocabulary: int, dtype: torch.dtype, position: TrainingProgress
) -> dict[str, Any]:
    """Return the arguments that Megatron's programs and tools read. `vocabulary`: padded. `dtype`: of the weights."""
    model, training, optimizer = config.model, config.training, config.optimizer
    warmup, decay = config.lr_steps(position.reaches)
    return megatron_checkpoint_args(config) | {
        **MEGATRON_TABLES["exported"],
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "kv_channels": model.hidden_size // model.num_attention_heads,
        "max_position_embeddings": training.seq_length,
        "use_rope_scaling": model.rope_scaling_factor is not None,
        "rope_scaling_factor": model.rope_scaling_factor or 8.0,
        "padded_vocab_size": vocabulary,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "iteration": position.iteration,
        "consumed_train_samples": position.consumed_samples,
        "lr_decay_iters": decay,
        "lr_warmup_iters": warmup,
        "lr_wsd_decay_iters": optimizer.lr_wsd_decay_steps,
        "lr_wsd_decay_style": optimizer.lr_wsd_decay_style,
    }


def layout_arguments(config: RunConfig) -> dict[str, Any]:
    """Return the arguments about the layout of the ranks."""
    parallel = config.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "world_size": config.world_size,
        "data_parallel_size": config.data_parallel_size,
    }


def scheduler_state(config: RunConfig, position: TrainingProgress) -> dict[str, Any]:
    """Return the state of Megatron's scheduler, which counts samples instead of iterations."""
    optimizer, size = config.optimizer, config.training.global_batch_size
    warmup, decay = config.lr_steps(position.reaches)
    return {
        "max_lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr_warmup_steps": warmup * size,
        "num_steps": position.iteration * size,
        "lr_decay_style": optimizer.lr_decay_style,
        "lr_decay_steps": decay * size,
        "start_wd": optimizer.weight_decay,
        "end_wd": optimizer.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": config.training.steps * size,
    }


OPTIMIZER_PREFIX = "optimizer.state."
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class AdamState:
    """Adam's state in a checkpoint."""

    reader: CheckpointReader
    groups: list[dict[str, Any]]
    """Hyperparameters by group, without the parameters."""
    step: int
    main: str | None
    """Name of the fp32 weights after OPTIMIZER_PREFIX; None: the weights themselves are fp32."""
    form: str | None
    """Form of a distributed optimizer's state; None: plain."""

    def copy_into(
        self,
        contents: TorchDistSavePlan,
        weights: Mapping[str, tuple[int, ...]],
        keys: Mapping[str, str],
        *,
        distributed: bool,
        precision: str,
    ) -> None:
        """Add the tensors in another form. `weights`: shapes by key; `keys`: their keys here. Raises InputError if a
        tensor is missing."""
        found = set(self.reader.tensors)
        names = {f"{OPTIMIZER_PREFIX}{name}.": f"{OPTIMIZER_PREFIX}{name}." for name in ADAM_MOMENTS}
        if distributed or precision == "bf16":  # a plain optimizer uses fp32 weights themselves
            source = "" if self.main is None else f"{OPTIMIZER_PREFIX}{self.main}."
            names[source] = f"{OPTIMIZER_PREFIX}{'param' if distributed else 'fp32_param'}."
        for key, size in weights.items():
            for source, target in names.items():
                if source + keys[key] not in found:
                    raise InputError(f"{source + keys[key]} is missing", where=self.reader.folder)
                _copy(self.reader, contents, source + keys[key], target + key, size)

    def plain(self, *, distributed: bool, precision: str) -> dict[str, Any]:
        """Return the plain part in another form."""
        if distributed:
            groups = [group | {"step": float(self.step)} for group in self.groups]
            return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
        step = torch.tensor(float(self.step), dtype=torch.float32)
        inner = {"state": {"common_step": step}, "param_groups": self.groups}
        return {"optimizer": inner} if precision == "bf16" else inner

    def with_defaults(self) -> list[dict[str, Any]]:
        """Return the groups with all entries that any implementation of Adam needs."""
        return [MEGATRON_TABLES["optimizer_group"] | group | {"step": self.step} for group in self.groups]


def find_adam_state(reader: CheckpointReader, state: Mapping[str, Any]) -> AdamState:
    """Return Adam's state in a checkpoint. `state`: its plain part, `common["optimizer"]`. Raises InputError if the
    state belongs to another optimizer, or has another form."""
    where = reader.folder
    form = state.get("param_state_sharding_type")
    names = (key.removeprefix(OPTIMIZER_PREFIX) for key in reader.tensors if key.startswith(OPTIMIZER_PREFIX))
    kinds = {name.partition(".")[0] for name in names}
    if not kinds.issuperset(ADAM_MOMENTS):
        raise InputError(
            f"the state of its {'distributed ' if form else ''}optimizer is in another form"
            + (f" ({form})" if form else ""),
            where=where,
        )
    if more := sorted(kinds - {*ADAM_MOMENTS, "param", "fp32_param"}):
        raise InputError(f"its optimizer keeps {more[0]}, which is not Adam's", where=where)
    inner = state["optimizer"] if isinstance(state.get("optimizer"), Mapping) else state
    groups = inner.get("param_groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise InputError("its optimizer has no groups of parameters in its plain part", where=where)
    steps = {float(group["step"]) for group in groups if group.get("step") is not None}
    common = inner.get("state", {}).get("common_step") if isinstance(inner.get("state"), Mapping) else None
    if common is not None:
        steps = {float(common)}
    if len(steps) != 1:
        raise InputError(f"its optimizer has {len(steps) or 'no'} counts of steps", where=where)
    main = next((name for name in ("param", "fp32_param") if name in kinds), None)
    plain = [{name: value for name, value in group.items() if name not in ("params", "step")} for group in groups]
    return AdamState(reader=reader, groups=plain, step=int(steps.pop()), main=main, form=form)


def _copy(reader: CheckpointReader, contents: TorchDistSavePlan, key: str, name: str, size: tuple[int, ...]) -> None:
    if reader.size(key) == size:
        contents.copy_tensor(reader, key, name)
        return
    for start, part, make in _flat_parts(reader, key, size):
        contents.add_tensor(name, size=size, start=start, part=part, dtype=reader.dtype_of(key), make=make)


def _flat_parts(
    reader: CheckpointReader, key: str, size: tuple[int, ...]
) -> Iterator[tuple[list[int], tuple[int, ...], Callable[[], torch.Tensor]]]:
    """Yield start, shape and tensor of the parts of a weight of this size, each of which is flat in the checkpoint."""
    grid, flat = reader.size(key)[:-1], reader.size(key)[-1]
    part = tuple(a // b for a, b in zip(size, grid, strict=False))
    if len(grid) != len(size) or any(a % b for a, b in zip(size, grid, strict=True)) or math.prod(part) != flat:
        raise InputError(f"{key} has the shape {[*grid, flat]}, not {list(size)}", where=reader.folder)
    for cell in itertools.product(*map(range, grid)):

        def make(cell: tuple[int, ...] = cell) -> torch.Tensor:
            shape = [1] * len(grid) + [flat]
            return reader.read(key, start=[*cell, 0], shape=shape, dtype=reader.dtype_of(key)).reshape(part)

        yield [index * length for index, length in zip(cell, part, strict=True)], part, make


@dataclass(frozen=True)
class Fp32Weights:
    """The fp32 weights in the state of an optimizer, read like the weights of `reader`."""

    reader: CheckpointReader
    prefix: str

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.reader.shapes

    def read(self, key: str, *, start: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Read a part, as `CheckpointReader.read` does."""
        size, name = self.shapes[key], self.prefix + key
        if self.reader.size(name) == size:
            return self.reader.read(name, start=start, shape=shape, dtype=dtype)
        found = torch.empty(list(shape), dtype=dtype)
        for at, part, make in _flat_parts(self.reader, name, size):
            spans = [(max(a, s), min(a + n, s + m)) for a, n, s, m in zip(at, part, start, shape, strict=True)]
            if all(low < high for low, high in spans):
                inside = tuple(slice(low - a, high - a) for (low, high), a in zip(spans, at, strict=True))
                found[tuple(slice(low - s, high - s) for (low, high), s in zip(spans, start, strict=True))] = make()[
                    inside
                ]
        return found


def weights_as(
    dtype: torch.dtype, reader: CheckpointReader, keys: Sequence[str], notes: list[str]
) -> tuple[CheckpointReader | Fp32Weights, torch.dtype | None]:
    """Return the reader of the weights `keys` for an export in `dtype`. For fp32 it reads the optimizer's fp32 weights,
    if the checkpoint has them, and the type is that of the weights rounded from them; else a note says so."""
    if dtype is not torch.float32 or reader.dtype is dtype:
        return reader, None
    for name in ("param", "fp32_param"):
        prefix = f"{OPTIMIZER_PREFIX}{name}."
        if all(prefix + key in reader.tensors for key in keys):
            return Fp32Weights(reader, prefix), reader.dtype
    words = str(reader.dtype).removeprefix("torch.")
    notes.append(f"float32 holds no more than {words} here: the checkpoint has no fp32 weights of an optimizer")
    return reader, None
