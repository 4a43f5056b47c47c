"""Rounds: starts of the ranks inside one attempt, where `chain.recovery` is `node`. Standard library only.

An attempt begins with round 1. A round that fails has a record in attempts/N/rounds.jsonl: who failed and how, how far
training was, and whether the ranks were started again inside the same job, from which checkpoint. A later line with the
same number adds to it: what getting back took, when the next round has done its first step.

The next round computes again what lies beyond its checkpoint. A line in the attempt's metrics.jsonl says from where on:

    {"iteration": 40, "round": 2}

The coordinator of the agents writes all of this while no rank lives.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.lineage import Lineage, ResumePoint, is_checkpoint_of
from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run
from relayrun.files import append_line, read_lines

RESTART_VARIABLE = "RELAYRUN_ROUND"
"""Environment variable of the ranks that has the number of their round."""


STATE_SOURCES = {"memory": " (memory)", "neighbour": " (memory of a neighbour)"}
"""How people are told where a state came from that was not read from the disk."""

RESTART_SECONDS = {
    "end": "from the first failure that was noticed until no rank was left",
    "records": "until the next round was given out",
    "fork": "until rank 0 of it ran",
    "groups": "until ranks had met, and model and optimizer were made",
    "load": "until the checkpoint was in place",
    "step": "until the first step was done",
    "all": "from the failure to the end of that step",
}
"""What is measured of a failed round and the way into the next one."""


@dataclass(frozen=True, kw_only=True)
class FailedRestart(Record):
    """What rounds.jsonl says of a round that failed. Times are seconds since 1970."""

    round: int
    """Counted from 1; 0 where no round began, since too few nodes came."""
    time: float
    """When its agent noticed the first failure."""
    rank: int | None
    """The rank that failed first; None where it was not one rank."""
    node: str
    """Its node."""
    words: str
    """How it failed: `killed by SIGKILL`, or its own last words."""
    iteration: int
    """The newest one on record then."""
    base_iteration: int
    """From which the round started."""
    durable_iteration: int
    """The newest whole checkpoint's, then."""
    next_iteration: int
    """From which the next round starts: that one, or a later one of which all ranks have a copy in memory."""
    source: str = "disk"
    """Where the next round has that from: `disk`, `memory` (each rank its own node's), or `neighbour`, where a rank has
    lost its copy, and the memory of the next node had one."""
    again: bool
    """Whether the ranks were started again."""
    reason: str = ""
    """Why they were not."""
    steps_lost: int = 0
    """Iterations that the next round computes again."""
    lost: dict[str, str] = field(default_factory=dict)
    """Nodes that were given up, each with the spare node that takes its place; empty text where none was left."""
    nodes: int = 0
    """How many nodes the next round has, where those that are left are fewer; 0: as many as this one."""
    log_size: int = 0
    """Bytes of the job's standard error when it was over: what stands before them is of this round and earlier ones."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By the names of `SECONDS`; only `end` until the next round has done a step."""

    @property
    def culprit(self) -> str:
        """Who failed, and how, in words."""
        who = [f"rank {self.rank} on {self.node}"] if self.rank is not None else [self.node] if self.node else []
        return ": ".join([*who, self.words])

    @property
    def told(self) -> str:
        """One line for people."""
        if not self.round:
            return f"before the first round: {self.culprit}; {self.reason}"
        text = f"round {self.round}: {self.culprit}, at iteration {self.iteration}"
        if not self.again:
            return f"{text}; {self.reason}"
        text += "".join(f"; {spare} takes the place of {node}" for node, spare in self.lost.items() if spare)
        if self.nodes:
            text += f"; {self.nodes} {'nodes go' if self.nodes > 1 else 'node goes'} on without spare ones"
        text += f"; again from iteration {self.next_iteration}" + STATE_SOURCES.get(self.source, "")
        return text + (f", {seconds:.1f} s to the next step" if (seconds := self.seconds.get("all")) else "")


def record_failed_restart(attempt: Attempt, failed: FailedRestart) -> None:
    """Put a failed round on record."""
    append_line(attempt.rounds, asdict(failed))


def amend_failed_restart(attempt: Attempt, number: int, **changes: object) -> None:
    """Change fields of the record of this failed round; `seconds` are added to those that it has."""
    append_line(attempt.rounds, {"round": number, **changes})


def read_failed_restarts(attempt: Attempt) -> list[FailedRestart]:
    """The failed rounds of an attempt, oldest first; none where there was one round alone."""
    found: dict[int, dict[str, Any]] = {}
    for entry in read_lines(attempt.rounds):
        known = found.setdefault(entry["round"], {})
        known |= entry | {"seconds": known.get("seconds", {}) | entry.get("seconds", {})}
    return [FailedRestart.of(entry) for entry in found.values() if "words" in entry]


def restart_checkpoint(run: Run, attempt: Attempt) -> ResumePoint:
    """From which a round of this attempt starts: the run's newest whole checkpoint, or what the attempt began with.

    Raises RunDirError where the run has checkpoints and none is whole.
    """
    newest = Lineage(run).durable()
    if is_checkpoint_of(run, newest):
        return newest
    begin = attempt.read_begin()
    assert begin is not None
    return ResumePoint(iteration=begin.base_iteration, path=begin.base_path)


def newest_recorded_iteration(attempt: Attempt) -> int:
    """The last iteration in the attempt's metrics; its base's where there is none."""
    begin = attempt.read_begin()
    base = 0 if begin is None else begin.base_iteration
    for line in attempt.metrics_backwards():
        return max(base, int(line.get("iteration", 0)))
    return base


def prepare_restart(
    run: Run, attempt: Attempt, base: ResumePoint, *, next_round: int, next_iteration: int | None = None
) -> list[str]:
    """Make the records ready for the next round, while no rank lives; return what was moved, in words.

    What lies beyond `base`, the newest whole checkpoint, is moved out of the way, as before an attempt. Words of the
    failed round's ranks are kept in a folder of their own, so that they are not taken for those of the next one.
    `next_iteration`: where the round starts from a later state, in memory. Raises OSError and RunDirError.
    """
    begin = attempt.read_begin()
    assert begin is not None
    moved = Lineage(run).quarantine(base, attempt=attempt.number)
    if base.iteration < begin.base_iteration:  # what it began with is not whole any more
        attempt.fall_back(base.iteration, base.path)
    _move_failed_restart_files(run, attempt, next_round - 1)
    if entries := list(read_lines(attempt.rewinds)):
        written = sum("rewind" in line for line in read_lines(attempt.metrics))
        for entry in entries[written:]:  # rank 0 was killed between the two
            append_line(attempt.metrics, {"iteration": entry["base_iteration"], "rewind": entry})
    mark_restart_in_metrics(attempt, base.iteration if next_iteration is None else next_iteration, number=next_round)
    return moved


def mark_restart_in_metrics(attempt: Attempt, iteration: int, *, number: int) -> None:
    """Say in the metrics that round `number` goes on behind `iteration`; nothing where they have no later one."""
    if newest_recorded_iteration(attempt) > iteration:
        append_line(attempt.metrics, {"iteration": iteration, "round": number})


def failed_restart_folder(top: Path, number: int) -> Path:
    """The folder below `top` with what ranks of a round left there, when a later one has begun."""
    return top / f"round-{number:04}"


def _move_failed_restart_files(run: Run, attempt: Attempt, number: int) -> None:
    """Put what ranks of a round left, and the record of a hang, into folders that later ones do not look into."""
    stacks = run.stacks(attempt.number)
    for top, found in (
        (attempt.failures, [*attempt.failures.glob("rank-*.json"), *attempt.path.glob(attempt.hang.name)]),
        (stacks, stacks.glob("rank-*.txt")),
    ):
        folder = failed_restart_folder(top, number)
        for path in sorted(found):
            folder.mkdir(exist_ok=True)
            os.rename(path, folder / path.name)
