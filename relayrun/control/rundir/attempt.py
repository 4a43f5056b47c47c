"""An attempt: one start of the run inside one Slurm job. Standard library only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from relayrun.control.rundir.records import AttemptEnd, AttemptStart, CheckpointCommit, Heartbeat, Record
from relayrun.errors import RunDirError
from relayrun.files import (
    FileIdentity,
    append_line,
    file_identity,
    read_lines,
    read_lines_backwards,
    read_with_identity,
)

R = TypeVar("R", bound=Record)
COMMITS_NAME, METRICS_NAME = "commits.jsonl", "metrics.jsonl"


@dataclass(frozen=True)
class Attempt:
    """One start of the run inside one Slurm job: the names of its files, and its records.

    This object keeps begin.json and end.json as long as they are the same files: end.json is written once, begin.json
    once more if the checkpoint that it names turns out to be damaged. Everything else may change while the attempt
    lives and is read anew whenever it is asked for.
    """

    folder: str
    _kept: dict[str, tuple[FileIdentity, Record]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def number(self) -> int:
        return int(self.path.name)

    @cached_property
    def begin(self) -> Path:
        """Written by the supervisor before the ranks start; see `read_begin` and `fall_back`."""
        return self.path / "begin.json"

    @cached_property
    def end(self) -> Path:
        """Written once by the supervisor after the ranks have gone; see `read_end`."""
        return self.path / "end.json"

    @property
    def outcome(self) -> Path:
        """Written by rank 0 when it leaves on purpose."""
        return self.path / "outcome.json"

    @cached_property
    def commits(self) -> Path:
        """A line per published checkpoint, by rank 0."""
        return self.path / COMMITS_NAME

    @property
    def rewinds(self) -> Path:
        """A line per rewind, by rank 0 before it is done; see `rundir.restarts`."""
        return self.path / "rewinds.jsonl"

    @cached_property
    def rounds(self) -> Path:
        """What failed inside the attempt's job without ending it, by the coordinator; see `rundir.restarts`."""
        return self.path / "rounds.jsonl"

    @property
    def node_health(self) -> Path:
        """What was found wrong with nodes, by the coordinator or ranks; see `rundir.node_health`."""
        return self.path / "node_health.jsonl"

    @property
    def hand_over(self) -> Path:
        """A round of a foreign program that is over, between the coordinator and the watch; see `rundir.restarts`."""
        return self.path / "hand_over.json"

    @property
    def round(self) -> Path:
        """What the newest round of a foreign program starts from, by the coordinator; see `rundir.restarts`."""
        return self.path / "round.json"

    @property
    def memory_intervals(self) -> Path:
        """A line per choice of `checkpoint.memory_interval: auto`, with what was measured, by rank 0."""
        return self.path / "memory_intervals.jsonl"

    @cached_property
    def metrics(self) -> Path:
        """A line per iteration, by rank 0."""
        return self.path / METRICS_NAME

    @cached_property
    def failed_saves(self) -> Path:
        """A line per save that did not work (iteration, error, time), by rank 0."""
        return self.path / "failed_saves.jsonl"

    @property
    def started(self) -> Path:
        """When rank 0 was how far with its start; see `rundir.records.StartTimes`."""
        return self.path / "started.json"

    @property
    def data(self) -> Path:
        """The data order of this attempt (phases, data sets, counts) where it began, by rank 0."""
        return self.path / "data.json"

    @property
    def stop(self) -> Path:
        """Its existence asks the ranks to save and leave; its text says why."""
        return self.path / "stop"

    @property
    def heartbeats(self) -> Path:
        """A file per node, by its first rank; see `rundir.records.Heartbeat`."""
        return self.path / "heartbeat"

    @property
    def failures(self) -> Path:
        """A file per rank that failed and could say so; see `rundir.records.RankFailure`."""
        return self.path / "failures"

    @property
    def agents(self) -> Path:
        """A log per node, by its agent, where each is a step of its own: the job's log ends with the batch host."""
        return self.path / "agents"

    @property
    def setup(self) -> Path:
        """The script of a person's own lines, `job.setup`, before the ranks; only where there are some."""
        return self.path / "setup.sh"

    @property
    def setup_failed(self) -> Path:
        """Which of those lines failed, and how, where one did."""
        return self.path / "setup_failed"

    @property
    def not_started(self) -> Path:
        """Why the batch script did not start the ranks, in words, where it could not."""
        return self.path / "not_started"

    @property
    def retry_successor(self) -> Path:
        """Its existence says that the successor could not be queued yet; `watch` retries."""
        return self.path / "successor.owed"

    @property
    def successor(self) -> Path:
        """The job that waits behind this attempt's, and whether it was cancelled; see `rundir.records.SuccessorJob`."""
        return self.path / "successor.json"

    @property
    def made_place(self) -> Path:
        """The id of the job in whose favour the chain itself cancels this attempt's: no person does.

        Several agents may write `successor` at the same time; this one nobody writes back.
        """
        return self.path / "made_place"

    @property
    def client(self) -> Path:
        """A folder in which a foreign program and the supervisor leave each other word; see
        `relayrun.control.trainers`."""
        return self.path / "client"

    @property
    def data_paths(self) -> Path:
        """The shards of a run with Megatron-LM, where they are too many for a command line."""
        return self.path / "data_paths"

    @property
    def guard_log(self) -> Path:
        """What the guard of a job in requeue mode said; see `chain.watch`."""
        return self.path / "guard.log"

    @property
    def hang(self) -> Path:
        """Written by the supervisor when it ends an attempt that stands still."""
        return self.path / "hang.json"

    def read_begin(self) -> AttemptStart | None:
        """What the attempt started from; None while it has not begun. Raises RunDirError if the record is damaged."""
        return self._once(AttemptStart, "begin.json")

    def fall_back(self, iteration: int, path: str | None) -> AttemptStart:
        """Record that the attempt starts from another checkpoint than begin.json says; return the new record."""
        begin = self.read_begin()
        assert begin is not None
        changed = replace(begin, base_iteration=iteration, base_path=path)
        changed.write(self.begin)
        return changed

    def read_end(self) -> AttemptEnd | None:
        """How the attempt ended; None while nobody has seen its end. Raises RunDirError if the record is damaged."""
        return self._once(AttemptEnd, "end.json")

    def read_commits(self) -> list[CheckpointCommit]:
        """The checkpoints that it has published up to now, oldest first."""
        return [self.commit_of(line) for line in read_lines(self.commits)]

    def commit_of(self, line: Mapping[str, Any]) -> CheckpointCommit:
        """Return a line of commits.jsonl with its checkpoint where the run directory is now.

        Lines hold absolute paths, and a directory may be moved or copied. An attempt publishes below it alone.
        """
        commit = CheckpointCommit.of(line)
        folder, name = os.path.split(commit.path)
        if os.path.basename(folder) != "checkpoints":
            return commit
        here = os.path.dirname(os.path.dirname(self.folder))
        path = f"{here}/checkpoints/{name}"
        return commit if path == commit.path else replace(commit, path=path)

    def commits_backwards(self) -> Iterator[CheckpointCommit]:
        """The same as `read_commits`, the newest first, only as far as somebody asks."""
        return (self.commit_of(line) for _, line in read_lines_backwards(f"{self.folder}/{COMMITS_NAME}"))

    def metrics_backwards(self) -> Iterator[dict[str, Any]]:
        """The lines of its metrics, the newest first, only as far as somebody asks."""
        return (line for _, line in read_lines_backwards(f"{self.folder}/{METRICS_NAME}"))

    def append_commit(self, commit: CheckpointCommit) -> None:
        """Put a published checkpoint on record: from here on it counts."""
        append_line(self.commits, asdict(commit))

    def read_heartbeats(self) -> list[Heartbeat]:
        """The newest sign of life of every node, by name; one that cannot be read is no sign."""
        found = []
        for path in sorted(self.heartbeats.glob("*.json")):
            with contextlib.suppress(RunDirError, OSError):
                found.append(Heartbeat.read(path))
        return [beat for beat in found if beat is not None]

    def _once(self, kind: type[R], name: str) -> R | None:
        path = f"{self.folder}/{name}"
        kept = self._kept.get(name)
        try:
            if kept is not None and kept[0] == file_identity(path):
                return cast("R", kept[1])
            text, which = read_with_identity(path)
        except FileNotFoundError:
            return None
        record = kind.parse(text, where=path)
        self._kept[name] = which, record
        return record
