"""Adam's state in a torch_dist checkpoint, in the forms that megatron-core gives it, and from one form to another.

| form | tensors for each weight K, by prefix | plain part |
|---|---|---|
| plain, fp32 | `optimizer.state.`{exp_avg, exp_avg_sq}`.K` | {state: {common_step}, param_groups} |
| plain, bf16 | and fp32_param | {optimizer: {state: {common_step}, param_groups}} |
| fully_reshardable | `optimizer.state.`{param, exp_avg, exp_avg_sq}`.K` | {optimizer: {param_groups, with step}} |
| fully_sharded_model_space | {fp32_param, exp_avg, exp_avg_sq}, each part of a weight flat | the same |

The last two are of Megatron's distributed optimizer, the last one of megatron-core before 0.14. Its other forms
(`dp_reshardable`, `dp_zero_gather_scatter`) are those of its buffers, which depend on the layout of its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from relayrun.errors import InputError
from relayrun.train.export.contents import CheckpointContents
from relayrun.train.export.reader import CheckpointReader

OPTIMIZER_PREFIX = "optimizer.state."
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
_DEFAULTS: dict[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
    "bias_correction": True,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
    "lr_mult": 1.0,
    "default_config": True,
}
"""What torch's AdamW and TransformerEngine's look for in a group; either leaves out what only the other one needs."""


@dataclass(frozen=True, kw_only=True)
class AdamState:
    """What a checkpoint holds of Adam's state."""

    reader: CheckpointReader
    groups: list[dict[str, Any]]
    """Hyperparameters by group of parameters, without the parameters."""
    step: int
    main: str | None
    """How the keys of the fp32 weights begin, behind PREFIX; None: the weights themselves are fp32."""
    form: str | None
    """That of a distributed optimizer; None: plain."""

    def copy_into(
        self, contents: CheckpointContents, weights: Mapping[str, tuple[int, ...]], *, distributed: bool, precision: str
    ) -> None:
        """Add the tensors in another kind. `weights`: shapes by key. Raises InputError if one is not there."""
        found = set(self.reader.tensors)
        names = {f"{OPTIMIZER_PREFIX}{name}.": f"{OPTIMIZER_PREFIX}{name}." for name in ADAM_MOMENTS}
        if distributed or precision == "bf16":  # a plain optimizer has the weights themselves where these are fp32
            source = "" if self.main is None else f"{OPTIMIZER_PREFIX}{self.main}."
            names[source] = f"{OPTIMIZER_PREFIX}{'param' if distributed else 'fp32_param'}."
        for key, size in weights.items():
            for source, target in names.items():
                if source + key not in found:
                    raise InputError(f"{source + key} is missing", where=self.reader.folder)
                _copy(self.reader, contents, source + key, target + key, size)

    def plain(self, *, distributed: bool, precision: str) -> dict[str, Any]:
        """Return the plain part in another kind."""
        if distributed:
            groups = [group | {"step": float(self.step)} for group in self.groups]
            return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
        step = torch.tensor(float(self.step), dtype=torch.float32)
        inner = {"state": {"common_step": step}, "param_groups": self.groups}
        return {"optimizer": inner} if precision == "bf16" else inner

    def with_defaults(self) -> list[dict[str, Any]]:
        """Return the groups with all that either implementation of Adam looks for."""
        return [_DEFAULTS | group | {"step": self.step} for group in self.groups]


def find_adam_state(reader: CheckpointReader, state: Mapping[str, Any]) -> AdamState:
    """Return what a checkpoint with this plain part (`common["optimizer"]`) holds.

    Raises InputError, which says it in words, if it is another optimizer's state, or in another form.
    """
    where = reader.folder
    form = state.get("param_state_sharding_type")
    kinds = {
        key.removeprefix(OPTIMIZER_PREFIX).partition(".")[0]
        for key in reader.tensors
        if key.startswith(OPTIMIZER_PREFIX)
    }
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


def _copy(reader: CheckpointReader, contents: CheckpointContents, key: str, name: str, size: tuple[int, ...]) -> None:
    found = reader.size(key)
    if found == size:
        contents.copy_tensor(reader, key, name)
        return
    grid, flat = found[:-1], found[-1]  # a grid of parts of the weight, each of them flat
    if len(grid) != len(size) or any(a % b for a, b in zip(size, grid, strict=False)):
        raise InputError(f"{key} has the shape {list(found)}, not {list(size)}", where=reader.folder)
    part = tuple(a // b for a, b in zip(size, grid, strict=True))
    if torch.Size(part).numel() != flat:
        raise InputError(f"{key} has the shape {list(found)}, not {list(size)}", where=reader.folder)
    dtype = reader.dtype_of(key)
    for number in range(torch.Size(grid).numel()):
        at = torch.unravel_index(torch.tensor(number), grid)
        cell = [int(each) for each in at]

        def make(cell: list[int] = cell) -> torch.Tensor:
            return reader.read(key, start=[*cell, 0], shape=[1] * len(grid) + [flat], dtype=dtype).reshape(part)

        start = [index * length for index, length in zip(cell, part, strict=True)]
        contents.add_tensor(name, size=size, start=start, part=part, dtype=dtype, make=make)
