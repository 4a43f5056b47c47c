"""An attempt: one start of the run inside one Slurm job. Standard library only."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from relayrun.control.rundir.records import AttemptEnd, AttemptStart, ChangedJobEnd, CheckpointCommit, Heartbeat, Record
from relayrun.errors import RunDirError
from relayrun.files import (
    FileIdentity,
    file_identity,
    read_json_lines,
    read_json_lines_backwards,
    read_with_identity,
    text_of,
)

R = TypeVar("R", bound=Record)
COMMITS_NAME, METRICS_NAME = "commits.jsonl", "metrics.jsonl"
SECRET_BYTES = 32


class PathIn:
    """An attribute for a file or folder: `path / name` of its object, computed once."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __set_name__(self, owner: type, attribute: str) -> None:
        self._attribute = attribute

    def __get__(self, instance: Any, owner: type) -> Path:
        if instance is None:
            return Path(self._name)
        found: Path = instance.path / self._name
        vars(instance)[self._attribute] = found
        return found


@dataclass(frozen=True)
class Attempt:
    """One start of the run inside one Slurm job: the names of its files, and its records. The object caches begin.json
    and end.json until the files change. All other files may change while the attempt lives and are always read anew."""

    folder: str
    _kept: dict[str, tuple[FileIdentity, Record]] = field(default_factory=dict, init=False, repr=False, compare=False)

    begin = PathIn("begin.json")
    """Written by the supervisor before the ranks start; see `read_begin` and `fall_back`."""
    end = PathIn("end.json")
    """Written once by the supervisor after the ranks have gone; see `read_end`."""
    outcome = PathIn("outcome.json")
    """Written by rank 0 when it leaves on purpose."""
    commits = PathIn(COMMITS_NAME)
    """One line per published checkpoint, by rank 0."""
    rollbacks = PathIn("rollbacks.jsonl")
    """One line per rollback, by rank 0 before the rollback happens; see `rundir.restarts`."""
    failed_restarts = PathIn("restarts.jsonl")
    """One line per failed restart inside the attempt's job, by the coordinator; see `rundir.restarts`."""
    node_health = PathIn("node_health.jsonl")
    """Findings about nodes, by the coordinator or ranks; see `rundir.node_health`."""
    hand_over = PathIn("hand_over.json")
    """The end of a foreign program's restart, between the coordinator and the watch; see `rundir.restarts`."""
    restart_base = PathIn("restart.json")
    """The base of a foreign program's newest restart, by the coordinator; see `rundir.restarts`."""
    metrics = PathIn(METRICS_NAME)
    """One line per iteration, by rank 0."""
    failed_saves = PathIn("failed_saves.jsonl")
    """One line per failed save (iteration, error, time), by rank 0."""
    hashes = PathIn("hashes.jsonl")
    """The hashes of a foreign program's checkpoints, beside the ranks; see `trainers.checkpoint_hashes`."""
    started = PathIn("started.json")
    """Times of rank 0's way to its first step; see `rundir.records.StartTimes`."""
    data = PathIn("data.json")
    """The data order of this attempt (phases, data sets, counts) at its start, by rank 0."""
    job_end = PathIn("job_end.json")
    """The end of the job if it has changed since the begin; see `rundir.records.ChangedJobEnd`."""
    stop = PathIn("stop")
    """Its existence asks the ranks to save and leave; its text gives the reason."""
    heartbeats = PathIn("heartbeat")
    """One file per node, by its first rank; see `rundir.records.Heartbeat`."""
    failures = PathIn("failures")
    """One file per rank that failed and could record it; see `rundir.records.RankFailure`."""
    agents = PathIn("agents")
    """One log per node, by its agent if each agent is a step of its own: the job's log ends with the batch host."""
    setup = PathIn("setup.sh")
    """The script with the lines of `job.setup`; only if there are some."""
    setup_failed = PathIn("setup_failed")
    """The failed line of `job.setup` and its exit code."""
    not_started = PathIn("not_started")
    """The reason in words if the batch script did not start the ranks."""
    retry_successor = PathIn("successor.owed")
    """The scheduler's words if no successor could be queued; it exists until `watch` has queued one."""
    successor = PathIn("successor.json")
    """The job that waits behind this attempt's, and whether it was cancelled; see `rundir.records.SuccessorJob`."""
    replaced_by = PathIn("made_place")
    """Id of the job that replaces this attempt's job, which the chain itself cancels. Several agents may write
    `successor` at the same time; only this file is never overwritten with an older state."""
    client = PathIn("client")
    """A folder of messages between a foreign program and the supervisor; see `relayrun.control.trainers`."""
    unmatched = PathIn("unmatched")
    """Settings of a foreign program that fit nothing of what it prints and writes, one per line."""
    data_paths = PathIn("data_paths")
    """The shards of a run with Megatron-LM if they are too many for a command line."""
    guard_log = PathIn("guard.log")
    """The log of the guard; see `chain.watch`."""
    secret = PathIn("secret")
    """The key of all connections inside the attempt's job, by the supervisor; see `make_secret`."""
    refused_connections = PathIn("refused_connections.json")
    """Connections without proof of the secret, by the coordinator; see `rundir.records.RefusedConnections`."""
    surroundings = PathIn("surroundings.json")
    """Space, memory kills and names after the attempt failed; see `chain.surroundings`."""
    hang = PathIn("hang.json")
    """Written by the supervisor when it ends an attempt that hangs."""

    @cached_property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def number(self) -> int:
        return int(self.path.name)

    def read_begin(self) -> AttemptStart | None:
        """Return begin.json; None while the attempt has not begun. Raises RunDirError if the record is damaged."""
        return self._once(AttemptStart, "begin.json")

    def started_record(self) -> AttemptStart:
        """Return begin.json. Raises RunDirError if the attempt has not begun, or if the record is damaged."""
        if (begin := self.read_begin()) is None:
            raise RunDirError("this attempt has not begun", where=self.begin)
        return begin

    def job_end_time(self, begin: AttemptStart) -> float | None:
        """Return the time at which the job ends, as far as it is known now; None without a limit."""
        try:
            changed = ChangedJobEnd.read(self.job_end)
        except (OSError, RunDirError):  # a damaged record changes nothing
            changed = None
        return begin.job_end_time if changed is None else changed.time

    def fall_back(self, iteration: int, path: str | None) -> AttemptStart:
        """Record that the attempt starts from another checkpoint than begin.json names; return the new record."""
        changed = replace(self.started_record(), base_iteration=iteration, base_path=path)
        changed.write(self.begin)
        return changed

    def read_end(self) -> AttemptEnd | None:
        """Return end.json; None while the end is not recorded. Raises RunDirError if the record is damaged."""
        return self._once(AttemptEnd, "end.json")

    def make_secret(self) -> None:
        """Create the secret, readable by the job's owner alone. Raises OSError, also if a file has its name."""
        fd = os.open(self.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))

    def read_secret(self) -> bytes:
        """Return the secret. Raises RunDirError if another user could have read or written it."""
        try:
            fd = os.open(self.secret, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise RunDirError(f"the attempt's secret cannot be read: {error.strerror}", where=self.secret) from None
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
                raise RunDirError("the attempt's secret is not a file of this user alone", where=self.secret)
            secret = file.read(SECRET_BYTES + 1)
        if len(secret) != SECRET_BYTES:
            raise RunDirError(f"the attempt's secret has not {SECRET_BYTES} bytes", where=self.secret)
        return secret

    def read_commits(self) -> list[CheckpointCommit]:
        """Return the checkpoints that the attempt has published so far, oldest first."""
        return [self.commit_of(line) for line in read_json_lines(self.commits)]

    def commit_of(self, line: Mapping[str, Any]) -> CheckpointCommit:
        """Parse a line of commits.jsonl and move its absolute path to the present place of the run directory."""
        commit = CheckpointCommit.of(line)
        folder, name = os.path.split(commit.path)
        if os.path.basename(folder) != "checkpoints":
            return commit
        here = os.path.dirname(os.path.dirname(self.folder))
        path = f"{here}/checkpoints/{name}"
        return commit if path == commit.path else replace(commit, path=path)

    def commits_backwards(self) -> Iterator[CheckpointCommit]:
        """Yield the commits, newest first; the file is read only as far as needed."""
        return (self.commit_of(line) for _, line in read_json_lines_backwards(f"{self.folder}/{COMMITS_NAME}"))

    def metrics_backwards(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the metrics, newest first; the file is read only as far as needed."""
        return (line for _, line in read_json_lines_backwards(f"{self.folder}/{METRICS_NAME}"))

    def append_commit(self, commit: CheckpointCommit) -> None:
        """Record a published checkpoint: from here on it counts."""
        commit.append(self.commits)

    def read_unmatched(self) -> list[str]:
        """Return the settings that fit nothing of what the attempt's program prints and writes, in words."""
        return (text_of(self.unmatched) or "").splitlines()

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
