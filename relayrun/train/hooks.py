"""Hooks: what looks at training from outside the loop. relayrun's own, a drill's faults, and a user's.

A hook inherits `Hook` and overrides the methods that it needs; the others are never called and cost nothing.

| method | when | ranks |
|---|---|---|
| `setup` | the model is built; nothing is loaded | all |
| `load_state_dict` | a checkpoint has been loaded: at a resume, and in a rewind | all |
| `at_start` | once, before the first step of the attempt | all |
| `before_step` | before the batch of an iteration is read | all |
| `before_update` | gradients are there (reduced, not clipped), and the weights are those of before | all |
| `after_step` | after the update of an iteration, or after it was left out | all |
| `at_rewind` | training went back to a checkpoint, which is loaded | all |
| `state_dict` | a save begins | all; rank 0's is kept |
| `before_publish` | all bytes of a checkpoint are written, and it does not count yet | 0, in the save's thread |
| `after_save` | a checkpoint is durable | all |
| `after_failed_save` | a save did not work; training goes on | all |
| `at_evaluation` | the losses of an evaluation are known | all |
| `at_end` | the attempt leaves, its state is durable; its outcome is not written yet | all |
| `close` | the last thing: the outcome is written, the process groups are gone | all |

Order. At every point relayrun's own hooks come first (timings, guard, metrics, progress.txt, profiler, trackers), then
those of `training.hooks` in the order of that list.

Ranks. All ranks call the same methods at the same points in the same order, in their main thread. So a hook may use
collectives, by all ranks alike; not in `before_publish` and `close`. What one rank alone shall do stands behind
`if context.ranks.rank == 0`.

What a hook may change: nothing of training, if losses shall stay what they are. Model and optimizer are there to be
read; whoever writes them, or draws from the global random generators, has another run, which a resume repeats only if
the hook does the same again. Through `before_update` a hook has a say in what becomes of an iteration.

Errors. What a user's hook raises ends the attempt as failed, with one message that names its import path, the method
and the error: a full disk or a service that is away may be over in the next attempt, and a chain ends by itself after
`chain.max_failed_attempts` without progress. On one rank alone it ends that rank, and the starter of the ranks then
ends the others. In `before_publish` it fails that save, as a full disk does. A FatalTrainingError that rank 0 raises,
or all ranks, ends the chain with its reason; one rank alone stops it by a verdict of `before_update`. The chain ends,
too, on every rank alike, where a hook cannot be imported, is no class that inherits `Hook` or cannot be made with its
options: no other attempt would do better.

Time. What hooks take between steps is in the metrics as `hooks_seconds` and counts for the lead. A hook that takes
longer than `chain.hang_timeout` is a hang.

The heartbeat is no hook: it says what the loop is about to do, and is what a hook that hangs is found by.
Standard library only, because timings are measured before torch is there.
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

if TYPE_CHECKING:  # they import torch and pydantic
    from relayrun.config.compose.schema import RunConfig
    from relayrun.train.distributed import Ranks
    from relayrun.train.model.gpt import ModelStage
    from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer


@dataclass(frozen=True, kw_only=True)
class HookContext:
    """What a hook may see of an attempt."""

    run_dir: Path
    attempt: int
    config: RunConfig
    ranks: Ranks
    """This rank's place; `maximum` and `gather` are collectives over all ranks."""
    model: ModelStage
    """Its parts on this rank are `model.chunks`, which are torch modules."""
    optimizer: ScheduledOptimizer
    say: Callable[[str], None]
    """Write a line to the console, on rank 0."""


@dataclass(frozen=True, kw_only=True)
class StepStart:
    """The iteration that begins."""

    iteration: int
    """Counted from 1."""
    consumed_samples: int
    """Before it, since the beginning of the run."""
    global_batch_size: int
    """Samples that it reads."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """An iteration between its gradients and its update."""

    iteration: int
    loss: float
    """In nats per token: the mean over all tokens of the global batch; the same on every rank."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """That the update will use."""
    consumed_samples: int
    """Before this iteration."""
    global_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one iteration did; a line of metrics.jsonl."""

    iteration: int
    loss: float
    """Mean over all tokens of the global batch, before the update."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """That the update used."""
    consumed_samples: int
    """After this iteration, since the beginning of the run."""
    consumed_tokens: int
    global_batch_size: int
    """Samples of this iteration."""
    tokens_per_second: float
    """Over all ranks."""
    step_seconds: float
    data_seconds: float
    """The part of the step that waited for the batch."""
    forward_backward_seconds: float
    """The part of the step that went to both passes and the reduction of gradients."""
    optimizer_seconds: float
    """The part of the step that went to the norm of the gradients, clipping and the update, until the GPU was done."""
    save_seconds: float
    """That training stood still for saves, or to allocate host memory for them, since the step before; not part of
    the step."""
    model_tflops_per_gpu: float
    """`size.flops_per_token` x tokens per second and rank, in 10^12."""
    mfu: float | None
    """Share of the device's bf16 peak (`size.PEAK_FLOPS`); None where it is not known, or precision is not bf16."""
    memory_bytes: int
    """Peak on rank 0 so far: of the GPU's allocator, or of the process where there is no GPU."""
    time: float
    """Seconds since 1970, at the end of the step."""
    skipped: str | None = None
    """Why its update was left out, in words; None: it was not."""
    hooks_seconds: float | None = None
    """That a user's hooks took since the step before, between the steps; None: the run has none of its own."""
    auxiliary_losses: Mapping[str, float] | None = None
    """What routers to experts add to the loss, by Megatron's names, without their factors: the mean over layers,
    micro-batches and replicas; None: the model has none."""
    memory_allocated_bytes: int | None = None
    """That tensors take now, on rank 0; None: there is no GPU."""
    memory_reserved_bytes: int | None = None
    """That the GPU's allocator holds now, on rank 0, gaps included; None: there is no GPU."""
    memory_max_reserved_bytes: int | None = None
    """The most that the GPU's allocator has held so far, on rank 0; None: there is no GPU."""
    params_norm: float | None = None
    """Norm of all weights after the update. None here and below: `tracking` does not ask for it, or not in this
    iteration."""
    params_norm_per_param: Mapping[str, float] | None = None
    """Norms of the weights, by their names."""
    num_zeros_in_grad: int | None = None
    """Elements of the gradient that are 0, of the whole model."""
    timers: Mapping[str, Mapping[str, float]] | None = None
    """Milliseconds an iteration, since timers were last reported: `min` and `max` over the ranks, by Megatron's
    names."""
    useful_tokens: int | None = None
    """Tokens of text in this iteration's rows. None here and below: no data set has `order: document-window`."""
    padding_share: float | None = None
    """Share of the rows' tokens that is no text."""
    windows_per_row: float | None = None
    """Windows in a row, or parts of windows, on average."""
    slowest_rank_ratio: float | None = None
    """Own time of the slowest rank over the median of its peers', over 20 steps; None: they were not compared now."""
    straggler: Mapping[str, Any] | None = None
    """The slowest rank where that was 1.3 or more when they were last compared, as `rundir.node_health.Straggler` has
    it; None: none was."""


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """What one evaluation gave."""

    iteration: int
    losses: Mapping[str, float]
    """Mean loss in nats per token, by name of the validation set."""
    seconds: float
    """How long it took, all sets together."""


class Action(IntEnum):
    """In the order of gravity: where hooks or ranks differ, the gravest counts."""

    UPDATE = 0
    SKIP = 1
    REWIND = 2
    STOP = 3


@dataclass(frozen=True)
class UpdateVerdict:
    """On one iteration."""

    action: Action
    reason: str | None = None
    """What is wrong with it, in words."""


class Hook:
    """Inherit this, and override what you need. A class of your own is made once per rank and attempt, with the
    `options` of its entry in `training.hooks` as keyword arguments."""

    name: ClassVar[str] = ""
    """The key of this hook's state in checkpoints. A hook of `training.hooks` has its import path instead."""

    may_differ: bool = True
    """Whether `before_update` may decide otherwise on another rank. Then the ranks agree before each update, which
    costs one small all-reduce on the host."""

    def setup(self, context: HookContext) -> None:
        """The model and the optimizer are built, and no checkpoint is loaded yet. Keep `context` for later."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint shall keep of this hook.

        Plain values (None, bool, int, float, str, lists, tuples and dicts of them) and torch tensors; {} keeps
        nothing. It is written at the moment of the call, so it may change while the save goes on. There is one state
        for all ranks, which is rank 0's: a hook whose ranks differ gathers here what it wants to keep.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave for the checkpoint that was loaded; called on every rank.

        A checkpoint that has none, because the hook is new or had kept {}, gives what `state_dict` gave after `setup`.
        Not called where a run begins anew with the weights of another (`checkpoint.finetune`).
        """

    def at_start(self, iteration: int, consumed_samples: int) -> None:
        """The first step of this attempt comes next, with so many iterations and samples behind it."""

    def before_step(self, start: StepStart) -> None:
        """An iteration begins."""

    def before_update(self, gradients: Gradients) -> UpdateVerdict | None:
        """Say what shall become of this iteration; None has no objection.

        The gravest verdict of all hooks and ranks counts, within `training.max_skips` and `max_rewinds`. Gradients lie
        in `main_grad` of the parameters, or with the distributed optimizer this rank's part of them.
        """
        return None

    def after_step(self, step: Step) -> None:
        """An iteration is done; `step.skipped` says if it had no update."""

    def at_rewind(self, rewind: Rollback) -> None:
        """Training went back to the checkpoint of `rewind.base_iteration` and passes over samples."""

    def before_publish(self, iteration: int, folder: Path) -> None:
        """The checkpoint of this iteration lies in `folder` and will count after this call, unless it raises."""

    def after_save(self, commit: CheckpointCommit) -> None:
        """A checkpoint is durable: `commit.path`, of iteration `commit.iteration`. With `checkpoint.async_save`
        training is some iterations further."""

    def after_failed_save(self, iteration: int, error: str) -> None:
        """The save of this iteration did not work."""

    def at_evaluation(self, result: ValidationResult) -> None:
        """An evaluation is over, and training goes on."""

    def at_end(self, outcome: AttemptOutcome) -> None:
        """The attempt leaves with its state durable; not called after a failure."""

    def close(self) -> None:
        """The outcome of the attempt is written; not called after a failure."""


class HookFailed(RelayrunError):
    """A user's hook raised something; the attempt has failed."""
