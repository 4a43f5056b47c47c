"""Which rank is slower than its peers, and in what: each measures its own time, and every 20 steps all compare.

Own time ends where a rank begins to wait for others: reading data; both passes until gradients are to be reduced; the
optimizer's update; the copy for a save (and its writing, where training waits for that). What ranks of one replica wait
for each other inside a pass (tensor, context and pipeline parallel) cannot be told apart: then all of them are slow.

The price is an all-gather of four numbers on the host every 20 steps, and some reads of a clock: on a GPU they are
events, and it is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from relayrun.control.rundir.stragglers import (
    STRAGGLER_RATIO,
    STRAGGLER_SECTIONS,
    STRAGGLER_WINDOW,
    Straggler,
    slowest_rank,
)
from relayrun.train.model.gpt import ModelStage
from relayrun.train.optimizer.optimizer import ScheduledOptimizer
from relayrun.train.parallel import Ranks
from relayrun.train.timers import DeviceTimestamps, Timestamp


class Stragglers:
    """The comparison, on this rank. All ranks call the same methods at the same iterations."""

    def __init__(
        self, model: ModelStage, optimizer: ScheduledOptimizer, ranks: Ranks, *, node: str, say: Callable[[str], None]
    ) -> None:
        self._ranks, self._node, self._say = ranks, node, say
        self._marks = DeviceTimestamps(ranks.device)
        self._begun: Timestamp | None = None
        self._pairs: dict[str, list[tuple[Timestamp, Timestamp]]] = {"forward": [], "optimizer": []}
        self._seconds = dict.fromkeys(STRAGGLER_SECTIONS, 0.0)
        self._steps = 0
        self._found: dict[str, Any] = {}
        """The straggler of the newest comparison; nothing where there is none."""
        self._watch_passes(model)
        self._watch_update(optimizer)

    def _watch_passes(self, model: ModelStage) -> None:
        """Have the moment noted at which gradients are there and are to be reduced."""
        transformer = get_model_config(model.chunks[0])
        reduce = transformer.finalize_model_grads_func

        def arrived(*arguments: Any, **named: Any) -> None:
            self._end("forward")
            reduce(*arguments, **named)

        transformer.finalize_model_grads_func = arrived

    def _watch_update(self, optimizer: ScheduledOptimizer) -> None:
        for part in optimizer.inner.chained_optimizers:
            inner = getattr(part, "optimizer", None)
            if isinstance(inner, torch.optim.Optimizer):
                inner.register_step_pre_hook(lambda *_: self._begin())
                inner.register_step_post_hook(lambda *_: self._end("optimizer"))

    def read(self, seconds: float) -> None:
        """The batch is there, after so many seconds; both passes begin."""
        self._seconds["data"] += seconds
        self._begin()

    def _begin(self) -> None:
        self._begun = self._marks.now()

    def _end(self, section: str) -> None:
        if self._begun is not None:
            self._pairs[section].append((self._begun, self._marks.now()))
            self._begun = None

    def take(self, iteration: int, *, save_seconds: float) -> dict[str, Any]:
        """End a step, for which the device has been waited; return fields of `Step`.

        `save_seconds`: this rank's own, since the step before.
        """
        for section, pairs in self._pairs.items():
            self._seconds[section] += sum(self._marks.between(*pair) for pair in pairs) / 1000
            pairs.clear()
        self._seconds["save"] += save_seconds
        self._steps += 1
        if self._steps < STRAGGLER_WINDOW or self._ranks.world_size == 1:
            return self._found
        own = torch.tensor([self._seconds[name] / self._steps for name in STRAGGLER_SECTIONS], dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(self._ranks.world_size)]
        dist.all_gather(every, own, group=self._ranks.cpu_group)
        self._steps, self._seconds = 0, dict.fromkeys(STRAGGLER_SECTIONS, 0.0)
        rank, ratio, section, more = slowest_rank([one.tolist() for one in every])
        before, self._found = self._found, {}
        if ratio < STRAGGLER_RATIO:
            return {"slowest_rank_ratio": ratio}
        node = self._ranks.gather(self._node)[rank]
        found = Straggler(rank=rank, node=node, section=section, ratio=ratio, seconds=more)
        self._found = {"straggler": asdict(found)}
        known = before.get("straggler", {})
        if (known.get("rank"), known.get("section")) != (rank, section):
            self._say(f"iteration {iteration}: {found.words}")
        return {"slowest_rank_ratio": ratio, **self._found}
