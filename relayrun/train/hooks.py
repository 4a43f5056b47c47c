"""Hooks observe training from outside the loop: relayrun's own, injected faults of a drill, and a user's.

A hook overrides the methods of `Hook` that it needs, whose docstrings say when they are called; the others cost
nothing. relayrun's hooks come first (timings, guard, metrics, progress.txt, profiler, trackers), then `training.hooks`
in the order of that list. All ranks call the same methods in the same order, in the main thread, and may use
collectives there; exceptions are noted. A hook that writes model or optimizer, or draws from the global random
generators, changes the run, and a resume repeats that only if the hook does the same again.

An exception of a user's hook fails the attempt, with a message that names import path, method and error; the next
attempt may succeed, and the chain ends after `chain.max_failed_attempts` without progress. On one rank alone it ends
that rank, and the others are then ended. FatalTrainingError on rank 0, or on all ranks, ends the chain with its reason;
a single rank stops the chain by a verdict of `before_update`. A hook that cannot be imported, does not inherit `Hook`,
or rejects its options ends the chain on every rank: no other attempt would do better.

Time between steps is `hooks_seconds` in the metrics and counts for the grace period; a hook that takes longer than
`chain.hang_timeout` is a hang. The heartbeat is not a hook, so it identifies a hook that hangs. Standard library only,
because timings are measured before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from relayrun.control.rundir.records import AttemptOutcome, CheckpointCommit
from relayrun.control.rundir.restarts import Rollback
from relayrun.errors import RelayrunError

if TYPE_CHECKING:  # these modules import torch and pydantic
    from relayrun.config.compose.schema import RunConfig
    from relayrun.train.distributed import Ranks
    from relayrun.train.model.gpt import ModelStage
    from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer


@dataclass(frozen=True, kw_only=True)
class HookContext:
    """The parts of an attempt that a hook may read."""

    run_dir: Path
    attempt: int
    config: RunConfig
    ranks: Ranks
    """Position of this rank; `maximum` and `gather` are collectives over all ranks."""
    model: ModelStage
    """Its parts on this rank are `model.chunks`, which are torch modules."""
    optimizer: ScheduledOptimizer
    say: Callable[[str], None]
    """Write a line to the console, on rank 0."""


@dataclass(frozen=True, kw_only=True)
class StepStart:
    """An iteration that begins."""

    iteration: int
    """Counted from 1."""
    consumed_samples: int
    """Samples since the beginning of the run, before this iteration."""
    global_batch_size: int
    """Samples of this iteration."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """An iteration between its gradients and its update."""

    iteration: int
    loss: float
    """Nats per token: the mean over all tokens of the global batch; the same on every rank."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of the update."""
    consumed_samples: int
    """Before this iteration."""
    global_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """Measurements of one iteration; a line of metrics.jsonl."""

    iteration: int
    loss: float
    """Mean over all tokens of the global batch, before the update."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of the update."""
    consumed_samples: int
    """Samples since the beginning of the run, after this iteration."""
    consumed_tokens: int
    global_batch_size: int
    """Samples of this iteration."""
    tokens_per_second: float
    """Over all ranks."""
    step_seconds: float
    data_seconds: float
    """Wait for the batch; part of `step_seconds`."""
    forward_backward_seconds: float
    """Forward and backward passes and the reduction of gradients; part of `step_seconds`."""
    optimizer_seconds: float
    """Gradient norm, clipping and update, until the GPU is done; part of `step_seconds`."""
    save_seconds: float
    """Time since the previous step that training waited for saves or their host memory; not part of `step_seconds`."""
    model_tflops_per_gpu: float
    """`size.flops_per_token` x tokens per second and rank, in 10^12."""
    mfu: float | None
    """Fraction of the device's bf16 peak (`size.PEAK_FLOPS`); None for an unknown peak or another precision."""
    memory_bytes: int
    """Peak on rank 0 so far: of the GPU's allocator, or of the process without a GPU."""
    time: float
    """Seconds since 1970, at the end of the step."""
    skipped: str | None = None
    """Reason why the update was skipped; None if it was not."""
    hooks_seconds: float | None = None
    """Time of a user's hooks between this step and the previous one; None without such hooks."""
    auxiliary_losses: Mapping[str, float] | None = None
    """Losses of expert routers by Megatron's names, without their factors: means over layers, micro-batches and
    replicas; None without such losses."""
    memory_allocated_bytes: int | None = None
    """Bytes of tensors now, on rank 0; None without a GPU."""
    memory_reserved_bytes: int | None = None
    """Bytes that the GPU's allocator holds now, gaps included, on rank 0; None without a GPU."""
    memory_max_reserved_bytes: int | None = None
    """Peak of `memory_reserved_bytes` so far, on rank 0; None without a GPU."""
    params_norm: float | None = None
    """Norm of all weights after the update. None here and below: not requested by `tracking` in this iteration."""
    params_norm_per_param: Mapping[str, float] | None = None
    """Norms of the weights by name."""
    num_zeros_in_grad: int | None = None
    """Number of zero elements in the gradient of the whole model."""
    timers: Mapping[str, Mapping[str, float]] | None = None
    """Milliseconds per iteration since the last report: `min` and `max` over the ranks, by Megatron's names."""
    useful_tokens: int | None = None
    """Text tokens in the rows of this iteration. None here and below: no data set has `order: document-window`."""
    padding_share: float | None = None
    """Fraction of the tokens that are padding."""
    windows_per_row: float | None = None
    """Mean number of windows, or parts of windows, in a row."""
    slowest_rank_ratio: float | None = None
    """Own time of the slowest rank over the median of its peers, over 20 steps; None if ranks were not compared now."""
    straggler: Mapping[str, Any] | None = None
    """The slowest rank if its ratio was 1.3 or more at the last comparison, with the fields of
    `rundir.node_health.Straggler`; else None."""


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """Result of one evaluation."""

    iteration: int
    losses: Mapping[str, float]
    """Mean loss in nats per token, by name of the validation set."""
    seconds: float
    """Duration over all sets."""


class Action(IntEnum):
    """Actions by severity: if hooks or ranks differ, the most severe applies."""

    UPDATE = 0
    SKIP = 1
    ROLLBACK = 2
    STOP = 3


@dataclass(frozen=True)
class UpdateVerdict:
    """Decision about one iteration."""

    action: Action
    reason: str | None = None
    """The fault of the iteration, in words."""


class Hook:
    """Base class of hooks; override the methods you need. A class of `training.hooks` is instantiated once per rank and
    attempt, with the `options` of its entry as keyword arguments."""

    name: ClassVar[str] = ""
    """Key of this hook's state in checkpoints. A hook of `training.hooks` has its import path instead."""

    may_differ: bool = True
    """True if `before_update` may return different verdicts on different ranks. The ranks then agree before each
    update, by one small all-reduce on the host."""

    def setup(self, context: HookContext) -> None:
        """Called when model and optimizer are built, before a checkpoint is loaded. Keep `context` for later."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps of this hook; called when a save begins.

        Plain values (None, bool, int, float, str, lists, tuples and dicts of them) and torch tensors; {} keeps nothing.
        The state is written during the call, so it may change while the save continues. Rank 0's state is kept for all
        ranks: a hook whose ranks differ gathers here.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the loaded checkpoint; called on every rank, at a resume and in a rollback.

        If the checkpoint has no state of this hook, `state` is what `state_dict` returned after `setup`. Not called if
        a run starts from the weights of another run (`checkpoint.finetune`).
        """

    def at_start(self, iteration: int, consumed_samples: int) -> None:
        """Called before the first step of this attempt, with the iterations and samples done so far."""

    def before_step(self, start: StepStart) -> None:
        """Called before the batch of an iteration is read."""

    def before_update(self, gradients: Gradients) -> UpdateVerdict | None:
        """Return a verdict on this iteration, whose gradients are reduced, not clipped; None does not object.

        The most severe verdict of all hooks and ranks applies, within `training.max_skips` and `max_rollbacks`.
        Gradients are in `main_grad` of the parameters, or, with the distributed optimizer, this rank's part of them.
        """
        return None

    def after_step(self, step: Step) -> None:
        """Called after an iteration; `step.skipped` is set if it had no update."""

    def at_rollback(self, rollback: Rollback) -> None:
        """Called after a rollback to the checkpoint of `rollback.base_iteration`; samples after it are skipped."""

    def before_publish(self, iteration: int, folder: Path) -> None:
        """Called on rank 0, in the save thread, when all bytes of a checkpoint are in `folder`; it counts after this
        call, and an exception fails the save. No collectives."""

    def after_save(self, commit: CheckpointCommit) -> None:
        """Called when a checkpoint is durable: `commit.path`, of iteration `commit.iteration`. With
        `checkpoint.async_save` training is some iterations further."""

    def after_failed_save(self, iteration: int, error: str) -> None:
        """Called after a save of this iteration failed."""

    def at_evaluation(self, result: ValidationResult) -> None:
        """Called after an evaluation."""

    def at_end(self, outcome: AttemptOutcome) -> None:
        """Called when the attempt leaves with a durable state, before its outcome is written; not after a failure."""

    def close(self) -> None:
        """Called last, after the outcome is written and the process groups are destroyed; not called after a failure.
        No collectives."""


class HookFailed(RelayrunError):
    """A user's hook raised an error; the attempt has failed."""
