"""The records of an attempt, each with one writer.

| file | writer | read by |
|---|---|---|
| begin.json | supervisor, before the ranks start; rank 0 if its base is damaged | ranks, later attempts |
| started.json | rank 0, before its first step | people, benchmarks |
| commits.jsonl | rank 0, after a checkpoint is published | supervisor, later attempts |
| outcome.json | rank 0, when it leaves on purpose | supervisor |
| end.json | supervisor, after the ranks have gone | later attempts, people |

An attempt freezes its base (the checkpoint it starts from) in begin.json; `rundir.checkpoint_records` derives from the
records which checkpoints count. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from relayrun.errors import RunDirError
from relayrun.files import append_line, read_bytes, write_json
from relayrun.trust import read_trusted

if TYPE_CHECKING:  # newer than the oldest Python of a batch script
    from typing import Self

AttemptOutcomeName = Literal["done", "saved", "exit", "fatal"]
"""Rank 0 leaves because the last step is durable; with a save to be resumed; for the exit trigger, which ends the
chain; or because no attempt can continue."""

ChainEndState = Literal["done", "stopped", "failed"]
"""End of a chain: all steps are done; a person or a setting stops it; an error stops it."""


@dataclass(frozen=True)
class ChainEnd:
    """The end of a chain, as in STOP. Programs read the state, people read the reason."""

    state: ChainEndState
    reason: str


_RecordFields = tuple[set[str], set[str], dict[str, Any], dict[str, Callable[[], Any]]]
_RECORD_FIELDS: dict[type, _RecordFields] = {}


def _record_fields(kind: type[Record]) -> _RecordFields:
    """Return a record's names, its names without default, a value for each name, and the factories of defaults."""
    every = fields(kind)
    blank = {each.name: None if each.default is MISSING else each.default for each in every}
    factories = {each.name: each.default_factory for each in every if each.default_factory is not MISSING}
    required = {each.name for each in every if each.default is MISSING} - factories.keys()
    return set(blank), required, blank, factories


@dataclass(frozen=True, kw_only=True)
class Record:
    """A dataclass that is one JSON object."""

    @classmethod
    def read(cls, path: Path | str) -> Self | None:
        """Read the record; None if there is no file. Raises RunDirError if it is damaged."""
        try:
            text = read_bytes(path)
        except FileNotFoundError:
            return None
        return cls.parse(text, where=path)

    @classmethod
    def read_trusted(cls, folder: Path | str, name: str) -> Self | None:
        """Read a record that names programs or addresses: also raises UntrustedError, see `relayrun.trust`."""
        try:
            text = read_trusted(folder, name)
        except FileNotFoundError:
            return None
        return cls.parse(text, where=f"{folder}/{name}")

    @classmethod
    def parse(cls, text: bytes, *, where: Path | str) -> Self:
        """Parse the bytes of the file `where`. Raises RunDirError if they are damaged."""
        try:
            return cls.of(json.loads(text.decode()))
        except (ValueError, TypeError) as error:
            raise RunDirError(f"unreadable record: {error}", where=where) from None

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """Make the record from a JSON object; unknown names are left out. The fields are set at once: the constructor
        of a frozen dataclass takes four times as long as reading the file."""
        if type(value) is not dict and not isinstance(value, Mapping):
            raise TypeError(f"{type(value).__name__} instead of an object")
        form = _RECORD_FIELDS.get(cls) or _RECORD_FIELDS.setdefault(cls, _record_fields(cls))
        names, required, blank, factories = form
        if not names >= value.keys():
            value = {name: item for name, item in value.items() if name in names}
        if not required <= value.keys():
            return cls(**value)  # the constructor's error names the missing field
        record = object.__new__(cls)
        values = vars(record)
        values.update(blank)
        for name, make in factories.items():
            values[name] = make()
        values.update(value)
        return record

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    def append(self, path: Path) -> None:
        """Append the record to a file of JSON lines."""
        append_line(path, asdict(self))


@dataclass(frozen=True, kw_only=True)
class AttemptStart(Record):
    """`begin.json`: the start of an attempt. Times are seconds since 1970."""

    attempt: int
    job_id: str
    job_name: str
    nodes: str
    """Slurm's compressed node list."""
    config_revision: int
    base_iteration: int
    """Iteration of the checkpoint to start from; 0: from the beginning."""
    base_path: str | None
    """Its folder; None if base_iteration is 0."""
    rolled_back: bool = False
    """Newer checkpoints were whole and were abandoned on purpose, by a person or by policy: the new iterations may
    differ from those of earlier attempts."""
    start_time: float
    job_end_time: float | None
    """Time at which the time limit is reached, the reservation ends, or a maintenance begins, as known at the begin;
    None without a limit. `Attempt.job_end_time` is the time that is known now."""
    clock_ahead: float = 0.0
    """Seconds by which the clock of the batch host, that of `job_end_time`, is ahead of Slurm's; 0 if they agree."""
    job_submit_time: float | None = None
    """Time of its submit or requeue. None here and below: the scheduler does not report it."""
    job_eligible_time: float | None = None
    """Time from which only a lack of nodes kept the job from starting."""
    job_start_time: float | None = None
    """Time at which the job got its nodes."""
    script_time: float | None = None
    """Time at which the first lines of the job's script ran."""
    previous_job_end: float | None = None
    """End of the job of the previous attempt, if that was another job."""
    grace_period: float
    """Seconds before job_end_time at which rank 0 saves and leaves."""
    evaluation_seconds: float | None = None
    """95th percentile of the duration of the newest evaluations; None: there was none."""
    min_grace_period: float = 0.0
    max_grace_period: float = float("inf")
    """Bounds of the grace period that rank 0 measures while it runs."""
    log: str | None = None
    """The batch script's standard error, if it is a file: lines of Slurm and of the task starter."""
    log_offset: int = 0
    """Its size when the attempt began."""
    output_offset: int = 0
    """The size of the standard output beside it."""
    folder: str | None = None  # the working directory of the job
    options: dict[str, str] = field(default_factory=dict)
    """Options of sbatch that the job has, as Slurm reports them: facts of this attempt, which no other job requests."""
    previous_end: str | None = None
    """The reason for the end of the previous attempt."""


@dataclass(frozen=True, kw_only=True)
class ChangedJobEnd(Record):
    """`job_end.json`: the job ends at another time than at its begin, by the watch."""

    time: float | None
    """Seconds since 1970; None: without a limit."""
    why: str
    """What ends the job then, in words; empty: its time limit."""


@dataclass(frozen=True, kw_only=True)
class StartTimes(Record):
    """`started.json`: times of rank 0's way to its first step, in seconds since 1970.

    `process`: its program began with a bare Python. `imported`: torch, megatron-core and the training program are
    imported. `initialised`: ranks have met, data are checked, model and optimizer are made. `loaded`: the checkpoint is
    loaded.
    """

    process: float
    imported: float
    initialised: float
    loaded: float


@dataclass(frozen=True, kw_only=True)
class CheckpointCommit(Record):
    """A published checkpoint."""

    iteration: int
    path: str
    consumed_samples: int
    time: float
    seconds: float
    """From the start of the save to the rename."""
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of every file below `path`, by relative name: they show a torn checkpoint without torch."""
    checksum: str | None = None
    """XXH3-128 of its checksums.json, which holds those of all other files; None if the checkpoint has no checksums."""


@dataclass(frozen=True, kw_only=True)
class AttemptOutcome(Record):
    """`outcome.json`: rank 0 left on purpose."""

    outcome: AttemptOutcomeName
    reason: str
    iteration: int
    time: float


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Record):
    """`heartbeat/<node>.json`: a sign of life of one node, by its first rank at most once a second; once a minute if
    agents look for hangs."""

    node: str
    iteration: int
    phase: str
    """Activity of the node since `time`: start, step, save or evaluation."""
    time: float
    step_p95: float | None
    """95th percentile of the last steps in seconds; None before the first."""
    save_p95: float | None
    interval: float = 0.0
    """Seconds between rare heartbeats: a healthy node is silent for so long; else 0."""

    @property
    def usual(self) -> float:
        """Usual seconds of the node's present activity; 0 if unknown."""
        known = {"step": self.step_p95, "save": self.save_p95}
        if self.interval:  # a rare heartbeat may show an activity that is over
            return max(seconds or 0.0 for seconds in known.values())
        return known["save" if self.phase == "save" else "step"] or 0.0


@dataclass(frozen=True, kw_only=True)
class SuccessorJob(Record):
    """`successor.json`: the job that was queued behind an attempt's at `time`, in seconds since 1970."""

    job_id: str
    time: float
    cancelled: bool = False
    """Somebody has cancelled it, so that the chain ends with this attempt."""
    cancelled_by: str | None = None
    fallback_owed: bool = False
    """Slurm did not answer when a fallback job was to be queued behind it: the watch tries again."""


@dataclass(frozen=True, kw_only=True)
class RankFailure(Record):
    """`failures/rank-0012.json`: a rank's own words on its end, if it had the time to write them."""

    rank: int
    node: str
    error: str
    time: float
    repeats: bool = False
    """Every attempt would meet it on any node: it lies in the data, the config, the code or the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Hang(Record):
    """`hang.json`: an attempt hung, and the supervisor or the agents' coordinator ended its ranks."""

    iteration: int
    phase: str
    seconds: float
    silent: list[int]
    """Ranks that did not answer when asked for their stacks."""
    asked: bool = True
    late: dict[str, str] = field(default_factory=dict)
    """Ranks that the others wait for, with the function or the section that each was in."""
    collectives: dict[str, str] = field(default_factory=dict)
    """The oldest unfinished collective of each rank, by torch's flight recorder."""
    time: float

    @property
    def culprit(self) -> int | None:
        """The rank for which the others wait, or that alone did not answer; None if it is not exactly one rank."""
        who = [int(rank) for rank in self.late] or self.silent
        return who[0] if len(who) == 1 else None

    @property
    def words(self) -> str:
        """One line for people: the duration, the phase, the silent ranks, and the late ranks."""
        who = f"ranks {', '.join(map(str, self.silent))} did not answer" if self.silent else "all ranks answered"
        if self.late:
            who += ", others wait for " + ", ".join(f"rank {rank} in {place}" for rank, place in self.late.items())
        for number, words in enumerate(dict.fromkeys(self.collectives.values())):
            ranks = ", ".join(rank for rank, own in self.collectives.items() if own == words)
            who += f"; {'' if number else 'by stacks/collectives-RANK.json '}ranks {ranks} wait in {words}"
        what = f"hang: no progress for {self.seconds:.0f} s in {self.phase} after iteration {self.iteration}"
        return f"{what}; {who}" if self.asked else what


@dataclass(frozen=True, kw_only=True)
class AttemptEnd(Record):
    """`end.json`: the supervisor's record after the ranks have gone."""

    attempt: int
    cause: str
    """One of done, saved, exit, fatal, failed, cancelled."""
    reason: str
    exit_code: int
    durable_iteration: int
    progress: bool
    """This attempt raised the durable iteration."""
    end_time: float
    action: str
    """The decision: stop, continue, retry or end."""
    chain_end: ChainEndState | None = None
    """State of the chain's end; None if the chain goes on."""
    delay: int = 0
    """Seconds after which a retry begins."""
    no_time: bool = False
    """The start and the grace period took nearly all of the job's time."""
    failure: str = ""
    """Name of the failure in the table of failures; empty without one."""
    failure_key: str = ""
    """Words that are equal for the same failure at the same place."""

    @property
    def verdict(self) -> ChainEnd | None:
        """The end of the chain with this attempt; None if the chain goes on."""
        return None if self.chain_end is None else ChainEnd(self.chain_end, self.reason)


@dataclass(frozen=True, kw_only=True)
class RefusedConnections(Record):
    """`refused_connections.json`: connections to the coordinator that did not prove that they belong to the job."""

    count: int
    address: str
    """Peer of the newest one."""
    why: str
    time: float

    @property
    def told(self) -> str:
        """One line for people."""
        return f"refused connections to this job: {self.count}; the newest from {self.address}: {self.why}"
