"""The plain part of an optimizer's state in a checkpoint of another layout.

Tensors have one name in a checkpoint, whatever the layout. What is plain has not: megatron-core keeps experts that are
split over ranks (expert parallelism) in an optimizer of their own, so that there are two, with groups of their own. All
that such a checkpoint says in plain values is how many steps were made; the rest is in the run's config.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base

PlainState = dict[Any, Any]


def fit_plain_state(found: PlainState, wanted: PlainState) -> PlainState:
    """Return the plain part `found` as the optimizer expects it whose state is `wanted`.

    It is `found` itself where both have the same optimizers with as many groups each. `wanted` is not changed.
    """
    if any("groups" in part for part in _state_parts(found)):
        return _fit_user_optimizers(found, wanted)
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


def _fit_user_optimizers(found: PlainState, wanted: PlainState) -> PlainState:
    """The same for optimizers of `own_optimizer.py`, such as Muon, which take the first group where numbers differ."""
    parts, numbers = list(_state_parts(found)), [key for key in wanted if isinstance(key, int)]
    if len(parts) == max(1, len(numbers)):
        return found
    groups = [group for part in parts for group in part.get("groups", [])]
    return {number: {"groups": groups} for number in numbers} if numbers else {"groups": groups}


def _state_parts(state: PlainState) -> Iterator[PlainState]:
    """The optimizers of a state: several are numbered, one is the state itself."""
    numbers = sorted(key for key in state if isinstance(key, int))
    yield from [state[number] for number in numbers] if numbers else [state]


def _param_groups(part: PlainState) -> list[dict[str, Any]]:
    """The groups of parameters; in bf16 and with the distributed optimizer they lie one level deeper."""
    return part.get("optimizer", part).get("param_groups", [])  # type: ignore[no-any-return]


def _step_count(state: PlainState) -> Any:
    """How many steps were made, as the checkpoint holds it; None: none yet."""
    for part in _state_parts(state):
        inner = part.get("optimizer", part)
        found = [group["step"] for group in _param_groups(part) if group.get("step") is not None]
        found += [inner.get("state", {}).get("common_step")]
        if found[0] is not None:
            return found[0]
    return None
