"""Restarts and rollbacks: training returns to a checkpoint inside one attempt. Standard library only.

A restart is one start of the ranks inside an attempt (`chain.recovery: node`). The coordinator of the agents writes a
line of attempts/N/restarts.jsonl for each failed restart; a later line with the same number adds the measured times. A
rollback is a decision of rank 0: return to a checkpoint and skip the samples that led to trouble. It is a line of
attempts/N/rollbacks.jsonl, written before the rollback happens, and counts as long as its checkpoint is the newest.

Both write a line into the attempt's metrics.jsonl, and the lines after it begin behind iteration N:

    {"iteration": N, "restart": 2}        a restart
    {"iteration": N, "rollback": {...}}   a rollback

With a foreign program the watch (`trainers.observer`) writes the records and the coordinator moves the files. Two files
of the attempt keep them apart, so that each side may be killed at any point: `hand_over.json` (the coordinator: no rank
lives; the watch: everything is recorded; removed when the next restart may be followed), and `restart.json`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage, ResumePoint, is_checkpoint_of
from relayrun.control.rundir.records import AttemptStart, Record
from relayrun.control.rundir.run import Run
from relayrun.files import append_line, parse_record, read_json_lines


@dataclass(frozen=True, kw_only=True)
class RestartHandOver(Record):
    """`hand_over.json`: a restart is over, and none of its ranks lives. `recorded`: everything of it is on record."""

    restart: int
    exit_code: int
    """Exit code of the rank that failed first, as a shell reports it."""
    recorded: bool = False
    log_offset: int = 0
    """Bytes of the job's standard error (`output_offset`: output), by the watch: inside a container the file may be
    missing."""
    output_offset: int = 0


@dataclass(frozen=True, kw_only=True)
class RestartBase(Record):
    """`restart.json`: the base of the newest restart after the first."""

    restart: int
    base_iteration: int
    base_path: str | None
    log_offset: int
    """Bytes of the job's standard error (`output_offset`: output): lines before are of earlier restarts."""
    output_offset: int
    commits: int
    """Number of checkpoints that the attempt had recorded, whether or not they still count."""


def attempt_start_of_restart(attempt: Attempt, begin: AttemptStart) -> AttemptStart:
    """Return the attempt's begin with the base and the log offsets of its newest restart."""
    start = RestartBase.read(attempt.restart_base)
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
    """A line of attempts/N/rollbacks.jsonl, by rank 0."""

    iteration: int
    """The iteration with the trouble."""
    reason: str
    base_iteration: int
    """Iteration of the checkpoint to which training returns."""
    next_sample: int
    """The sample with which training continues: the checkpoint's next one if only a damaged checkpoint caused the
    rollback."""
    time: float

    @property
    def words(self) -> str:
        return f"iteration {self.iteration}: {self.reason}"


def rollbacks_since_save(run: Run, iteration: int, consumed_samples: int) -> list[Rollback]:
    """Return the rollbacks to the checkpoint of this iteration that it does not contain itself, oldest first.
    `consumed_samples`: up to this checkpoint. Rollbacks that skip no samples are left out."""
    saved, since = 0.0, 0
    for counted in Lineage(run).backwards():
        if counted.commit.iteration <= iteration:
            if counted.commit.iteration == iteration:
                saved, since = counted.commit.time, counted.attempt
            break
    numbers = [number for number in run.attempt_numbers() if number >= since]
    found = [Rollback.of(entry) for number in numbers for entry in read_json_lines(run.attempt(number).rollbacks)]
    pending = []
    for rollback in found:
        if rollback.base_iteration == iteration and rollback.time > saved and rollback.next_sample > consumed_samples:
            pending.append(rollback)
            consumed_samples = rollback.next_sample
    return pending


RESTART_VARIABLE = "RELAYRUN_RESTART"
"""Environment variable of the ranks with the number of their restart."""
STATE_SOURCES = {"memory": " (memory)", "neighbour": " (memory of a neighbour)"}
"""Suffix for people that names the source of a state that was not read from the disk."""

RESTART_SECONDS = {
    "end": "from the first failure that was noticed until no rank was left",
    "records": "until the next restart was given out",
    "fork": "until rank 0 of it ran",
    "groups": "until ranks had met, and model and optimizer were made",
    "load": "until the checkpoint was in place",
    "step": "until the first step was done",
    "all": "from the failure to the end of that step",
}
"""Measured sections of a failed restart and the way to the next one."""


@dataclass(frozen=True, kw_only=True)
class FailedRestart(Record):
    """A failed restart in restarts.jsonl. Times are seconds since 1970."""

    restart: int
    """Counted from 1; 0 if no restart began because too few nodes came."""
    time: float
    """Time at which its agent noticed the first failure."""
    rank: int | None
    """The rank that failed first, on `node`; None if it was not one rank."""
    node: str
    words: str
    """Its failure: `killed by SIGKILL`, or its own last words."""
    iteration: int
    """The newest recorded iteration at that time."""
    base_iteration: int
    durable_iteration: int
    """Iteration of the newest whole checkpoint at that time."""
    next_iteration: int
    """Iteration from which the next restart starts: the durable one, or a later one with copies in memory."""
    source: str = "disk"
    """Source of that state: `disk`, `memory` (each rank its own node's), or `neighbour` (the next node kept a lost
    copy)."""
    again: bool
    reason: str = ""
    """The reason if they were not started again."""
    steps_lost: int = 0
    """Iterations that the next restart computes again."""
    lost: dict[str, str] = field(default_factory=dict)
    """Nodes that were given up, each with the spare node that replaces it; empty text if none was left."""
    log_size: int = 0
    """Bytes of the job's standard error at its end: lines before are of this restart and earlier ones."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By the names of `RESTART_SECONDS`; only `end` until the next restart has done a step."""

    @property
    def culprit(self) -> str:
        """The rank or node that failed, and how, in words."""
        who = [f"rank {self.rank} on {self.node}"] if self.rank is not None else [self.node] if self.node else []
        return ": ".join([*who, self.words])

    @property
    def told(self) -> str:
        """One line for people."""
        if not self.restart:
            return f"before the first start: {self.culprit}; {self.reason}"
        text = f"restart {self.restart}: {self.culprit}, at iteration {self.iteration}"
        if not self.again:
            return f"{text}; {self.reason}"
        text += "".join(f"; {spare} takes the place of {node}" for node, spare in self.lost.items() if spare)
        text += f"; again from iteration {self.next_iteration}" + STATE_SOURCES.get(self.source, "")
        return text + (f", {seconds:.1f} s to the next step" if (seconds := self.seconds.get("all")) else "")


def amend_failed_restart(attempt: Attempt, number: int, **changes: object) -> None:
    """Change fields of the record of this failed restart; `seconds` are merged."""
    append_line(attempt.failed_restarts, {"restart": number, **changes})


def read_failed_restarts(attempt: Attempt) -> list[FailedRestart]:
    """Return the failed restarts of an attempt, oldest first."""
    found: dict[int, dict[str, Any]] = {}
    for entry in read_json_lines(attempt.failed_restarts):
        known = found.setdefault(entry["restart"], {})
        known |= entry | {"seconds": known.get("seconds", {}) | entry.get("seconds", {})}
    return [FailedRestart.of(entry) for entry in found.values() if "words" in entry]


def restart_checkpoint(run: Run, attempt: Attempt) -> ResumePoint:
    """Return the run's newest whole checkpoint, or the attempt's base. Raises RunDirError if all are broken."""
    newest = Lineage(run).durable()
    if is_checkpoint_of(run, newest):
        return newest
    begin = attempt.started_record()
    return ResumePoint(iteration=begin.base_iteration, path=begin.base_path)


def newest_recorded_iteration(attempt: Attempt) -> int:
    """Return the last iteration in the attempt's metrics, or its base's if there is none."""
    begin = attempt.read_begin()
    base = 0 if begin is None else begin.base_iteration
    for line in attempt.metrics_backwards():
        return max(base, int(line.get("iteration", 0)))
    return base


def prepare_restart(
    run: Run, attempt: Attempt, base: ResumePoint, *, next_restart: int, next_iteration: int | None = None
) -> list[str]:
    """Prepare the records for the next restart, while no rank lives; return one line per moved checkpoint.

    Checkpoints beyond `base`, the newest whole one, and records of the failed ranks are moved away. `next_iteration`:
    of a later state in memory from which the ranks start. Raises OSError and RunDirError.
    """
    moved = Lineage(run).quarantine(base, attempt=attempt.number)
    if base.iteration < attempt.started_record().base_iteration:  # the attempt's base is not whole any more
        attempt.fall_back(base.iteration, base.path)
    _move_failed_restart_files(run, attempt, next_restart - 1)
    if entries := list(read_json_lines(attempt.rollbacks)):
        written = sum("rollback" in line for line in read_json_lines(attempt.metrics))
        for entry in entries[written:]:  # rank 0 was killed between the two writes
            append_line(attempt.metrics, {"iteration": entry["base_iteration"], "rollback": entry})
    mark_restart_in_metrics(attempt, base.iteration if next_iteration is None else next_iteration, number=next_restart)
    return moved


def mark_restart_in_metrics(attempt: Attempt, iteration: int, *, number: int) -> None:
    """Write the restart `number` from `iteration` into the metrics; nothing if they have no later line."""
    if newest_recorded_iteration(attempt) > iteration:
        append_line(attempt.metrics, {"iteration": iteration, "restart": number})


def failed_restart_folder(top: Path, number: int) -> Path:
    """Return the folder below `top` with the files of a restart's ranks, after a later one has begun."""
    return top / f"restart-{number:04}"


def _move_failed_restart_files(run: Run, attempt: Attempt, number: int) -> None:
    """Move the records of a restart's ranks and of a hang into folders that later ones do not read."""
    stacks = run.stacks(attempt.number)
    for top, found in (
        (attempt.failures, [*attempt.failures.glob("rank-*.json"), *attempt.path.glob(attempt.hang.name)]),
        (stacks, [path for path in stacks.glob("*-*") if not path.is_dir()]),
    ):
        folder = failed_restart_folder(top, number)
        for path in sorted(found):
            folder.mkdir(exist_ok=True)
            os.rename(path, folder / path.name)


RESET_KEYS = ("rollback", "restart")
"""Keys that mark a line of the metrics by which training went back."""
METRICS_CHUNK = 1 << 20
"""Bytes that are read at a time: a run may have a million lines."""


def metrics_chunks(metrics: Path | str) -> Iterator[list[bytes]]:
    """Yield the lines of an attempt's metrics, oldest first, some at a time; none of a missing file."""
    with contextlib.suppress(FileNotFoundError), open(metrics, "rb") as file:
        while lines := file.readlines(METRICS_CHUNK):
            yield lines


def resets_iteration(line: Mapping[str, Any]) -> bool:
    """Return whether a line of the metrics says that training went back."""
    return any(kind in line for kind in RESET_KEYS)


def iteration_resets(metrics: Path, rollbacks: Sequence[int], *, before_rollback: int | None = None) -> list[int]:
    """Return the iterations to which an attempt went back, in the order of its metrics; a missing file has no lines.
    `rollbacks`: on record, each written before its line. `before_rollback`: only resets before it, counted from 1."""
    found = [(int(line["iteration"]), "rollback" in line) for line in _reset_lines(metrics)]
    found += [(iteration, True) for iteration in rollbacks[sum(rollback for _, rollback in found) :]]
    places = [place for place, (_, rollback) in enumerate(found) if rollback]
    if before_rollback is not None and len(places) >= before_rollback:
        found = found[: places[before_rollback - 1]]
    return [iteration for iteration, _ in found]


def _reset_lines(metrics: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines by which training goes back, without parsing other lines or torn ones."""
    keys = tuple(f'"{kind}": '.encode() for kind in RESET_KEYS)
    for lines in metrics_chunks(metrics):
        text = b"".join(lines)
        for line in lines if any(key in text for key in keys) else ():
            value = parse_record(line) if line.endswith(b"\n") and any(key in line for key in keys) else None
            if value is not None and resets_iteration(value):
                yield value
