"""What is measured every `tracking.log_interval` iterations: norms of weights, zeros in gradients, Megatron's timers.

Nothing here waits for the device. Numbers stay on it until they are copied into memory of the host that it writes by
itself; they are read when the iteration has waited for the device anyway, which it does once at its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from relayrun.config.compose.schema import RunConfig
from relayrun.train import timers
from relayrun.train.model.gpt import ModelStage
from relayrun.train.optimizer import gradients
from relayrun.train.optimizer.optimizer import ScheduledOptimizer, ShardedDistributedOptimizer
from relayrun.train.optimizer.parameter_names import parameter_names
from relayrun.train.parallel import Ranks


class IntervalMetrics:
    """The measurements of one attempt on one rank. All ranks call the same methods at the same iterations."""

    def __init__(self, config: RunConfig, model: ModelStage, optimizer: ScheduledOptimizer, ranks: Ranks) -> None:
        settings = self._settings = config.tracking
        self._divided = config.parallel.use_distributed_optimizer
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._weights = settings.log_params_norm or settings.log_params_norm_per_param
        self._parameters = dict(_named_parameters(model)) if self._weights else {}
        self._names: list[str] = []
        if self._weights:
            self._names = sorted({name for names in ranks.gather(list(self._parameters)) for name in names})
        places = {name: place for place, name in enumerate(self._names)}
        self._places = torch.tensor([places[name] for name in self._parameters], device=model.device)
        """Where this rank's parameters stand among those of all ranks."""
        self._zeros = torch.zeros(1, dtype=torch.float64, device=model.device)
        on_gpu = model.device.type == "cuda"
        self._host = torch.zeros(len(self._names) + 1, dtype=torch.float64, pin_memory=on_gpu)
        self._read = self._host.numpy()  # the same memory, which needs no call to be read

    def due(self, iteration: int) -> bool:
        """Whether this iteration is measured."""
        return iteration % self._settings.log_interval == 0

    def of_gradients(self, iteration: int) -> None:
        """Measure what is to be known of the prepared gradients, before they are clipped."""
        if self._settings.log_num_zeros_in_grad and self.due(iteration):
            self._zeros = gradients.count_zero_gradients(self._optimizer.inner, self._model.device)

    def of_weights(self, iteration: int) -> None:
        """Measure the updated weights, and have everything copied to the host. The device is not waited for."""
        if (self._weights or self._settings.log_num_zeros_in_grad) and self.due(iteration):
            found = torch.cat([self._squares().double(), self._zeros])
            self._host.copy_(found, non_blocking=True)

    def take(self, iteration: int) -> dict[str, Any]:
        """Return what was measured in this iteration, as fields of `Step`. The device has been waited for."""
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
        """Squared norms of all weights in the order of the names, the same on every rank."""
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


def _named_parameters(model: ModelStage) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters by names that do not depend on the layout; none that another rank has, too."""
    for parameter, name in parameter_names(model.chunks):
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
            yield name, parameter


def _held_elements(optimizer: ScheduledOptimizer) -> dict[torch.Tensor, range]:
    """The elements that this rank has of the parameters that are divided among the data-parallel ranks."""
    found: dict[torch.Tensor, range] = {}
    for inner in optimizer.inner.chained_optimizers:
        if isinstance(inner, ShardedDistributedOptimizer):
            found |= dict(inner.held())
    return found


def _norm_share(parameter: torch.nn.Parameter, held: dict[torch.Tensor, range] | None) -> torch.Tensor:
    """What this rank adds of a parameter to the sum over all ranks: of the optimizer's own weights, if it has some.

    `held`: the elements that this rank has of divided parameters; None: they are not divided.
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
