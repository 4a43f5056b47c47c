"""Any torch.optim.Optimizer in place of Adam, with its state in checkpoints.

Every tensor and number that an optimizer keeps for a parameter is saved under its name there and the name of the
parameter in the whole model:

    optimizer.state.<name>.<parameter>   a tensor of the parameter's shape is split as the parameter is, and a number
                                         is saved once: both fit every layout
                                         a tensor of another shape fits only the layout that saved it
    groups, in the common part           values that the optimizer keeps in its groups besides its settings

A load reads everything in the checkpoint, so an optimizer need not create its state before its first step.

Plain values depend on the layout: megatron-core keeps experts that are split over ranks (expert parallelism) in an
optimizer of their own, with its own groups. The plain values hold only the step count; the rest is in the config.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import (
    extract_nonpersistent,
    extract_sharded_base,
    extract_sharded_tensors_and_factories,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from relayrun.config.sections.optimizer import OptimizerSection
from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.train import user_code

PlainState = dict[Any, Any]
STATE_PREFIX = "optimizer.state."
MAIN_PARAMETER = "fp32_param"
"""The fp32 weights of a model in bf16, under megatron-core's name."""
FOUND_KEY = "relayrun_found"
"""Entry of `metadata` with the checkpoint's content by key, for a load."""
ATTEMPT_SETTINGS = {
    "default_config",
    "end_wd",
    "is_decoupled_lr",
    "is_expert_parallel",
    "lr",
    "lr_mult",
    "max_lr",
    "min_lr",
    "muon",
    "params",
    "start_wd",
    "wd_mult",
    "weight_decay",
}
"""Settings of a group from the config; arguments of the optimizer's class are settings, too."""
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def import_optimizer_class(settings: OptimizerSection) -> MakeOptimizer:
    """Import `optimizer.class`; return its factory. Raises ConfigError if it cannot be used."""
    path = settings.class_path
    assert path is not None
    found = user_code.import_user_object(path)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(f"{path} is no class that inherits torch.optim.Optimizer")

    build: Callable[..., torch.optim.Optimizer] = found

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        decay = {"weight_decay": settings.weight_decay} if settings.weight_decay else {}
        try:
            made = build(groups, lr=settings.lr, **decay, **settings.arguments)
        except (Exception, SystemExit) as error:
            given = ", ".join(["lr", *decay, *settings.arguments])
            raise ConfigError(f"{path} cannot be made with {given}: {user_code.describe_error(error)}") from error
        if more := set(made.state_dict()) - {"state", "param_groups"}:
            raise ConfigError(
                f"{path} keeps {', '.join(sorted(more))} beside its state, which no checkpoint would hold"
            )
        return made

    return make


def replace_adam(optimizer: MegatronOptimizer, make: MakeOptimizer) -> None:
    """Replace each Adam inside `optimizer`. megatron-core creates them inside get_megatron_optimizer, with no parameter
    for the class."""
    for inner in optimizer.chained_optimizers:
        if inner.is_stub_optimizer:
            continue
        adams = inner.optimizer.defaults.keys() - {"params"}
        groups = [
            {name: value for name, value in group.items() if name not in adams}
            for group in inner.optimizer.param_groups
        ]
        inner.optimizer = make(groups)
        state = _NamedState(inner)
        inner.sharded_state_dict, inner.load_state_dict = state.sharded_state_dict, state.load_state_dict


def group_settings(optimizer: MegatronOptimizer) -> set[str]:
    """Return the names in the groups of `optimizer` that are settings; all others are state."""
    inside = [inner.optimizer for inner in optimizer.chained_optimizers if not inner.is_stub_optimizer]
    return ATTEMPT_SETTINGS.union(*map(_taken, inside))


def _taken(optimizer: torch.optim.Optimizer) -> set[str]:
    return set(inspect.signature(type(optimizer).__init__).parameters)


class _NamedState:
    """Saves and loads the state of the optimizer inside a megatron-core optimizer."""

    def __init__(self, outer: FP32Optimizer | Float16OptimizerWithFloat16Params) -> None:
        self._outer = outer

    def _held(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield the model's parameters, each with the tensor that the optimizer updates for it."""
        outer = self._outer
        if isinstance(outer, FP32Optimizer):
            yield from ((parameter, parameter) for parameter in outer.get_parameters())
            return
        for parameters, mains in zip(outer.float16_groups, outer.fp32_from_float16_groups, strict=True):
            yield from zip(parameters, mains, strict=True)
        for parameters in outer.fp32_from_fp32_groups:
            yield from ((parameter, parameter) for parameter in parameters)

    def sharded_state_dict(
        self,
        model_sharded_state_dict: ShardedStateDict,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the state of the checkpoint, by number of the parameter on this rank and name.

        `metadata[FOUND_KEY]`: content of the checkpoint, with `is_loading`. Raises FatalTrainingError for a value that
        cannot be saved, or fits another layout only.
        """
        weights, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        wholes: dict[Any, ShardedBase] = {whole.data: whole for whole in nested_values(weights)}
        found = _by_parameter((metadata or {})[FOUND_KEY]) if is_loading else {}
        states: dict[int, dict[str, ShardedBase]] = {}
        for number, (parameter, main) in enumerate(self._held()):
            whole = wholes[parameter]
            if is_loading:
                states[number] = dict(_asked(whole, main, found.get(_piece(whole).key, {})))
                continue
            state = dict(self._outer.optimizer.state.get(main, {}))
            if main is not parameter:
                state[MAIN_PARAMETER] = main
            states[number] = {name: _saved(name, value, whole, main) for name, value in state.items()}
        return {"states": states} | ({} if is_loading else {"groups": self._state_of_groups()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of a load into `sharded_state_dict`."""
        for number, (_, main) in enumerate(self._held()):
            state = {}
            for name, value in state_dict["states"].get(number, {}).items():
                if name == MAIN_PARAMETER:
                    main.data.copy_(value)
                elif isinstance(value, dict):
                    inner = value["value"]
                    state[name] = inner.to(main.device) if value["beside"] else inner
                else:
                    state[name] = value
            self._outer.optimizer.state[main] = state
        # empty if experts were split differently, with their own groups
        saved: list[dict[str, Any]] = state_dict.get("groups", [])
        for number, group in enumerate(self._outer.optimizer.param_groups if saved else ()):
            group.update(saved[number] if len(saved) == len(self._outer.optimizer.param_groups) else saved[0])

    def _state_of_groups(self) -> list[dict[str, Any]]:
        settings = ATTEMPT_SETTINGS | _taken(self._outer.optimizer)
        return [
            {name: _plain(name, value) for name, value in group.items() if name not in settings}
            for group in self._outer.optimizer.param_groups
        ]


def _by_parameter(found: Mapping[str, Any]) -> dict[str, dict[str, tuple[str, Any]]]:
    """Return key and metadata of a checkpoint's entries, by the parameter and the name of the state."""
    result: dict[str, dict[str, tuple[str, Any]]] = defaultdict(dict)
    for key, described in found.items():
        if key.startswith(STATE_PREFIX):
            name, _, rest = key.removeprefix(STATE_PREFIX).partition(".")
            result[rest.partition("/shard_")[0]][name] = key, described
    return result


def _asked(
    whole: ShardedBase, main: torch.Tensor, found: Mapping[str, tuple[str, Any]]
) -> Iterator[tuple[str, ShardedBase]]:
    for name, (key, described) in found.items():
        if isinstance(described, TensorStorageMetadata):
            empty = torch.empty_like(main, dtype=described.properties.dtype, requires_grad=False)
            yield name, make_sharded_optimizer_tensor(whole, empty, prefix=f"{STATE_PREFIX}{name}")
            continue
        once, part = _once(name, None, whole), _part(name, None, whole)
        shape = key.rpartition("_")[2]
        if shape == _shape(once):
            yield name, once
        elif shape == _shape(part):
            yield name, part
        else:
            raise FatalTrainingError(
                f"the optimizer's {name} of {_piece(whole).key} is saved for another tensor parallel size",
                hint="go on with the layout that it was saved with",
            )


def _shape(value: ShardedObject) -> str:
    return str(value.unique_key).rpartition("_")[2]


def _saved(name: str, value: Any, whole: ShardedBase, main: torch.Tensor) -> ShardedBase:
    if isinstance(value, torch.Tensor) and value.shape == main.shape:
        return make_sharded_optimizer_tensor(whole, value, prefix=f"{STATE_PREFIX}{name}")
    entry = {"value": _plain(name, value), "beside": isinstance(value, torch.Tensor) and value.device.type != "cpu"}
    single = not isinstance(value, torch.Tensor) or value.numel() == 1
    return _once(name, entry, whole) if single else _part(name, entry, whole)


def _once(name: str, entry: Any, whole: ShardedBase) -> ShardedObject:
    """Return one value for the whole parameter, which all ranks with parts of it share."""
    piece = _piece(whole)
    stack = piece.prepend_axis_num
    parts = tuple(offset // size for offset, size in zip(piece.global_offset[stack:], piece.local_shape, strict=True))
    own = piece.replica_id if isinstance(piece.replica_id, tuple) else (piece.replica_id,)
    return ShardedObject(
        f"{STATE_PREFIX}{name}.{piece.key}",
        entry,
        (*piece.axis_fragmentations[:stack], 1),
        (*piece.global_offset[:stack], 0),
        replica_id=(*own, sum(parts)),
    )


def _part(name: str, entry: Any, whole: ShardedBase) -> ShardedObject:
    """Return a value for the part of the parameter that a rank holds."""
    piece, *more = parameter_sharded_tensors(whole)
    sizes = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
    offset = tuple(offset // size for offset, size in zip(piece.global_offset, sizes, strict=True))
    shape = list(piece.axis_fragmentations)
    if more:  # SwiGLU: the first halves of all ranks come before the second halves
        axis = next(n for n, at in enumerate(piece.global_offset) if at != more[0].global_offset[n])
        shape[axis] //= 1 + len(more)
    key = f"{STATE_PREFIX}{name}.{piece.key}"
    return ShardedObject(key, entry, tuple(shape), offset, replica_id=piece.replica_id)


def parameter_sharded_tensors(whole: ShardedBase) -> list[ShardedTensor]:
    return list(nested_values([whole.build()])) if isinstance(whole, ShardedTensorFactory) else [whole]


def _piece(whole: ShardedBase) -> ShardedTensor:
    return parameter_sharded_tensors(whole)[0]


def _plain(name: str, value: Any) -> Any:
    """Return a copy of a value for a checkpoint. Raises FatalTrainingError if its type cannot be saved."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {key: _plain(name, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(name, each) for each in value)
    raise FatalTrainingError(
        f"the optimizer keeps {name}, of the type {type(value).__name__}, and a checkpoint holds tensors and plain "
        "values alone",
        hint="let the optimizer keep tensors, numbers and texts in its state and its groups",
    )


def fit_plain_state(found: PlainState, wanted: PlainState) -> PlainState:
    """Return the plain part `found` in the form of the optimizer whose state is `wanted`, which is not changed. It is
    `found` itself if both have the same optimizers with equally many groups each."""
    _, own = extract_sharded_base(extract_nonpersistent(wanted)[1])
    if [len(_param_groups(part)) for part in _state_parts(found)] == [
        len(_param_groups(part)) for part in _state_parts(own)
    ]:
        return found
    step = _step_count(found)
    for part in _state_parts(own):
        if "param_state_sharding_type" in part:  # the distributed optimizer
            for group in _param_groups(part):
                group["step"] = step
        elif step is not None:
            part.get("optimizer", part).setdefault("state", {})["common_step"] = step
    return own  # type: ignore[no-any-return]


def _state_parts(state: PlainState) -> Iterator[PlainState]:
    """Yield the optimizers of a state: several are numbered, a single one is the state itself."""
    numbers = sorted(key for key in state if isinstance(key, int))
    yield from [state[number] for number in numbers] if numbers else [state]


def _param_groups(part: PlainState) -> list[dict[str, Any]]:
    """Return the parameter groups; in bf16 and with the distributed optimizer they are one level deeper."""
    return part.get("optimizer", part).get("param_groups", [])  # type: ignore[no-any-return]


def _step_count(state: PlainState) -> Any:
    """Return the number of steps as the checkpoint holds it; None before the first step."""
    for part in _state_parts(state):
        inner = part.get("optimizer", part)
        found = [group["step"] for group in _param_groups(part) if group.get("step") is not None]
        found += [inner.get("state", {}).get("common_step")]
        if found[0] is not None:
            return found[0]
    return None


def fit_user_state(found: dict[Any, Any], wanted: dict[Any, Any]) -> dict[Any, Any]:
    """Return the plain part `found` of a checkpoint for the optimizers whose state is `wanted`.

    Experts that are split over ranks have an optimizer of their own. If the number of optimizers differs from the
    checkpoint's, the values in their groups start anew.
    """
    numbers, wanted_numbers = ({key for key in state if isinstance(key, int)} for state in (found, wanted))
    return found if numbers == wanted_numbers else {}
