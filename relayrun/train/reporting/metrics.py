"""Metrics of a run: metrics.jsonl, console lines, progress.txt; norms, timers and slow ranks (stragglers).

Rank 0 writes. A line of an iteration has the fields of `Step`; a line of an evaluation `iteration, validation,
perplexity, evaluation_seconds, time`, where `validation` maps the name of a set to its loss in nats per token, and
`perplexity` to e to the loss. Floats have full precision (Python's repr). Lines are not synced when they are written,
but before a checkpoint, or a copy on another node, counts: the record is never behind the state. Later lines lost with
a node are computed again.

Nothing here waits for the device: values are copied to the host asynchronously, and read at the end of the iteration,
when the device has been waited for. GPU times are events.

progress.txt has fields separated by tabs: local time, `Job ID: N`, `# GPUs: N`, then `Starting job`, or `Saved
checkpoint`, `Iteration: N`, `Job throughput: X TFLOP/s/GPU`, `Cumulative throughput: X TFLOP/s/GPU`, `Floating-point
operations: X` and `Tokens (in billions): X`. The job's throughput counts from its start, with waits and saves; the
cumulative one from the start of the first of the latest jobs with equally many ranks, with the time in the queue.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_model_config

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.node_health import (
    STRAGGLER_RATIO,
    STRAGGLER_SECTIONS,
    STRAGGLER_WINDOW,
    Straggler,
    slowest_rank,
)
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.restarts import Rollback
from relayrun.files import append_line, sync_data
from relayrun.train import timers
from relayrun.train.distributed import Ranks
from relayrun.train.hooks import Hook, Step, ValidationResult
from relayrun.train.model.gpt import ModelStage
from relayrun.train.optimizer import megatron_optimizer
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer, ShardedDistributedOptimizer
from relayrun.train.optimizer.parameter_groups import parameter_names
from relayrun.train.timers import DeviceTimestamps, Timestamp


class IntervalMetrics:
    """Norms, zeros and timers of one attempt on one rank. All ranks call the same methods at the same iterations."""

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
        """Index of each of this rank's parameters among those of all ranks."""
        self._zeros = torch.zeros(1, dtype=torch.float64, device=model.device)
        on_gpu = model.device.type == "cuda"
        self._host = torch.zeros(len(self._names) + 1, dtype=torch.float64, pin_memory=on_gpu)
        self._read = self._host.numpy()  # shares the memory; reads need no call of torch

    def due(self, iteration: int) -> bool:
        """True if this iteration is measured."""
        return iteration % self._settings.log_interval == 0

    def of_gradients(self, iteration: int) -> None:
        """Measure the prepared gradients before they are clipped."""
        if self._settings.log_num_zeros_in_grad and self.due(iteration):
            self._zeros = megatron_optimizer.count_zero_gradients(self._optimizer.inner, self._model.device)

    def of_weights(self, iteration: int) -> None:
        """Measure the updated weights, and start to copy all values to the host, without a wait."""
        if (self._weights or self._settings.log_num_zeros_in_grad) and self.due(iteration):
            found = torch.cat([self._squares().double(), self._zeros])
            self._host.copy_(found, non_blocking=True)

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


def _named_parameters(model: ModelStage) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield this rank's parameters by layout-independent names, without duplicates of other ranks."""
    for parameter, name in parameter_names(model.chunks):
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
            yield name, parameter


def _held_elements(optimizer: ScheduledOptimizer) -> dict[torch.Tensor, range]:
    """Return this rank's elements of the parameters that data-parallel ranks share."""
    found: dict[torch.Tensor, range] = {}
    for inner in optimizer.inner.chained_optimizers:
        if isinstance(inner, ShardedDistributedOptimizer):
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

    def at_rewind(self, rewind: Rollback) -> None:
        """Write a line that voids earlier lines of later iterations."""
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


log = logging.getLogger(__name__)

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
        """Return the start of the first of the latest jobs with equally many ranks (seconds since 1970), and the work
        before it."""
        first: tuple[float, float] | None = None
        done = 0.0
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        for line in lines:
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
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(
                    f"{datetime.fromtimestamp(time.time()).strftime(PROGRESS_TIME_FORMAT)}\t{self._head}\t{text}\n"
                )
        except OSError as error:
            log.warning("%s not written: %s", self._path.name, error)


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
        self._marks = DeviceTimestamps(ranks.device)
        self._begun: Timestamp | None = None
        self._pairs: dict[str, list[tuple[Timestamp, Timestamp]]] = {"forward": [], "optimizer": []}
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
        """Record the seconds of reading the batch; both passes start."""
        self._seconds["data"] += seconds
        self._begin()

    def _begin(self) -> None:
        self._begun = self._marks.now()

    def _end(self, section: str) -> None:
        if self._begun is not None:
            self._pairs[section].append((self._begun, self._marks.now()))
            self._begun = None

    def take(self, iteration: int, *, save_seconds: float) -> dict[str, Any]:
        """End a step, after a wait for the device; return fields of `Step`.

        `save_seconds`: this rank's own time in saves since the previous step.
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
