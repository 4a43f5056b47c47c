"""The records of the mirror: copies of a run's checkpoints in a second place, complete after any kill.

mirror/policy.json      the second place and its retention, by the newest submit
mirror/copying.json     the checkpoint that is being copied, which the run's rules do not remove meanwhile
mirror/verified.jsonl   one line per checkpoint that was read back in full; no rule removes the newest one
mirror/last.json        the end of the last pass, for people
mirror/lock mirror/log  held by the process that copies; the log of the copier beside a job

In the second place, FOLDER/PROJECT/NAME/:

mirror.json             the run of these copies
copies.jsonl            one line per verified copy (its claim), and one per withdrawal
iter_0000100/           a copy; it does not count without its line
.staging/ .removing/ .damaged/   copies that are being made, are being removed, or lost their claim

A claim is written after the copy has its name, and withdrawn before the copy loses it.

Standard library only: `relayrun.train.mirror` reads and writes these files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.control.rundir.checkpoint_records import Lineage, checkpoint_fault
from relayrun.control.rundir.records import CheckpointCommit, Record
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import leads_out, read_json_lines, read_json_lines_backwards

MIRROR_POLICY_NAME = "mirror/policy.json"


@dataclass(frozen=True, kw_only=True)
class MirrorPolicy(Record):
    """`policy.json`: where a run's checkpoints are copied to, by the newest submit."""

    folder: str
    """The folder of this run's copies."""
    id: str
    """Unique id of the run, which its copies carry."""
    keep_last: int
    keep_every: int | None = None
    program: list[str]
    """The copier's command; the run directory is appended."""


@dataclass(frozen=True, kw_only=True)
class MirrorOwner(Record):
    """`mirror.json` in the second place: the run of these copies."""

    id: str
    run: str
    """The run directory at the last pass."""


@dataclass(frozen=True, kw_only=True)
class CheckpointCopy(Record):
    """A line of `copies.jsonl`: a verified copy, or its withdrawal."""

    name: str
    iteration: int
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of every file, by name, as in its commit."""
    checksum: str | None = None
    """Its commit's root checksum; None for a program whose checkpoints have none."""
    hashes: dict[str, str] = field(default_factory=dict)
    """XXH3-128 of each file if there is no root checksum."""
    saved: float = 0.0
    """Time of its commit, in seconds since 1970."""
    time: float
    gone: str | None = None
    """The reason of its withdrawal; None: the copy counts."""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> CheckpointCopy:
        """Also raise TypeError if a name leads out of the place, where anybody may have written it."""
        copy = super().of(value)
        if "/" in copy.name or any(map(leads_out, (copy.name, *copy.files))):
            raise TypeError("a name that leads elsewhere")
        return copy

    def is_of(self, commit: CheckpointCommit) -> bool:
        """Return whether it holds the bytes of this commit, and not of another commit of the same iteration."""
        known = (self.iteration, self.files, self.checksum)
        return known == (commit.iteration, commit.files, commit.checksum) and (
            self.checksum is not None or self.saved == commit.time
        )

    def as_commit(self, folder: Path) -> CheckpointCommit:
        """Return the copy in this folder as a commit."""
        return CheckpointCommit(
            iteration=self.iteration,
            path=f"{folder}/{self.name}",
            consumed_samples=-1,
            time=self.saved,
            seconds=0.0,
            files=self.files,
            checksum=self.checksum,
        )


@dataclass(frozen=True, kw_only=True)
class CopyInProgress(Record):
    """`copying.json`: the checkpoint that is being copied."""

    iteration: int
    time: float


@dataclass(frozen=True, kw_only=True)
class VerifiedCheckpoint(Record):
    """A line of `verified.jsonl`: a checkpoint of this run whose every byte was read back."""

    iteration: int
    checksum: str | None
    saved: float
    """Time of its commit, in seconds since 1970."""
    time: float

    def is_on(self, line: Lineage) -> bool:
        """Return whether its commit still counts."""
        commits = (counted.commit for counted in line.backwards())
        commit = next((each for each in commits if each.iteration <= self.iteration), None)
        if commit is None:
            return False
        return (commit.iteration, commit.checksum, commit.time) == (self.iteration, self.checksum, self.saved)


@dataclass(frozen=True, kw_only=True)
class MirrorPass(Record):
    """`last.json`: the state of the mirror at the end of the last pass."""

    time: float
    iteration: int | None
    """The newest iteration that counts and has a whole copy; None: none."""
    behind: int
    complaint: str | None = None
    good_time: float | None = None
    """Time of the last pass without a complaint; None: no such pass."""
    seen: bool = True
    """The second place could be read; otherwise `iteration` and `copies` are those of the pass before."""
    copies: int = 0
    """Number of claimed copies, including those whose checkpoint no longer counts."""


def write_copy_in_progress(run: Run, iteration: int | None, *, now: float) -> None:
    """Protect a checkpoint from the rules of the run while it is copied; None ends the protection. Raises OSError."""
    path = run.mirror / "copying.json"
    if iteration is None:
        path.unlink(missing_ok=True)
    else:
        CopyInProgress(iteration=iteration, time=now).write(path)


def record_verified(run: Run, commit: CheckpointCommit, *, now: float) -> None:
    """Record that every byte of a checkpoint was read back and is correct. Raises OSError."""
    run.mirror.mkdir(exist_ok=True)
    record = VerifiedCheckpoint(iteration=commit.iteration, checksum=commit.checksum, saved=commit.time, time=now)
    record.append(run.mirror / "verified.jsonl")


def iterations_held_by_mirror(run: Run) -> set[int]:
    """Return iterations that no rule may remove: the one being copied, the last verified one. Raises RunDirError."""
    copying = CopyInProgress.read(run.mirror / "copying.json")
    found = set() if copying is None else {copying.iteration}
    line = Lineage(run)
    verified = (VerifiedCheckpoint.of(entry) for _, entry in read_json_lines_backwards(run.mirror / "verified.jsonl"))
    try:
        newest = next((each.iteration for each in verified if each.is_on(line)), None)
    except TypeError as error:
        raise RunDirError(f"unreadable record: {error}", where=run.mirror / "verified.jsonl") from None
    return found if newest is None else found | {newest}


def read_owner(place: Path) -> MirrorOwner | None:
    """Return the owner of the copies in a second place; None if nobody owns it, or it is away. Raises RunDirError."""
    return MirrorOwner.read(place / "mirror.json")


def copy_fault(place: Path, copy: CheckpointCopy) -> str | None:
    """Return the fault of a copy as far as names and sizes show; None if it is whole."""
    return checkpoint_fault(copy.as_commit(place))


def read_copies(place: Path) -> dict[str, CheckpointCopy]:
    """Return the claimed copies in a second place, by name. Raises OSError, and RunDirError for a damaged record."""
    return {name: copy for name, copy in newest_claims(place).items() if copy.gone is None}


def newest_claims(place: Path) -> dict[str, CheckpointCopy]:
    """Return the copies by name, withdrawn ones included. Raises like `read_copies`."""
    found: dict[str, CheckpointCopy] = {}
    for line in read_json_lines(place / "copies.jsonl"):
        try:
            copy = CheckpointCopy.of(line)
        except TypeError as error:
            raise RunDirError(f"unreadable record: {error}", where=place / "copies.jsonl") from None
        found[copy.name] = copy
    return found


def copies_newest_first(found: Mapping[str, CheckpointCopy]) -> list[CheckpointCopy]:
    """Return the copies by falling iteration."""
    return sorted(found.values(), key=lambda copy: copy.iteration, reverse=True)
