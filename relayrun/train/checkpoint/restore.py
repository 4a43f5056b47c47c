"""The state that an attempt goes on from: copies in memory, or the newest checkpoint that holds what was saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir import rewinds, rounds
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.lineage import ResumePoint, is_checkpoint_of
from relayrun.control.rundir.run import Run
from relayrun.errors import FatalTrainingError, InputError, RelayrunError
from relayrun.tokens.order.progress import TrainingProgress
from relayrun.train.checkpoint.checksums import DamagedCheckpoint
from relayrun.train.checkpoint.damaged import committed_checksum, quarantine_and_fall_back
from relayrun.train.checkpoint.memory import MemoryTier
from relayrun.train.checkpoint.state import Checkpointer
from relayrun.train.loss_guard import LossGuard
from relayrun.train.parallel import Ranks
from relayrun.train.reporting import agent_link

MOST_FALL_BACKS = 2
"""How many damaged checkpoints an attempt leaves behind: where one after the other is damaged, it may be the node."""


class QuarantineFailed(RelayrunError):
    """A damaged checkpoint could not be put into quarantine; the attempt has failed."""


class TooManyDamagedCheckpoints(RelayrunError):
    """One checkpoint after the other was read as damaged; the attempt has failed, and another node may read better."""


@dataclass(frozen=True, kw_only=True)
class RestoredState:
    """What was put in place."""

    position: TrainingProgress
    source: str
    """Which memory it came from, the path of a checkpoint, or nothing at the beginning of a run."""
    durable: int
    """The iteration of the newest checkpoint."""


@dataclass(frozen=True, kw_only=True)
class StateRestorer:
    """Puts states in place on this rank; every method is called by all ranks.

    `guard` learns of rewinds before the state; `memory` is None where no copies are kept; `say` writes for people.
    """

    run: Run
    attempt: Attempt
    config: RunConfig
    ranks: Ranks
    checkpointer: Checkpointer
    guard: LossGuard
    memory: MemoryTier | None
    say: Callable[[str], None]

    def first(self, base: ResumePoint) -> RestoredState:
        """Put the state in place from which this start goes on: from memory where the agents say so, or `base`."""
        iteration = agent_link.memory_iteration()
        if self.memory is not None and iteration is not None:
            position = self.memory.load(iteration, self.config.training.batch_sizes)
            if position is not None:
                return RestoredState(position=position, source=self.memory.source, durable=base.iteration)
            self.say(f"the copies of iteration {iteration} in memory are not whole; from the disk")
        if self.memory is not None:
            self.memory.void()
        position, taken = self.newest_whole(base)
        if self.ranks.rank == 0 and agent_link.restart_number() > 1:  # it may be further back than was meant
            rounds.mark_restart_in_metrics(self.attempt, taken.iteration, number=agent_link.restart_number())
        return RestoredState(position=position, source=taken.path or "", durable=position.iteration)

    def newest_whole(self, base: ResumePoint) -> tuple[TrainingProgress, ResumePoint]:
        """Put `base` in place, or the newest before it that holds the bytes that were saved; return which.

        Raises TooManyDamaged behind three that do not, and FallBackFailed where one cannot be put into quarantine.
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
                self.say(f"iteration {base.iteration} is left behind: {error.message}")
                base = self.ranks.on_first_rank(
                    partial(quarantine_and_fall_back, self.run, self.attempt, base, error), QuarantineFailed
                )
        return TrainingProgress(self.config.training.batch_sizes), base

    def _checkpoint(self, iteration: int, path: str) -> TrainingProgress:
        """Put a checkpoint in place, and pass over what led to trouble after it before. Raises Damaged on all ranks."""
        own = is_checkpoint_of(self.run, ResumePoint(iteration=iteration, path=path))
        root = self.ranks.on_first_rank(partial(committed_checksum, path), InputError)
        position = self.checkpointer.load(Path(path), self.config.training.batch_sizes, root=root, foreign=not own)
        if position.iteration != iteration:
            raise FatalTrainingError(
                f"holds iteration {position.iteration}, but this attempt begins at {iteration}", where=path
            )
        before = self.ranks.on_first_rank(
            partial(rewinds.pending_rollbacks, self.run, iteration, position.consumed_samples), InputError
        )
        if before:
            position.pass_over(before[-1].next_sample)
            self.guard.rewinds += len(before)
            for rewind in before:
                self.say(f"passing over the samples up to {rewind.next_sample}: {rewind.words}")
        return position
