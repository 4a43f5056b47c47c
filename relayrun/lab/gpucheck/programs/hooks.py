"""Hooks of the check's training runs: interrupt a run at an exact place, record hashes, pace saves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from relayrun.control.rundir.records import AttemptOutcome, CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.files import append_line, read_json_lines
from relayrun.lab.gpucheck.setup import DIGESTS_FILE
from relayrun.train.hooks import Gradients, Hook, HookContext, Step
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer
from relayrun.train.reporting import liveness


class SignalSelfHook(Hook):
    """Ends a start of the ranks by a signal that they send themselves, at an exact place of an iteration.

    A signal from outside would arrive at a different place each time.
    """

    may_differ = False

    def __init__(self, cuts: list[dict[str, Any]]) -> None:
        """`cuts`: one for each start of the ranks (attempt or restart), in order; later starts run undisturbed.

        `{signal: SIGUSR2, iteration: 5}` acts after an iteration; `{signal: SIGKILL, saves: 1}` after one with that
        many durable saves; with `before_update: true` once its gradients are there. `rank: 0`: that rank alone.
        """
        self._cuts = cuts

    def setup(self, context: HookContext) -> None:
        number = context.attempt - 1 + liveness.restart_number() - 1
        cut = self._cuts[number] if number < len(self._cuts) else None
        self._cut = cut if cut is not None and cut.get("rank", context.ranks.rank) == context.ranks.rank else None
        self._saves = 0

    def after_save(self, commit: CheckpointCommit) -> None:
        self._saves += 1

    def before_update(self, gradients: Gradients) -> None:
        self._reached(gradients.iteration, before_update=True)

    def after_step(self, step: Step) -> None:
        self._reached(step.iteration, before_update=False)

    def _reached(self, iteration: int, *, before_update: bool) -> None:
        cut = self._cut
        if cut is None or bool(cut.get("before_update")) != before_update:
            return
        if iteration >= cut.get("iteration", 0) and self._saves >= cut.get("saves", 0):
            self._cut = None
            os.kill(os.getpid(), signal.Signals[cut["signal"]])


class DigestHook(Hook):
    """Records hashes of the optimizer state, loaded and after every iteration, and of the final weights.

    A loss does not show every bit: a wrong moment may be rounded away in later iterations. Weights are only hashed at
    the end: they follow from the optimizer's fp32 copy, and an overlapped gather completes them in the next forward
    pass.
    """

    def setup(self, context: HookContext) -> None:
        self._context = context

    def at_start(self, iteration: int, consumed_samples: int) -> None:
        if iteration:
            self._note("loaded", iteration, _optimizer_tensors(self._context.optimizer))

    def after_step(self, step: Step) -> None:
        self._note("state", step.iteration, _optimizer_tensors(self._context.optimizer))

    def at_end(self, outcome: AttemptOutcome) -> None:
        named = (sorted(chunk.named_parameters()) for chunk in self._context.model.chunks)
        self._note("weights", outcome.iteration, (parameter for chunk in named for _, parameter in chunk))

    def _note(self, kind: str, iteration: int, tensors: Iterator[torch.Tensor]) -> None:
        found = xxhash.xxh3_128()
        for tensor in tensors:
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        every = self._context.ranks.gather(found.hexdigest())
        if self._context.ranks.rank == 0:
            record = {"attempt": self._context.attempt, "kind": kind, "iteration": iteration, "ranks": every}
            append_line(Path(self._context.run_dir) / DIGESTS_FILE, record, durable=False)


def _optimizer_tensors(optimizer: ScheduledOptimizer) -> Iterator[torch.Tensor]:
    for part in getattr(optimizer.inner, "chained_optimizers", [optimizer.inner]):
        if getattr(part, "is_stub_optimizer", False):
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                state = part.optimizer.state[parameter]
                yield from (state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor))


class SavePaceHook(Hook):
    """Delays training until the previous save is durable before the next is due, so that no save waits for another."""

    def __init__(self, interval: int, seconds: float = 120.0) -> None:
        """`interval`: `checkpoint.interval`. `seconds`: time limit of a wait."""
        self._interval, self._seconds = interval, seconds

    def setup(self, context: HookContext) -> None:
        self._commits = Run(context.run_dir).attempt(context.attempt).commits
        self._due: int | None = None

    def after_step(self, step: Step) -> None:
        if step.iteration % self._interval == 0:
            self._due = step.iteration
        elif self._due is not None and step.iteration % self._interval == self._interval - 1:
            end = time.monotonic() + self._seconds
            while not self._durable(self._due) and time.monotonic() < end:
                time.sleep(0.05)

    def _durable(self, iteration: int) -> bool:
        return any(line.get("iteration") == iteration for line in read_json_lines(self._commits))
