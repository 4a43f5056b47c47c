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

    The object caches begin.json and end.json until the files change: end.json is written once, begin.json a second time
    if its checkpoint turns out to be damaged. All other files may change while the attempt lives and are always read
    anew.
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
        """One line per published checkpoint, by rank 0."""
        return self.path / COMMITS_NAME

    @property
    def rewinds(self) -> Path:
        """One line per rollback, by rank 0 before the rollback happens; see `rundir.restarts`."""
        return self.path / "rewinds.jsonl"

    @cached_property
    def rounds(self) -> Path:
        """One line per failed restart inside the attempt's job, by the coordinator; see `rundir.restarts`."""
        return self.path / "rounds.jsonl"

    @property
    def node_health(self) -> Path:
        """Findings about nodes, by the coordinator or ranks; see `rundir.node_health`."""
        return self.path / "node_health.jsonl"

    @property
    def hand_over(self) -> Path:
        """The end of a foreign program's restart, between the coordinator and the watch; see `rundir.restarts`."""
        return self.path / "hand_over.json"

    @property
    def round(self) -> Path:
        """The base of a foreign program's newest restart, by the coordinator; see `rundir.restarts`."""
        return self.path / "round.json"

    @property
    def memory_intervals(self) -> Path:
        """One line per choice of `checkpoint.memory_interval: auto`, with its measurements, by rank 0."""
        return self.path / "memory_intervals.jsonl"

    @cached_property
    def metrics(self) -> Path:
        """One line per iteration, by rank 0."""
        return self.path / METRICS_NAME

    @cached_property
    def failed_saves(self) -> Path:
        """One line per failed save (iteration, error, time), by rank 0."""
        return self.path / "failed_saves.jsonl"

    @property
    def started(self) -> Path:
        """Times of rank 0's way to its first step; see `rundir.records.StartTimes`."""
        return self.path / "started.json"

    @property
    def data(self) -> Path:
        """The data order of this attempt (phases, data sets, counts) at its start, by rank 0."""
        return self.path / "data.json"

    @property
    def stop(self) -> Path:
        """Its existence asks the ranks to save and leave; its text gives the reason."""
        return self.path / "stop"

    @property
    def heartbeats(self) -> Path:
        """One file per node, by its first rank; see `rundir.records.Heartbeat`."""
        return self.path / "heartbeat"

    @property
    def failures(self) -> Path:
        """One file per rank that failed and could record it; see `rundir.records.RankFailure`."""
        return self.path / "failures"

    @property
    def agents(self) -> Path:
        """One log per node, by its agent if each agent is a step of its own: the job's log ends with the batch host."""
        return self.path / "agents"

    @property
    def setup(self) -> Path:
        """The script with the lines of `job.setup`; only if there are some."""
        return self.path / "setup.sh"

    @property
    def setup_failed(self) -> Path:
        """The failed line of `job.setup` and its exit code."""
        return self.path / "setup_failed"

    @property
    def not_started(self) -> Path:
        """The reason in words if the batch script did not start the ranks."""
        return self.path / "not_started"

    @property
    def retry_successor(self) -> Path:
        """Its existence means that the successor could not be queued yet; `watch` retries."""
        return self.path / "successor.owed"

    @property
    def successor(self) -> Path:
        """The job that waits behind this attempt's, and whether it was cancelled; see `rundir.records.SuccessorJob`."""
        return self.path / "successor.json"

    @property
    def made_place(self) -> Path:
        """Id of the job that replaces this attempt's job, which the chain itself, and no person, cancels.

        Several agents may write `successor` at the same time; only this file is never overwritten with an older state.
        """
        return self.path / "made_place"

    @property
    def client(self) -> Path:
        """A folder of messages between a foreign program and the supervisor; see `relayrun.control.trainers`."""
        return self.path / "client"

    @property
    def data_paths(self) -> Path:
        """The shards of a run with Megatron-LM if they are too many for a command line."""
        return self.path / "data_paths"

    @property
    def guard_log(self) -> Path:
        """The log of the guard; see `chain.watch`."""
        return self.path / "guard.log"

    @property
    def hang(self) -> Path:
        """Written by the supervisor when it ends an attempt that hangs."""
        return self.path / "hang.json"

    def read_begin(self) -> AttemptStart | None:
        """Return begin.json; None while the attempt has not begun. Raises RunDirError if the record is damaged."""
        return self._once(AttemptStart, "begin.json")

    def fall_back(self, iteration: int, path: str | None) -> AttemptStart:
        """Record that the attempt starts from another checkpoint than begin.json names; return the new record."""
        begin = self.read_begin()
        assert begin is not None
        changed = replace(begin, base_iteration=iteration, base_path=path)
        changed.write(self.begin)
        return changed

    def read_end(self) -> AttemptEnd | None:
        """Return end.json; None while the end is not recorded. Raises RunDirError if the record is damaged."""
        return self._once(AttemptEnd, "end.json")

    def read_commits(self) -> list[CheckpointCommit]:
        """Return the checkpoints that the attempt has published so far, oldest first."""
        return [self.commit_of(line) for line in read_lines(self.commits)]

    def commit_of(self, line: Mapping[str, Any]) -> CheckpointCommit:
        """Parse a line of commits.jsonl and move its path to the present run directory.

        Lines hold absolute paths, and a run directory may be moved or copied. An attempt publishes only below it.
        """
        commit = CheckpointCommit.of(line)
        folder, name = os.path.split(commit.path)
        if os.path.basename(folder) != "checkpoints":
            return commit
        here = os.path.dirname(os.path.dirname(self.folder))
        path = f"{here}/checkpoints/{name}"
        return commit if path == commit.path else replace(commit, path=path)

    def commits_backwards(self) -> Iterator[CheckpointCommit]:
        """Yield the commits, newest first; the file is read only as far as needed."""
        return (self.commit_of(line) for _, line in read_lines_backwards(f"{self.folder}/{COMMITS_NAME}"))

    def metrics_backwards(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the metrics, newest first; the file is read only as far as needed."""
        return (line for _, line in read_lines_backwards(f"{self.folder}/{METRICS_NAME}"))

    def append_commit(self, commit: CheckpointCommit) -> None:
        """Record a published checkpoint: from here on it counts."""
        append_line(self.commits, asdict(commit))

    def read_heartbeats(self) -> list[Heartbeat]:
        """Return the newest heartbeat of every node, by name; unreadable ones are left out."""
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
