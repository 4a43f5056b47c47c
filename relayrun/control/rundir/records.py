"""The records of an attempt, each with one writer.

| file | writer | read by |
|---|---|---|
| begin.json | supervisor, before the ranks start; rank 0 if its base is damaged | ranks, later attempts |
| started.json | rank 0, before its first step | people, benchmarks |
| commits.jsonl | rank 0, after a checkpoint is published | supervisor, later attempts |
| outcome.json | rank 0, when it leaves on purpose | supervisor |
| end.json | supervisor, after the ranks have gone | later attempts, people |

An attempt freezes its base (the checkpoint it starts from) in begin.json; `rundir.checkpoint_records` tells from the
records which checkpoints count. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from relayrun.errors import RunDirError, user_name
from relayrun.files import read_bytes, write_json

AttemptOutcomeName = Literal["done", "saved", "exit", "fatal"]
"""How rank 0 left: the last step is durable; saved to be resumed; saved because of the exit trigger
(the chain ends); cannot go on, and another attempt would fail in the same way."""

ChainEndState = Literal["done", "stopped", "failed"]
"""How a chain ends: all steps are done; a person or a setting stops it; an error stops it."""


@dataclass(frozen=True)
class ChainEnd:
    """How and why a chain ends: the content of STOP. Programs read the state, people read the reason."""

    state: ChainEndState
    reason: str


@dataclass(frozen=True)
class _RecordFields:
    """The fields of a kind of record."""

    names: frozenset[str]
    required: frozenset[str]
    """Those without a default."""
    blank: dict[str, Any]
    """Their defaults, in order; None where a record gives another value in any case."""
    factories: tuple[tuple[str, Callable[[], Any]], ...]
    """What makes the defaults that no two records share."""

    @classmethod
    def of(cls, kind: type[Record]) -> _RecordFields:
        every = fields(kind)
        factories = tuple((each.name, each.default_factory) for each in every if each.default_factory is not MISSING)
        optional = {each.name for each in every if each.default is not MISSING} | {name for name, _ in factories}
        return cls(
            names=frozenset(each.name for each in every),
            required=frozenset(each.name for each in every) - optional,
            blank={each.name: None if each.default is MISSING else each.default for each in every},
            factories=factories,
        )


_RECORD_FIELDS: dict[type, _RecordFields] = {}


def foreign_owner(path: Path | str) -> int | None:
    """Number of the user, if another one, whose file this is, or whose file the link there leads to. Raises OSError."""
    owners = {os.lstat(path).st_uid, os.stat(path).st_uid} - {os.geteuid()}
    return max(owners, default=None)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A dataclass that is one JSON object."""

    @classmethod
    def read(cls, path: Path | str) -> Self | None:
        """Read it; None where there is no file. Raises RunDirError if it is not what it should be."""
        try:
            text = read_bytes(path)
        except FileNotFoundError:
            return None
        return cls.parse(text, where=path)

    @classmethod
    def read_own(cls, path: Path | str) -> Self | None:
        """The same for a record that names programs or addresses: RunDirError too where the file is another user's."""
        record = cls.read(path)
        if record is not None and (owner := foreign_owner(path)) is not None:
            raise RunDirError(
                f"this file belongs to {user_name(owner)}: nothing that it names is started or written to",
                where=path,
                hint="let its owner do it, or submit the run yourself with --take-over",
            )
        return record

    @classmethod
    def parse(cls, text: bytes, *, where: Path | str) -> Self:
        """From the bytes of the file `where`. Raises RunDirError if they are not what they should be."""
        try:
            return cls.of(json.loads(text.decode()))
        except (ValueError, TypeError) as error:
            raise RunDirError(f"unreadable record: {error}", where=where) from None

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """From a JSON object; names this version does not know are left out.

        The fields are set at once: the constructor of a frozen dataclass sets each on its own, which takes four times
        as long as to read the file, and many runs have thousands.
        """
        if type(value) is not dict and not isinstance(value, Mapping):
            raise TypeError(f"{type(value).__name__} instead of an object")
        form = _RECORD_FIELDS.get(cls) or _RECORD_FIELDS.setdefault(cls, _RecordFields.of(cls))
        if not form.names >= value.keys():
            value = {name: item for name, item in value.items() if name in form.names}
        if not form.required <= value.keys():
            return cls(**value)  # says what is missing
        record = object.__new__(cls)
        values = vars(record)
        values.update(form.blank)
        for name, make in form.factories:
            values[name] = make()
        values.update(value)
        return record

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))


@dataclass(frozen=True, kw_only=True)
class AttemptStart(Record):
    """`begin.json`: what an attempt starts from. Times are seconds since 1970."""

    attempt: int
    job_id: str
    job_name: str
    nodes: str
    """Slurm's list of the nodes, compressed."""
    config_revision: int
    base_iteration: int
    """Iteration of the checkpoint to start from; 0: from the beginning."""
    base_path: str | None
    """Its folder; None where base_iteration is 0."""
    rewound: bool = False
    """Newer checkpoints were whole and were left behind on purpose, by a person or by policy: what follows need not
    be what the attempts before computed."""
    start_time: float
    job_end_time: float | None
    """When the time limit is reached; None without a limit."""
    job_submit_time: float | None = None
    """When the job was queued. None here and below: the scheduler does not say, or an earlier version wrote this."""
    job_eligible_time: float | None = None
    """When nothing but a lack of nodes kept the job from starting any more."""
    job_start_time: float | None = None
    """When the job was given its nodes."""
    script_time: float | None = None
    """When the first lines of the job's script ran."""
    previous_job_end: float | None = None
    """When the job of the attempt before this one ended, where that was another job."""
    lead: float
    """Seconds before job_end_time at which rank 0 saves and leaves."""
    evaluation_seconds: float | None = None
    """What evaluations of earlier attempts took, at the 95th percentile of the newest; None: there was none."""
    lead_floor: float = 0.0
    lead_ceiling: float = float("inf")
    """Bounds of the lead that rank 0 measures while it runs."""
    log: str | None = None
    """The batch script's standard error, where it is a file: Slurm's and the starter's words."""
    log_offset: int = 0
    """Its size when the attempt began."""
    output_offset: int = 0
    """The size of the standard output beside it."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of sbatch for the job, which hold for its successors."""
    previous_end: str | None = None
    """Why the attempt before this one ended, in words."""


@dataclass(frozen=True, kw_only=True)
class StartTimes(Record):
    """`started.json`: rank 0's way to its first step. Times are seconds since 1970."""

    process: float
    """Its program began, with a bare Python."""
    imported: float
    """The training program, torch and megatron-core are imported."""
    initialised: float
    """Ranks have met, data are checked, model and optimizer are made."""
    loaded: float
    """The checkpoint, if there is one, is in place."""


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
    """Bytes of every file below `path`, by relative name: a torn checkpoint can be told without torch."""
    checksum: str | None = None
    """XXH3-128 of its checksums.json, which has those of all its other files; None before there were any."""


@dataclass(frozen=True, kw_only=True)
class AttemptOutcome(Record):
    """`outcome.json`: rank 0 left on purpose."""

    outcome: AttemptOutcomeName
    reason: str
    iteration: int
    time: float


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Record):
    """`heartbeat/<node>.json`: a sign of life of one node, written by its first rank at most once a second.

    Where agents look for hangs it is written once a minute, for people and for whoever asks whether the attempt lives.
    """

    node: str
    iteration: int
    phase: str
    """What the node does since `time`: start, step, save or evaluation."""
    time: float
    step_p95: float | None
    """Seconds, over the last steps; None before there are any."""
    save_p95: float | None
    interval: float = 0.0
    """Seconds from one to the next where they are rare: a node that goes on is silent for so long; else 0."""

    @property
    def usual(self) -> float:
        """Seconds that what the node does now usually takes; 0 where that is not known."""
        known = {"step": self.step_p95, "save": self.save_p95}
        if self.interval:  # what it did then it may have left since
            return max(seconds or 0.0 for seconds in known.values())
        return known["save" if self.phase == "save" else "step"] or 0.0


@dataclass(frozen=True, kw_only=True)
class SuccessorJob(Record):
    """`successor.json`: the job that waits behind an attempt's."""

    job_id: str
    time: float
    """When it was queued, in seconds since 1970."""
    cancelled: bool = False
    """Somebody has cancelled it, so that the chain ends with this attempt."""
    cancelled_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankFailure(Record):
    """`failures/rank-0012.json`: a rank's own words on its end, if it had the time to say them."""

    rank: int
    node: str
    error: str
    """Type and message."""
    time: float
    repeats: bool = False
    """Every attempt would meet it, whatever its nodes: it lies in the data, the config, the code or the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Hang(Record):
    """`hang.json`: an attempt stood still, and the supervisor or the agents' coordinator ended its ranks."""

    iteration: int
    phase: str
    seconds: float
    silent: list[int]
    """Ranks that did not answer when asked for their stacks."""
    asked: bool = True
    """Whether they were asked."""
    late: dict[str, str] = field(default_factory=dict)
    """Ranks that the others wait for, with the function or the section that each was in."""
    time: float

    @property
    def culprit(self) -> int | None:
        """The rank for which the others wait, or that alone did not answer; None where it is not one."""
        who = [int(rank) for rank in self.late] or self.silent
        return who[0] if len(who) == 1 else None

    @property
    def words(self) -> str:
        """One line for people: how long nothing moved, where, which ranks did not answer, and which are late."""
        who = f"ranks {', '.join(map(str, self.silent))} did not answer" if self.silent else "all ranks answered"
        if self.late:
            who += ", others wait for " + ", ".join(f"rank {rank} in {place}" for rank, place in self.late.items())
        what = f"hang: no progress for {self.seconds:.0f} s in {self.phase} after iteration {self.iteration}"
        return f"{what}; {who}" if self.asked else what


@dataclass(frozen=True, kw_only=True)
class AttemptEnd(Record):
    """What the supervisor saw when the ranks had gone."""

    attempt: int
    cause: str
    """One of done, saved, exit, fatal, failed, cancelled."""
    reason: str
    exit_code: int
    durable_iteration: int
    progress: bool
    """Whether this attempt raised the durable iteration."""
    end_time: float
    action: str = ""
    """What was decided: stop, continue, retry or end."""
    chain_end: ChainEndState | None = None
    """How the chain ends with this attempt; None if the chain goes on."""
    delay: int = 0
    """Seconds after which a retry begins."""

    @property
    def verdict(self) -> ChainEnd | None:
        """How and why the chain ends with this attempt; None if the chain goes on."""
        return None if self.chain_end is None else ChainEnd(self.chain_end, self.reason)
