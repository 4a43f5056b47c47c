"""Measurements of an iteration on all ranks: norms, zeros and timers (`tracking`), and slow ranks (stragglers).

Nothing here waits for the device: values are copied to the host asynchronously, and read at the end of the iteration,
when the device has been waited for. GPU times are events. Out: fields of `Step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_model_config

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.node_health import (
    STRAGGLER_RATIO,
    STRAGGLER_SECTIONS,
    STRAGGLER_WINDOW,
    Straggler,
    slowest_rank,
)
from relayrun.train import timers
from relayrun.train.distributed import Ranks
from relayrun.train.model.gpt import ModelStage
from relayrun.train.optimizer import megatron_optimizer
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer, ShardedCheckpointOptimizer
from relayrun.train.optimizer.parameter_groups import parameter_names
from relayrun.train.timers import DeviceTimestamps, Timer


class IntervalMetrics:
    """Norms, zeros and timers of one attempt on one rank. All ranks call the same methods at the same iterations."""

    def __init__(self, config: RunConfig, model: ModelStage, optimizer: ScheduledOptimizer, ranks: Ranks) -> None:
        settings = self._settings = config.tracking
        self._divided = config.parallel.use_distributed_optimizer
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._weights = settings.log_params_norm or settings.log_params_norm_per_param
        self._parameters = {
            name: parameter
            for parameter, name in (parameter_names(model.chunks) if self._weights else ())
            if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
        }
        """This rank's parameters by layout-independent names, without duplicates of other ranks."""
        self._names: list[str] = []
        if self._weights:
            self._names = sorted({name for names in ranks.gather(list(self._parameters)) for name in names})
        places = {name: place for place, name in enumerate(self._names)}
        self._places = torch.tensor([places[name] for name in self._parameters], device=model.device)
        """Index of each of this rank's parameters among those of all ranks."""
        self._zeros = torch.zeros(1, dtype=torch.float64, device=model.device)
        on_gpu = model.device.type == "cuda"
        self._host = torch.zeros(len(self._names) + 1, dtype=torch.float64, pin_memory=on_gpu)
        self._read = self._host.numpy()  # shares the memory; reads need no call of torch

    def due(self, iteration: int) -> bool:
        return iteration % self._settings.log_interval == 0

    def measure_gradients(self, iteration: int) -> None:
        """Measure the prepared gradients before they are clipped."""
        if self._settings.log_num_zeros_in_grad and self.due(iteration):
            self._zeros = megatron_optimizer.count_zero_gradients(self._optimizer.inner, self._model.device)

    def measure_weights(self, iteration: int) -> None:
        """Measure the updated weights, and start to copy all values to the host, without a wait."""
        if (self._weights or self._settings.log_num_zeros_in_grad) and self.due(iteration):
            self._host.copy_(torch.cat([self._squares().double(), self._zeros]), non_blocking=True)

    def take(self, iteration: int) -> dict[str, Any]:
        """Return the values of this iteration as fields of `Step`, after a wait for the device."""
        settings, clock = self._settings, self._model.timers
        clock.collect()
        if not self.due(iteration):
            return {}
        found: dict[str, Any] = {}
        squares = self._read[:-1].tolist()
        if settings.log_params_norm:
            found["params_norm"] = math.sqrt(sum(squares))
        if settings.log_params_norm_per_param:
            found["params_norm_per_param"] = dict(zip(self._names, map(math.sqrt, squares), strict=True))
        if settings.log_num_zeros_in_grad:
            found["num_zeros_in_grad"] = int(self._read[-1])
        if clock.level:
            found["timers"] = timers.range_over_ranks(self._ranks.gather(clock.take()))
        return found

    @torch.no_grad()
    def _squares(self) -> torch.Tensor:
        """Return the squared norms of all weights in the order of the names, equal on every rank."""
        found = torch.zeros(len(self._names), device=self._model.device)
        if not self._names:
            return found
        held = _held_elements(self._optimizer) if self._divided else None
        own = [_norm_share(parameter, held) for parameter in self._parameters.values()]
        if own:
            norms = torch._foreach_norm(own, dtype=torch.float32)
            found.index_copy_(0, self._places, torch.stack(norms).square())
        dist.all_reduce(found)
        return found


def _held_elements(optimizer: ScheduledOptimizer) -> dict[torch.Tensor, range]:
    """Return this rank's elements of the parameters that data-parallel ranks share."""
    found: dict[torch.Tensor, range] = {}
    for inner in optimizer.inner.chained_optimizers:
        if isinstance(inner, ShardedCheckpointOptimizer):
            found |= dict(inner.held())
    return found


def _norm_share(parameter: torch.nn.Parameter, held: dict[torch.Tensor, range] | None) -> torch.Tensor:
    """Return the part of a parameter that this rank adds to the sum over ranks: of the optimizer's weights if it has
    any.

    `held`: this rank's elements of shared parameters; None: they are not shared.
    """
    own: torch.Tensor | None = getattr(parameter, "main_param", None)
    if held is not None:
        if own is not None:
            return own
        elements = held.get(parameter, range(0))
        return parameter.detach().view(-1)[elements.start : elements.stop]
    replica = (
        parallel_state.get_data_parallel_rank(with_context_parallel=True)
        if getattr(parameter, "allreduce", True)
        else parallel_state.get_expert_data_parallel_rank()
    )
    whole = parameter.detach() if own is None else own
    return whole if replica == 0 else whole.new_zeros(0)


class Stragglers:
    """Compares the own time of ranks. All ranks call the same methods at the same iterations.

    Own time excludes waits for other ranks: reading data; both passes until the gradient reduction; the optimizer's
    update; the copy for a save (and its write, if training waits for it). Waits inside a pass between ranks of one
    replica (tensor, context and pipeline parallel) cannot be separated: then all of them are slow. The cost is an
    all-gather of four numbers on the host every 20 steps, and some reads of a clock.
    """

    def __init__(
        self, model: ModelStage, optimizer: ScheduledOptimizer, ranks: Ranks, *, node: str, say: Callable[[str], None]
    ) -> None:
        self._ranks, self._node, self._say = ranks, node, say
        marks = DeviceTimestamps(ranks.device)
        self._timers = {name: Timer(marks, enabled=True) for name in ("forward", "optimizer")}
        self._seconds = dict.fromkeys(STRAGGLER_SECTIONS, 0.0)
        self._steps = 0
        self._found: dict[str, Any] = {}
        """Straggler of the newest comparison; empty without one."""
        self._watch_passes(model)
        self._watch_update(optimizer)

    def _watch_passes(self, model: ModelStage) -> None:
        """Record the time at which the gradient reduction starts."""
        transformer = get_model_config(model.chunks[0])
        reduce = transformer.finalize_model_grads_func

        def arrived(*arguments: Any, **named: Any) -> None:
            self._timers["forward"].stop()
            reduce(*arguments, **named)

        transformer.finalize_model_grads_func = arrived

    def _watch_update(self, optimizer: ScheduledOptimizer) -> None:
        for part in optimizer.inner.chained_optimizers:
            inner = getattr(part, "optimizer", None)
            if isinstance(inner, torch.optim.Optimizer):
                inner.register_step_pre_hook(lambda *_: self._timers["optimizer"].start())
                inner.register_step_post_hook(lambda *_: self._timers["optimizer"].stop())

    def record_read(self, seconds: float) -> None:
        """Record the seconds of reading the batch; both passes start."""
        self._seconds["data"] += seconds
        self._timers["forward"].start()

    def take(self, iteration: int, *, save_seconds: float) -> dict[str, Any]:
        """End a step, after a wait for the device; return fields of `Step`.

        `save_seconds`: this rank's own time in saves since the previous step.
        """
        for section, timer in self._timers.items():
            self._seconds[section] += timer.take() / 1000
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
