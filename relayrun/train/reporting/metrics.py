"""Metrics of a run as files and console lines: metrics.jsonl and progress.txt. Rank 0 writes.

A line of an iteration has the fields of `Step`; a line of an evaluation `iteration, validation, perplexity,
evaluation_seconds, time`, where `validation` maps the name of a set to its loss in nats per token, and `perplexity` to
e to the loss. Floats have full precision (Python's repr). Lines are not synced when they are written, but before a
checkpoint, or a copy on another node, counts: the record is never behind the state. Later lines lost with a node are
computed again.

progress.txt has fields separated by tabs: local time, `Job ID: N`, `# GPUs: N`, then `Starting job`, or `Saved
checkpoint`, `Iteration: N`, `Job throughput: X TFLOP/s/GPU`, `Cumulative throughput: X TFLOP/s/GPU`, `Floating-point
operations: X` and `Tokens (in billions): X`. The job's throughput counts from its start, with waits and saves; the
cumulative one from the start of the first of the latest jobs with equally many ranks, with the time in the queue.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.restarts import Rollback
from relayrun.errors import warned
from relayrun.files import append_line, readable_text, sync_data
from relayrun.train.hooks import Hook, Step, ValidationResult

if TYPE_CHECKING:
    from relayrun.train.distributed import Ranks

log = logging.getLogger(__name__)

FIELDS_ALWAYS_WRITTEN = ("mfu", "skipped")
"""Fields that every line has, null without a value; other fields are then omitted."""

LARGEST_PERPLEXITY_LOSS = 20.0
"""Largest loss in nats for perplexity; higher losses have its perplexity, as in Megatron-LM."""

CONSOLE_INTERVAL = 10
"""Iterations between console lines."""


class Metrics(Hook):
    """Writes metrics.jsonl and console lines on rank 0; does nothing on other ranks."""

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

    def at_rollback(self, rollback: Rollback) -> None:
        """Write a line that voids earlier lines of later iterations."""
        if self._active:
            self._write(self._attempt.metrics, {"iteration": rollback.base_iteration, "rollback": asdict(rollback)})

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
        """Report a failed save, and record it for `relayrun status`."""
        if not self._active:
            return
        self.say(f"SAVE FAILED at iteration {iteration}: {error}")
        self._write(self._attempt.failed_saves, {"iteration": iteration, "error": error, "time": time.time()})

    def _write(self, path: Path, record: dict[str, Any]) -> None:
        """Append a line. If the disk is full, training continues, and lines are kept until there is room."""
        self._unwritten.append((path, record))
        try:
            while self._unwritten:
                path, record = self._unwritten[0]
                append_line(path, record, durable=False)
                self._unwritten.pop(0)
        except OSError as error:
            self.say(f"warning: {len(self._unwritten)} lines of {path.name} not written: {error}")

    def sync(self) -> None:
        """Sync the lines to disk, before a state of these iterations counts on another node."""
        if not self._active:
            return
        try:
            sync_data(self._attempt.metrics)
        except OSError as error:
            self.say(f"warning: {self._attempt.metrics.name} is not synced to disk: {error}")

    def say(self, text: str) -> None:
        """Print a line with the time since the start of this program."""
        if self._active:
            minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
            print(f"[{minutes // 60:02}:{minutes % 60:02}:{seconds:02}] {text}", flush=True)


PROGRESS_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


class ProgressLog(Hook):
    """Appends to progress.txt on rank 0; a full disk costs only lines."""

    def __init__(self, path: Path, *, job_id: str, ranks: int, flops_per_token: float, seq_length: int) -> None:
        self._path = path
        self._head = f"Job ID: {job_id}\t# GPUs: {ranks}"
        self._ranks = ranks
        self._seq_length = seq_length
        self._flops_per_token = flops_per_token
        self._began = self._first_start = time.time()
        self._flops_at_start = self._flops_at_first_start = 0.0

    def at_start(self, iteration: int, consumed_samples: int) -> None:
        """Write the start of the job after `consumed_samples`."""
        self._began = time.time()  # without loading the checkpoint
        self._flops_at_start = self._flops(consumed_samples)
        self._first_start, self._flops_at_first_start = self._first_in_a_row()
        self._append("Starting job")

    def after_save(self, commit: CheckpointCommit) -> None:
        consumed_samples = commit.consumed_samples
        now, flops = time.time(), self._flops(consumed_samples)
        job = (flops - self._flops_at_start) / max(now - self._began, 1e-9) / self._ranks / 1e12
        cumulative = (flops - self._flops_at_first_start) / max(now - self._first_start, 1e-9) / self._ranks / 1e12
        self._append(
            f"Saved checkpoint\tIteration: {commit.iteration}\tJob throughput: {job:.1f} TFLOP/s/GPU\t"
            f"Cumulative throughput: {cumulative:.1f} TFLOP/s/GPU\tFloating-point operations: {flops:.2e}\t"
            f"Tokens (in billions): {consumed_samples * self._seq_length / 1e9:.2f}"
        )

    def _flops(self, consumed_samples: int) -> float:
        return consumed_samples * self._seq_length * self._flops_per_token

    def _first_in_a_row(self) -> tuple[float, float]:
        """Return the start (seconds since 1970) of the first of the latest jobs with equally many ranks, and the work
        before it."""
        first: tuple[float, float] | None = None
        done = 0.0
        for line in readable_text(self._path).splitlines():
            fields = line.split("\t")
            try:
                same = int(fields[2].removeprefix("# GPUs: ")) == self._ranks
                if fields[3] == "Saved checkpoint":
                    done = float(fields[7].removeprefix("Floating-point operations: "))
                elif not same:
                    first = None
                elif first is None:
                    first = datetime.strptime(fields[0], PROGRESS_TIME_FORMAT).timestamp(), done
            except (IndexError, ValueError):  # a torn line
                continue
        return first or (self._began, self._flops_at_start)

    def _append(self, text: str) -> None:
        with warned(log, "%s not written", self._path.name), self._path.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.fromtimestamp(time.time()):{PROGRESS_TIME_FORMAT}}\t{self._head}\t{text}\n")
