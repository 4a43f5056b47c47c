"""Groups of parameters with their own learning rate, weight decay or optimizer: `optimizer.groups`.

megatron-core makes the groups from its overrides. Patterns match a parameter's name in the whole model
(`parameter_names`): layers are counted over all pipeline stages, so a pattern means the same on every layout.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer, ParamKey
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

from relayrun.config.sections.optimizer import OptimizerGroup, OptimizerSection
from relayrun.errors import ConfigError

_LAYERS = re.compile(r"(.*\blayers)\.\d+$")
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc\d\.weight))(\d+)(.*)")


def parameter_names(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Parameter, str]]:
    """Yield this rank's parameters with their names in the whole model. Layers are counted from 0 over all pipeline
    stages, experts over all ranks of a layer."""
    for chunk in chunks:
        layers, held = {}, 0
        for path, module in chunk.named_modules():
            held = max(held, getattr(module, "num_local_experts", 0))
            if (found := _LAYERS.match(path)) and hasattr(module, "layer_number"):
                layers[path] = f"{found[1]}.{module.layer_number - 1}"
        for path, parameter in chunk.named_parameters():
            name = path
            for layer, counted in layers.items():
                if path.startswith(f"{layer}."):
                    name = counted + path.removeprefix(layer)
            name = re.sub(r"^(module\.)+", "", name)
            if held and (found := _EXPERT.fullmatch(name)):
                number = int(found[2]) + held * parallel_state.get_expert_model_parallel_rank()
                name = f"{found[1]}{number}{found[3]}"
            copied = name == "output_layer.weight" and getattr(parameter, "shared", False)
            yield parameter, "embedding.word_embeddings.weight" if copied else name  # tied, on another stage


Override = dict[str, Any]
"""Settings of a group for megatron-core."""

Groups = list[dict[str, Any]]

_MAIN = "fp32_from_fp16_params"


def group_overrides(
    settings: OptimizerSection, chunks: Sequence[torch.nn.Module], *, muon: bool
) -> dict[ParamKey, Override]:
    """Return the groups of these chunks as megatron-core's overrides; all ranks together.

    With `muon` the groups of matrices that Muon updates have `muon: qkv` or `muon: matrix`. Raises ConfigError on all
    ranks if a pattern matches no parameter of the model.
    """
    own = {parameter: _override(settings, parameter, name, muon=muon) for parameter, name in parameter_names(chunks)}
    _refuse_unmatched(settings.groups, [name for _, name in parameter_names(chunks)])
    found: dict[ParamKey, Override] = {}
    for override in own.values():
        if override:
            predicate = ParamWithNamePredicate(name=repr(override), fn=partial(_has, own, override))
            found[ParamKey(with_name_predicate=predicate)] = override
    return found


def _has(own: Mapping[torch.nn.Parameter, Override], override: Override, parameter: Any, name: str) -> bool:
    return own[parameter] == override


def _override(settings: OptimizerSection, parameter: torch.nn.Parameter, name: str, *, muon: bool) -> Override:
    found: Override = {"wd_mult": 0.0} if parameter.ndim == 1 or name.endswith(".bias") else {}
    if muon and parameter.ndim == 2 and not getattr(parameter, "is_embedding_or_output_parameter", False):
        found["muon"] = "qkv" if name.endswith("linear_qkv.weight") else "matrix"
    for group in settings.groups:
        if not fnmatch.fnmatchcase(name, group.match):
            continue
        if group.lr_mult is not None:
            found["lr_mult"] = group.lr_mult
            found["max_lr"], found["min_lr"] = settings.lr * group.lr_mult, settings.min_lr * group.lr_mult
        if group.weight_decay is not None:
            found["start_wd"] = found["end_wd"] = group.weight_decay
            found["wd_mult"] = 1.0
    return found


def _refuse_unmatched(groups: Sequence[OptimizerGroup], own: Sequence[str]) -> None:
    if not groups:
        return
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, list(own))
    known = sorted({name for part in everywhere for name in part})
    for group in groups:
        if not any(fnmatch.fnmatchcase(name, group.match) for name in known):
            kinds = sorted({re.sub(r"\d+", "N", name) for name in known})
            raise ConfigError(
                f"{group.match} matches no parameter of this model; it has {', '.join(kinds)}",
                where="optimizer.groups",
                hint="correct match, or leave the group out",
            )


def patch_group_loading(optimizer: MegatronOptimizer) -> None:
    """Let the plain optimizers inside `optimizer` load any groups, in the order of `fit_groups`."""
    for inner in optimizer.chained_optimizers:
        if type(inner) is FP32Optimizer:
            inner.__class__ = _AnyGroups
        elif type(inner) is Float16OptimizerWithFloat16Params:
            inner.__class__ = _AnyGroupsInBf16


class _AnyGroups(FP32Optimizer):  # type: ignore[misc]  # megatron-core has no types
    @staticmethod
    def _filter_and_reorder_param_groups(current_groups: Groups, state_dict_groups: Groups) -> Groups:
        """Keep the order: the original confuses groups that differ only in weight decay."""
        return state_dict_groups


class _AnyGroupsInBf16(Float16OptimizerWithFloat16Params):  # type: ignore[misc]
    """Saves and loads groups without a parameter on a rank.

    Fault: the original keeps the fp32 weights in a list of lists, and a load omits empty ones; later lists would be
    read into earlier groups without an error, or the load fails.
    """

    _filter_and_reorder_param_groups = staticmethod(_AnyGroups._filter_and_reorder_param_groups)

    def sharded_state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(*arguments, **named)
        state[_MAIN] = {number: dict(enumerate(group)) for number, group in enumerate(state[_MAIN])}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        found = state_dict.get(_MAIN, {})
        groups = [
            [found[number][at] for at in range(len(group))]
            for number, group in enumerate(self.fp32_from_float16_groups)
        ]
        super().load_state_dict(state_dict | {_MAIN: groups})


def fit_groups(found: Any, wanted: Any) -> None:
    """Replace a checkpoint's groups by this attempt's, in place, and keep the step count.

    megatron-core finds a checkpoint's groups by their settings, and fails if these have changed. Settings are the
    attempt's anyway; a checkpoint adds only the step count, which is equal in all groups.
    """
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        return
    if isinstance(groups := wanted.get("param_groups"), list) and found.get("param_groups"):
        steps = [group["step"] for group in found["param_groups"] if "step" in group]
        step = {"step": steps[0]} if steps else {}
        found["param_groups"] = [
            {name: value for name, value in group.items() if name not in ("params", "step")} | step for group in groups
        ]
    found.pop(_MAIN, None)  # empty lists of rank 0
    for name in found.keys() & wanted.keys():
        fit_groups(found[name], wanted[name])
