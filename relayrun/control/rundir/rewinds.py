"""Rewinds: training went back to a checkpoint and passes over the samples that led to trouble. Standard library only.

A rewind is on record before it is done, and counts as long as its checkpoint is the newest: whoever starts from that
checkpoint passes over the same samples. Checkpoints that are written later hold it themselves.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.lineage import Lineage
from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run
from relayrun.files import append_line, read_lines


@dataclass(frozen=True, kw_only=True)
class Rollback(Record):
    """A line of attempts/N/rewinds.jsonl, by rank 0."""

    iteration: int
    """In which the trouble was."""
    reason: str
    base_iteration: int
    """Iteration of the checkpoint to which training goes back."""
    next_sample: int
    """With which it goes on; those from the checkpoint's up to this one are passed over. The checkpoint's own where
    training only went back because a newer checkpoint was damaged."""
    time: float
    """Seconds since 1970."""

    @property
    def words(self) -> str:
        return f"iteration {self.iteration}: {self.reason}"


def record_rollback(attempt: Attempt, rewind: Rollback) -> None:
    append_line(attempt.rewinds, asdict(rewind))


def pending_rollbacks(run: Run, iteration: int, consumed_samples: int) -> list[Rollback]:
    """The rewinds to the checkpoint of this iteration, oldest first, as far as it does not hold them itself.

    `consumed_samples`: up to this checkpoint. A rewind that passes over none, because the checkpoint that it was to go
    back to turned out to be damaged, is left out.
    """
    saved, since = 0.0, 0
    for counted in Lineage(run).backwards():
        if counted.commit.iteration <= iteration:
            if counted.commit.iteration == iteration:
                saved, since = counted.commit.time, counted.attempt
            break
    numbers = [number for number in run.attempt_numbers() if number >= since]
    found = [Rollback.of(entry) for number in numbers for entry in read_lines(run.attempt(number).rewinds)]
    pending = []
    for rewind in found:
        if rewind.base_iteration == iteration and rewind.time > saved and rewind.next_sample > consumed_samples:
            pending.append(rewind)
            consumed_samples = rewind.next_sample
    return pending
