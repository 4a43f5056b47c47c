"""Faults inside the ranks, injected by a hook that only drills set.

    training:
      hooks: [{hook: "relayrun.lab.faults.injection:FaultInjectionHook", options: {faults: "FAULT[,FAULT...]"}}]

| fault | effect |
|---|---|
| step-delay=S | every step takes S seconds longer |
| slow-after=K:S | after K steps of an attempt every step takes S seconds longer |
| crash-at=I | an exception after iteration I, on every rank, in the first attempt |
| crash-at-once | an exception before the first step, in every attempt |
| sleep-at=I:R | rank R sleeps for ever after iteration I of the first attempt, while the others wait in a collective |
| publish-delay=S | S seconds between the last byte of a checkpoint and its publication, in the first attempt |
| commit-full=N | the first N commits of the first attempt find no space on the disk |
| slow-save=I:S | the save at iteration I takes S seconds longer |
| nan-sample=K | the loss of every global batch with sample K is NaN on the last rank |
| spike-sample=K:F | the loss of such a batch is F times as high on all ranks |
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

from relayrun.control.rundir.attempt import Attempt
from relayrun.train.hooks import Hook, HookContext, Step, StepStart

KNOWN_FAULTS = {
    "step-delay",
    "slow-after",
    "crash-at",
    "crash-at-once",
    "sleep-at",
    "publish-delay",
    "commit-full",
    "slow-save",
    "nan-sample",
    "spike-sample",
}


def fail_opens(times: int, path: Path) -> None:
    """Let opening the file fail with ENOSPC in this process, `times` times."""
    left = times

    def look(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if left and event == "open" and str(arguments[0]) == str(path) and arguments[2] & os.O_APPEND:  # type: ignore[operator]
            left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    sys.addaudithook(look)


class FaultInjectionHook(Hook):
    """The faults of one attempt on one rank."""

    def __init__(self, faults: str) -> None:
        """`faults`: names of the table, separated by commas. Raises ValueError for an unknown name."""
        self._faults = dict(fault.partition("=")[::2] for fault in faults.split(",") if fault)
        if unknown := self._faults.keys() - KNOWN_FAULTS:
            raise ValueError(f"unknown faults: {', '.join(sorted(unknown))}")
        self._factor = 1.0
        """Factor on the losses of this iteration."""
        self._steps = 0
        """Steps that this attempt has begun."""

    def setup(self, context: HookContext) -> None:
        self._first_attempt = context.attempt == 1
        self._rank, self._last_rank = context.ranks.rank, context.ranks.world_size - 1
        if self._first_attempt and self._rank == 0 and (times := int(self._faults.get("commit-full", 0))):
            fail_opens(times, Attempt(f"{context.run_dir}/attempts/0001").commits)
        if context.ranks.is_last_stage and self._faults.keys() & {"nan-sample", "spike-sample"}:
            context.model.chunks[-1].register_forward_hook(self._change_loss)

    def before_step(self, start: StepStart) -> None:
        faults, done = self._faults, start.iteration - 1
        time.sleep(float(faults.get("step-delay", 0)))
        steps, _, seconds = faults.get("slow-after", "").partition(":")
        if steps and self._steps >= int(steps):
            time.sleep(float(seconds))
        self._steps += 1
        if "crash-at-once" in faults or (self._first_attempt and faults.get("crash-at") == str(done)):
            raise RuntimeError("a fault that the drill put here")
        if self._first_attempt and faults.get("sleep-at") == f"{done}:{self._rank}":
            time.sleep(10_000)
        batch = range(start.consumed_samples, start.consumed_samples + start.global_batch_size)
        if self._rank == self._last_rank and int(faults.get("nan-sample", -1)) in batch:
            self._factor = float("nan")
        sample, _, times = faults.get("spike-sample", "-1").partition(":")
        if int(sample) in batch:
            self._factor = float(times)

    def after_step(self, step: Step) -> None:
        self._factor = 1.0

    def before_publish(self, iteration: int, folder: Path) -> None:
        at, _, seconds = self._faults.get("slow-save", "").partition(":")
        if at == str(iteration):
            time.sleep(float(seconds))
        if self._first_attempt:
            time.sleep(float(self._faults.get("publish-delay", 0)))

    def _change_loss(self, _module: object, _inputs: object, losses: Any) -> Any:
        """Multiply the losses; a forward hook of the last model chunk."""
        return losses if self._factor == 1.0 else losses * self._factor
