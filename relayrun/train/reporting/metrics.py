"""What a run measures: a line per iteration in the attempt's metrics.jsonl, and now and then one on the console.

Rank 0 writes. Lines of an iteration hold the fields of `Step`; those of an evaluation `iteration, validation,
perplexity, evaluation_seconds, time`, where `validation` maps the name of a set to its loss, and `perplexity` to e to
the loss. Floats have full precision (Python's
repr), losses are in nats per token. A line is not synced to disk when it is written. Those before a state from which
training may go on are, checkpoint or copy on another node: the record is never behind the state. Losing later ones
with a node costs nothing, since their iterations are computed again.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.rewinds import Rollback
from relayrun.files import append_line, sync_data
from relayrun.train.hooks import Hook, Step, ValidationResult

if TYPE_CHECKING:  # it imports torch
    from relayrun.train.parallel import Ranks

FIELDS_ALWAYS_WRITTEN = ("mfu", "skipped")
"""Fields that every line has, null where there is no value; others are left out then."""

LARGEST_PERPLEXITY_LOSS = 20.0
"""Losses above it, in nats, have the perplexity of this one, as Megatron-LM shows it."""

CONSOLE_INTERVAL = 10
"""Iterations between lines on the console."""


class Metrics(Hook):
    """Writes them; does nothing on ranks other than 0."""

    def __init__(self, attempt: Attempt, ranks: Ranks, *, total_steps: int) -> None:
        self._attempt = attempt
        self._active = ranks.rank == 0
        self._total_steps = total_steps
        self._started = time.monotonic()
        self._steps = 0
        self._unwritten: list[tuple[Path, dict[str, Any]]] = []

    def after_step(self, step: Step) -> None:
        if not self._active:
            return
        record = {
            name: value for name, value in asdict(step).items() if value is not None or name in FIELDS_ALWAYS_WRITTEN
        }
        self._write(self._attempt.metrics, record)
        self._steps += 1
        if self._steps == 1 or step.iteration % CONSOLE_INTERVAL == 0 or step.iteration == self._total_steps:
            self.say(
                f"iteration {step.iteration:>7}/{self._total_steps} | loss {step.loss:.4f} | "
                f"grad norm {step.grad_norm:.3f} | lr {step.lr:.3e} | {step.tokens_per_second:,.0f} tokens/s"
            )

    def at_rewind(self, rewind: Rollback) -> None:
        """Lines before this one, of iterations above its own, count no more."""
        if self._active:
            self._write(self._attempt.metrics, {"iteration": rewind.base_iteration, "rewind": asdict(rewind)})

    def at_evaluation(self, result: ValidationResult) -> None:
        if not self._active:
            return
        record = {
            "iteration": result.iteration,
            "validation": dict(result.losses),
            "perplexity": {name: math.exp(min(LARGEST_PERPLEXITY_LOSS, loss)) for name, loss in result.losses.items()},
            "evaluation_seconds": result.seconds,
            "time": time.time(),
        }
        self._write(self._attempt.metrics, record)
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in result.losses.items())
        self.say(f"iteration {result.iteration:>7} | validation: {losses}")

    def after_save(self, commit: CheckpointCommit) -> None:
        self.say(f"saved iteration {commit.iteration} in {commit.seconds:.1f} s: {commit.path}")

    def after_failed_save(self, iteration: int, error: str) -> None:
        """A save that did not work, and why: loud, and on record for `relayrun status`."""
        if not self._active:
            return
        self.say(f"SAVE FAILED at iteration {iteration}: {error}")
        self._write(self._attempt.failed_saves, {"iteration": iteration, "error": error, "time": time.time()})

    def _write(self, path: Path, record: dict[str, Any]) -> None:
        """Append a line. On a full disk training goes on, and the lines are kept until there is room."""
        self._unwritten.append((path, record))
        try:
            while self._unwritten:
                path, record = self._unwritten[0]
                append_line(path, record, durable=False)
                self._unwritten.pop(0)
        except OSError as error:
            self.say(f"warning: {len(self._unwritten)} lines of {path.name} not written: {error}")

    def sync(self) -> None:
        """Have the lines so far on disk, before a state of theirs counts on another node."""
        if not self._active:
            return
        try:
            sync_data(self._attempt.metrics)
        except OSError as error:
            self.say(f"warning: {self._attempt.metrics.name} is not synced to disk: {error}")

    def say(self, text: str) -> None:
        """A line on the console, with the time since the start of this program."""
        if self._active:
            minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
            print(f"[{minutes // 60:02}:{minutes % 60:02}:{seconds:02}] {text}", flush=True)
