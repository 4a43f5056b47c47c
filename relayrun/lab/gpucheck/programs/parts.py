"""A hook that says where the time of an iteration goes, by CUDA events: the queue of the GPU, not the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any

import torch

from relayrun.lab.gpucheck.programs.common import cuda_event
from relayrun.lab.gpucheck.programs.hooks import write_note
from relayrun.train.hooks import Gradients, Hook, HookContext, Step, StepStart
from relayrun.train.parallel import Ranks

STEP_PARTS = ("before", "forward", "backward", "gradient_sync", "gradient_norm", "update")
"""What an iteration is made of, in its order. before: the batch is read and gradients are forgotten. forward and
backward: of all micro-batches, without the sync. gradient_sync: what the last backward pass leaves of it, and the loss
is summed over the ranks. gradient_norm: gradients are unscaled and their norm is taken. update: clipping, and Adam."""


class StepPartsHook(Hook):
    """Notes the seconds of each part of the iterations from `first` to `last`; does nothing in the others."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last

    def setup(self, context: HookContext) -> None:
        self._context, self._clock = context, _clock_for(context.ranks)
        self._marks: list[tuple[str, Any]] | None = None
        for chunk in context.model.chunks:
            chunk.register_forward_pre_hook(lambda *_: self._mark("forward"))
            chunk.register_forward_hook(lambda *_: self._mark("backward"))
        configs = {id(chunk.config): chunk.config for chunk in context.model.chunks}
        for config in configs.values():
            if config.finalize_model_grads_func is not None:
                config.finalize_model_grads_func = self._before(config.finalize_model_grads_func)

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._mark("gradient_sync")
            result = function(*args, **kwargs)
            self._mark("gradient_norm")
            return result

        return marked

    def _mark(self, part: str) -> None:
        """From here on it is this part."""
        if self._marks is not None:
            self._marks.append((part, self._clock.now()))

    def before_step(self, start: StepStart) -> None:
        self._marks = [] if self._first <= start.iteration <= self._last else None
        self._mark("before")

    def before_update(self, gradients: Gradients) -> None:
        self._mark("update")

    def after_step(self, step: Step) -> None:
        if self._marks is None:
            return
        self._mark("end")
        marks, self._marks = self._marks, None
        self._clock.wait()
        seconds = dict.fromkeys(STEP_PARTS, 0.0)
        for (part, begin), (_, end) in pairwise(marks):
            seconds[part] += self._clock.between(begin, end)
        if self._context.ranks.rank == 0:
            record = {"iteration": step.iteration, "seconds": seconds, "total": sum(seconds.values())}
            write_note(self._context, "parts", record)


class _GpuClock:
    """The clock of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        mark = cuda_event()
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000


class _HostClock:
    """The clock of a CPU, which has done what it was told when it answers."""

    def now(self) -> Any:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def between(self, begin: Any, end: Any) -> float:
        return float(end - begin)


def _clock_for(ranks: Ranks) -> _GpuClock | _HostClock:
    return _GpuClock(ranks.device) if ranks.device.type == "cuda" else _HostClock()
