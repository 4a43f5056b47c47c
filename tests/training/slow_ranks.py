"""A hook that makes one rank slower in one section: `{section: forward, rank: 1, seconds: 0.05}`."""

from __future__ import annotations

import time
from typing import Any

import torch

from relayrun.tokens.order.batches import BatchReader
from relayrun.train.checkpoint.checkpointer import Checkpointer
from relayrun.train.hooks import Hook, HookContext


def slower(kind: Any, name: str, seconds: float) -> None:
    """Let a method of this class take longer."""
    method = getattr(kind, name)

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return method(*arguments, **named)

    setattr(kind, name, slow)


class Slow(Hook):
    def __init__(self, section: str, rank: int, seconds: float) -> None:
        self._section, self._rank, self._seconds = section, rank, seconds

    def setup(self, context: HookContext) -> None:
        if context.ranks.rank != self._rank:
            return
        if self._section == "data":
            slower(BatchReader, "__next__", self._seconds)
        elif self._section == "save":
            slower(Checkpointer, "_copy", self._seconds)
        elif self._section == "optimizer":
            for part in context.optimizer.inner.chained_optimizers:
                part.optimizer.register_step_pre_hook(lambda *_: time.sleep(self._seconds))
        else:
            context.model.chunks[0].register_forward_pre_hook(self._wait)

    def _wait(self, _module: torch.nn.Module, _inputs: object) -> None:
        time.sleep(self._seconds)
