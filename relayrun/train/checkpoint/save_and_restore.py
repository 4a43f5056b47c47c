"""Decides when an attempt saves, and which state it starts from: copies in memory, or the newest intact checkpoint.

With `checkpoint.async_save` training waits for a save only while its parts are listed; they are copied beside the next
forward and backward pass and written beside later steps. Only the update changes weights and optimizer, so it waits for
the copy.

| due while a save is in progress | then |
|---|---|
| `checkpoint.interval` | training waits for the end of that save, so that every multiple is saved, and logs it |
| `triggers/save` | starts at the first step after its end; nothing waits |
| leaving | waits for its end; then later progress is saved |

A save counts when it is published; then triggers are answered. All ranks learn of a failure at the same step, rank 0
logs it, and training continues until the next save. A damaged checkpoint goes into quarantine, and the attempt starts
from the checkpoint before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from relayrun.control.rundir import restarts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import (
    ResumePoint,
    is_checkpoint_of,
    quarantine_checkpoint,
    resume_point,
)
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.triggers import Trigger
from relayrun.errors import FatalTrainingError, InputError, RelayrunError, RunDirError
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.train.checkpoint import checksums
from relayrun.train.checkpoint.async_writer import BackgroundSave
from relayrun.train.checkpoint.checkpointer import Checkpointer, SaveFailed
from relayrun.train.checkpoint.checksums import DamagedCheckpoint
from relayrun.train.checkpoint.memory_tier import MemoryTier
from relayrun.train.hook_list import Hooks
from relayrun.train.loss_guard import LossGuard
from relayrun.train.reporting import liveness
from relayrun.train.reporting.liveness import NodeHeartbeatWriter, RankTimings
from relayrun.train.requests import AgreedRequests, RequestPoller

log = logging.getLogger(__name__)
FINAL_SAVE_TRIES = 3
"""Tries of the save before leaving; other saves are tried once."""
MOST_FALL_BACKS = 2
"""Damaged checkpoints that an attempt puts into quarantine: if more in a row are damaged, the node may be at fault."""


@dataclass(kw_only=True)
class Saver:
    """Decides about saves; all ranks call it together, at the same steps. `say` writes for people."""

    checkpointer: Checkpointer
    control: RequestPoller
    hooks: Hooks
    say: Callable[[str], None]
    timings: RankTimings
    heartbeat: NodeHeartbeatWriter
    asynchronous: bool
    saved_iteration: int
    """Iteration of the newest durable checkpoint."""
    stall_seconds: float = 0.0
    """Seconds that saves have held up training; the reader resets it to 0."""

    def __post_init__(self) -> None:
        self._under_way: BackgroundSave | None = None
        self._asked: Sequence[Trigger] = ()
        """Triggers that the save in progress answers."""
        self._grace_period = self.control.grace_period
        """Last reported grace period, without a save in progress."""
        self._reserved = not self.asynchronous

    def reserve(self, iteration: int) -> None:
        """Allocate host memory for asynchronous saves, once, when the optimizer has its state.

        Training waits for it, and the wait counts as time of saves.
        """
        if self._reserved:
            return
        self._reserved = True
        started = time.perf_counter()
        self.heartbeat.enter("save", iteration)
        reserved = self.checkpointer.reserve()
        seconds = time.perf_counter() - started
        self.stall_seconds += seconds
        if reserved is not None:
            size, pieces = reserved.size / (1 << 30), reserved.pieces
            self.say(f"host memory for saves: {size:.1f} GiB on this rank, {pieces} pieces, in {seconds:.1f} s")

    def poll_requests(self) -> AgreedRequests:
        """Return the agreed requests; conclude a save that is over on every rank."""
        if self._under_way is not None:
            self.control.grace_period = self.timings.grace_period(under_way=self._under_way.seconds)
        agreed = self.control.poll(saving=self._under_way is not None and not self._under_way.over)
        if not agreed.saving:
            self._conclude()
        return agreed

    def save_on_request(self, position: TrainingProgress) -> None:
        """Answer triggers/save: start a save now, or after the one in progress."""
        if self._under_way is not None:
            return
        at, taken = position.iteration, self.control.take()
        if at == self.saved_iteration:
            self.control.acknowledge(taken, at, f"nothing trained since iteration {at}")
        else:
            self._begin(position, taken)

    def save_at_interval(self, position: TrainingProgress) -> None:
        """Save this iteration, which is a multiple of `checkpoint.interval`."""
        iteration, save = position.iteration, self._under_way
        if iteration != self.saved_iteration and (save is None or iteration != save.iteration):
            if save is not None:
                self.say(
                    f"iteration {iteration} is to be saved, and the save of iteration {save.iteration} is "
                    "still under way: waiting for it; saves are slower than checkpoint.interval"
                )
            self.wait_for_save(iteration)
            self._begin(position, ())

    def wait_for_copy(self) -> float:
        """Wait until the state may change; return the seconds waited."""
        if self._under_way is None or self._under_way.copied:
            return 0.0
        started = time.perf_counter()
        self._under_way.wait_for_copy()
        seconds = time.perf_counter() - started
        self.stall_seconds += seconds
        return seconds

    def wait_for_save(self, iteration: int) -> None:
        """Wait for the save in progress, if any. `iteration`: the current position of training."""
        if self._under_way is not None:
            started = time.perf_counter()
            self.heartbeat.enter("save", iteration)
            self._conclude()
            self.stall_seconds += time.perf_counter() - started

    def save_before_leaving(self, position: TrainingProgress) -> str | None:
        """Make the state durable before leaving; return the failure in words, or None."""
        self.wait_for_save(position.iteration)
        result = None
        for _ in range(FINAL_SAVE_TRIES):
            if position.iteration == self.saved_iteration:
                return None
            result = self._begin(position, (), leaving=True)
        return None if position.iteration == self.saved_iteration else result

    def _begin(self, position: TrainingProgress, asked: Sequence[Trigger], *, leaving: bool = False) -> str:
        started = time.perf_counter()
        self.heartbeat.enter("save", position.iteration)
        beside = self.asynchronous and not leaving
        self._under_way = self.checkpointer.start_save(position, copy=self.asynchronous, beside=beside)
        self._asked = asked
        result = "" if beside else self._conclude()
        self.stall_seconds += time.perf_counter() - started
        return result

    def _conclude(self) -> str:
        save, asked = self._under_way, self._asked
        if save is None:
            return ""
        try:
            commit = save.result()
        except SaveFailed as error:
            result = f"failed: {error}"
            self.hooks.after_failed_save(save.iteration, str(error))
        else:
            result = "saved"
            self.saved_iteration = save.iteration
            self.hooks.after_save(commit)
        self._under_way, self._asked = None, ()
        self.update_grace_period()
        self.control.acknowledge(asked, save.iteration, result)
        return result

    def update_grace_period(self) -> None:
        """Update the grace period from the measurements."""
        before, self.control.grace_period = self._grace_period, self.timings.grace_period()
        if abs(self.control.grace_period - before) > 1:
            self.say(
                f"grace period {before:.0f} s -> {self.control.grace_period:.0f} s before the end of the job "
                f"(95 % of steps within {self.timings.steps_within(0.95) or 0:.2f} s, of saves within "
                f"{self.timings.save_p95 or 0:.1f} s)"
            )
        self._grace_period = self.control.grace_period


class QuarantineFailed(RelayrunError):
    """A damaged checkpoint could not be moved into quarantine; the attempt has failed."""


class TooManyDamagedCheckpoints(RelayrunError):
    """Several checkpoints in a row were read as damaged; the attempt has failed, and another node may read them."""


@dataclass(frozen=True, kw_only=True)
class RestoredState:
    """A state that was restored."""

    position: TrainingProgress
    source: str
    """`memory`, `neighbour`, the path of a checkpoint, or empty at the beginning of a run."""
    durable: int
    """Iteration of the newest checkpoint."""


@dataclass(frozen=True, kw_only=True)
class StateRestorer:
    """Restores states on this rank; all ranks call every method together.

    `guard` counts rollbacks; `memory` is None without copies in memory; `say` writes for people.
    """

    attempt: Attempt
    checkpointer: Checkpointer
    guard: LossGuard
    memory: MemoryTier | None
    say: Callable[[str], None]

    def restore(self, base: ResumePoint) -> RestoredState:
        """Restore the state of this start: from memory if the agents say so, else from `base`."""
        iteration = liveness.memory_iteration()
        if self.memory is not None and iteration is not None:
            position = self.memory.load(iteration)
            if position is not None:
                return RestoredState(position=position, source=self.memory.source, durable=base.iteration)
            self.say(f"the copies of iteration {iteration} in memory are not whole; from the disk")
        if self.memory is not None:
            self.memory.discard()
        position, taken = self.load_newest_intact(base)
        if self.checkpointer.ranks.rank == 0 and liveness.restart_number() > 1:  # the base may have changed
            restarts.mark_restart_in_metrics(self.attempt, taken.iteration, number=liveness.restart_number())
        return RestoredState(position=position, source=taken.path or "", durable=position.iteration)

    def load_newest_intact(self, base: ResumePoint) -> tuple[TrainingProgress, ResumePoint]:
        """Load `base`, or the newest intact checkpoint before it; return the position and that checkpoint.

        Raises TooManyDamagedCheckpoints after MOST_FALL_BACKS + 1 damaged ones, QuarantineFailed if one cannot be
        moved.
        """
        for left in reversed(range(MOST_FALL_BACKS + 1)):
            if base.path is None:
                break
            try:
                return self._checkpoint(base.iteration, base.path), base
            except DamagedCheckpoint as error:
                if not left:
                    raise TooManyDamagedCheckpoints(
                        f"{MOST_FALL_BACKS + 1} checkpoints in a row were read as damaged; the last, {error}",
                        hint="more likely it is this node's memory, network or file system",
                    ) from None
                self.say(f"iteration {base.iteration} is damaged: {error.message}")
                run, ranks = self.checkpointer.run, self.checkpointer.ranks
                moved = partial(quarantine_and_fall_back, run, self.attempt, base, error)
                base = ranks.on_first_rank(moved, QuarantineFailed)
        return TrainingProgress(self.checkpointer.config.training.batch_sizes), base

    def _checkpoint(self, iteration: int, path: str) -> TrainingProgress:
        """Load a checkpoint and skip the samples of earlier rollbacks. Raises DamagedCheckpoint on all ranks."""
        run, ranks = self.checkpointer.run, self.checkpointer.ranks
        own = is_checkpoint_of(run, ResumePoint(iteration=iteration, path=path))
        root = ranks.on_first_rank(partial(checksums.committed_checksum, path), InputError)
        position = self.checkpointer.load(Path(path), root=root, foreign=not own)
        if position.iteration != iteration:
            raise FatalTrainingError(
                f"holds iteration {position.iteration}, but this attempt begins at {iteration}", where=path
            )
        since_save = partial(restarts.rollbacks_since_save, run, iteration, position.consumed_samples)
        before = ranks.on_first_rank(since_save, InputError)
        if before:
            position.pass_over(before[-1].next_sample)
            self.guard.rollbacks += len(before)
            for rollback in before:
                self.say(f"passing over the samples up to {rollback.next_sample}: {rollback.words}")
        return position


def quarantine_and_fall_back(run: Run, attempt: Attempt, base: ResumePoint, error: DamagedCheckpoint) -> ResumePoint:
    """Move a damaged checkpoint into quarantine; return the newest checkpoint before it.

    begin.json follows if that one precedes the attempt's base. Raises FatalTrainingError if no checkpoint is left, and
    for a checkpoint of another run, which is not moved.
    """
    if not is_checkpoint_of(run, base):
        raise FatalTrainingError(
            error.message, where=error.where, hint="take another checkpoint to begin with, or a whole copy of this one"
        )
    target = quarantine_checkpoint(run.checkpoints, base, attempt=attempt.number, why=error.message)
    log.warning("%s: %s; moved to %s", base.path, error.message, target)
    try:
        before = resume_point(run)
    except RunDirError as none:
        raise FatalTrainingError(none.message, where=none.where, hint=none.hint) from None
    begin = attempt.read_begin()
    if begin is not None and before.iteration < begin.base_iteration:
        attempt.fall_back(before.iteration, before.path)
    return before
