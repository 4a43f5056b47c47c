"""A hook of `round_cost.py`: a part of training is left out in every second block of iterations.

    {hook: "_toggled:Toggle", options: {what: heartbeats, block: 20}}

`heartbeats`: the page of memory in which a rank says where it is, and the heartbeat file of its node. `memory`: copies
of the state in memory, which belong to the iteration behind them. `stragglers`: the comparison of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relayrun.train.checkpoint.memory_tier import MemoryTier
from relayrun.train.hooks import Hook, StepStart
from relayrun.train.reporting.liveness import NodeHeartbeatWriter, SectionReporter
from relayrun.train.reporting.measurements import Stragglers

PARTS: dict[str, list[tuple[type, str]]] = {
    "heartbeats": [
        (NodeHeartbeatWriter, "enter"),
        (NodeHeartbeatWriter, "beat"),
        (SectionReporter, "enter"),
        (SectionReporter, "touch"),
    ],
    "memory": [(MemoryTier, "due")],
    "stragglers": [(Stragglers, name) for name in ("record_read", "_begin", "_end", "take")],
}


class Toggle(Hook):
    """Calls the real methods where the iteration that runs, or comes next, is one with them."""

    def __init__(self, what: str, block: int) -> None:
        self._block, self._iteration = block, 0
        ahead = 1 if what == "memory" else 0
        for owner, name in PARTS[what]:
            nothing = {} if name == "take" else None
            setattr(owner, name, self._instead_of(getattr(owner, name), ahead, nothing))

    def before_step(self, start: StepStart) -> None:
        self._iteration = start.iteration

    def _instead_of(self, real: Callable[..., Any], ahead: int, nothing: object) -> Callable[..., Any]:
        def either(*arguments: Any, **named: Any) -> Any:
            return real(*arguments, **named) if is_on(self._iteration + ahead, self._block) else nothing

        return either


def is_on(iteration: int, block: int) -> bool:
    """Whether the part is there in this iteration, counted from 1: of four blocks in the first and the last."""
    return (iteration - 1) // block % 4 in (0, 3)
