"""Restarts and rollbacks: training returns to a checkpoint inside one attempt. Standard library only.

A restart is one start of the ranks inside an attempt (`chain.recovery: node`). The coordinator of the agents writes a
line of attempts/N/rounds.jsonl for each restart that failed: who failed and how, how far training was, and whether and
from which checkpoint the ranks started again. A later line with the same number adds the measured times.

A rollback is a decision of rank 0: return to a checkpoint and skip the samples that led to trouble. It is a line of
attempts/N/rewinds.jsonl, written before the rollback happens, and it counts as long as its checkpoint is the newest.

Both write a line into the attempt's metrics.jsonl, and the lines after it begin behind iteration N:

    {"iteration": N, "round": 2}        a restart
    {"iteration": N, "rewind": {...}}   a rollback

With a foreign program the watch (`trainers.observer`) writes the records and the coordinator moves the files. Two
files of the attempt keep them apart, so that each side may be killed at any point:

    hand_over.json    by the coordinator: restart 1 has ended and no rank lives; it removes the file when the watch may
                      follow the next restart. By the watch: everything of restart 1 is on record.
    round.json        the base of the newest restart, and the size of the log when it started
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage, ResumePoint, is_checkpoint_of
from relayrun.control.rundir.records import AttemptStart, Record
from relayrun.control.rundir.run import Run
from relayrun.files import append_line, read_lines


@dataclass(frozen=True, kw_only=True)
class RestartHandOver(Record):
    """What `hand_over.json` says: a round is over, and none of its ranks lives."""

    round: int
    exit_code: int
    """The end of the rank that failed first, as a shell reports it."""
    recorded: bool = False
    """Whether all that the round left is on record."""
    log_offset: int = 0
    """Bytes of the job's standard error then, as the watch sees it: in a container it may not be there."""
    output_offset: int = 0
    """Bytes of its standard output."""


@dataclass(frozen=True, kw_only=True)
class RestartBase(Record):
    """What `round.json` says: what the newest round after the first starts from."""

    round: int
    base_iteration: int
    base_path: str | None
    log_offset: int
    """Bytes of the job's standard error: what stands before them is of earlier rounds."""
    output_offset: int
    """Bytes of its standard output."""
    commits: int
    """How many checkpoints the attempt had on record, whether or not they still count."""


def pending_hand_over(attempt: Attempt) -> RestartHandOver | None:
    """Return the round that is handed over; None where one is running. Raises OSError and RunDirError."""
    return RestartHandOver.read(attempt.hand_over)


def read_restart_base(attempt: Attempt) -> RestartBase | None:
    """Return what the newest round starts from; None in the first one. Raises OSError and RunDirError."""
    return RestartBase.read(attempt.round)


def attempt_start_of_restart(attempt: Attempt, begin: AttemptStart) -> AttemptStart:
    """Return the attempt's begin as it is for its newest round: another base, and a log that was there before it."""
    start = read_restart_base(attempt)
    if start is None:
        return begin
    return replace(
        begin,
        base_iteration=start.base_iteration,
        base_path=start.base_path,
        log_offset=start.log_offset,
        output_offset=start.output_offset,
    )


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
    """By the names of `RESTART_SECONDS`; only `end` until the next round has done a step."""

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


RESET_KEYS = ("rewind", "round")
"""Names that tell such a line."""
METRICS_CHUNK = 1 << 20
"""Bytes that are taken at a time: a run may have a million lines."""


def resets_iteration(line: Mapping[str, Any]) -> bool:
    """Whether a line of the metrics says that training went back."""
    return any(kind in line for kind in RESET_KEYS)


def iteration_resets(metrics: Path, rewinds: Sequence[int], *, before_rewind: int | None = None) -> list[int]:
    """The iterations to which an attempt went back, in the order of its metrics; a missing file has no line.

    `rewinds`: those on record, each of which is there before its line. `before_rewind`: only what came before the
    rewind of this number, from 1 on.
    """
    found = [(int(line["iteration"]), "rewind" in line) for line in _reset_lines(metrics)]
    found += [(iteration, True) for iteration in rewinds[sum(rewind for _, rewind in found) :]]
    places = [place for place, (_, rewind) in enumerate(found) if rewind]
    if before_rewind is not None and len(places) >= before_rewind:
        found = found[: places[before_rewind - 1]]
    return [iteration for iteration, _ in found]


def _reset_lines(metrics: Path) -> Iterator[dict[str, Any]]:
    """The lines by which training goes back; no other one is parsed, and none that a killed writer left."""
    keys = tuple(f'"{kind}": '.encode() for kind in RESET_KEYS)
    try:
        file = open(metrics, "rb")  # noqa: SIM115 - closed below, where the generator is
    except FileNotFoundError:
        return
    with file:
        while lines := file.readlines(METRICS_CHUNK):
            text = b"".join(lines)
            for line in lines if any(key in text for key in keys) else ():
                if line.endswith(b"\n") and any(key in line for key in keys):
                    try:
                        value = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(value, dict) and resets_iteration(value):
                        yield value
