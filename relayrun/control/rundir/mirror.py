"""Copies of a run's checkpoints in a second place: which there are, and what a kill cannot make of them.

mirror/policy.json      where they go and which stay, by the newest submit
mirror/copying.json     the checkpoint that is being copied, which no rule of the run removes meanwhile
mirror/verified.jsonl   a line for each checkpoint that was read back in full; no rule removes the newest one
mirror/last.json        how the last pass ended, for people
mirror/lock mirror/log  held by the process that copies; what the one beside a job said

In the second place, FOLDER/PROJECT/NAME/:

mirror.json             which run's copies these are
copies.jsonl            a line for each copy once it was verified, and one where it is taken back
iter_0000100/           a copy; without its line it is none
.staging/ .removing/ .damaged/   what is being copied and removed, and what was a copy once

A claim is made after the copy has its name, and taken back before the copy loses it.

Below a URL, URL/PROJECT/NAME/, where nothing can be renamed or appended to:

mirror.json             the same
iter_0000100/           files of a copy, or of what may become one; without its claim it is none
copying/NAME.json       of which commit the files are that are being sent under this name
copies/NAME.json        the claim, an object for each copy, written when it was verified; with `gone` it is taken back
damaged/                what was a copy once

Standard library only: what reads and writes these is `relayrun.train.mirror`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from relayrun.control.rundir.checkpoint_records import Lineage, checkpoint_fault
from relayrun.control.rundir.records import CheckpointCommit, Record
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import append_line, read_lines, read_lines_backwards


@dataclass(frozen=True, kw_only=True)
class MirrorPolicy(Record):
    """`policy.json`: where a run's checkpoints are copied to, as the newest submit says."""

    folder: str
    """The folder of this run's copies, or its URL."""
    id: str
    """Made once for a run; another run's copies have another one."""
    keep_last: int
    keep_every: int | None = None
    megabytes_per_second: float | None = None
    """Copied at most; None: as fast as it goes."""
    program: list[str]
    """What copies, for the run directory that is named behind it."""


@dataclass(frozen=True, kw_only=True)
class MirrorOwner(Record):
    """`mirror.json` in the second place: which run's copies lie there."""

    id: str
    run: str
    """The run directory at the last pass."""


@dataclass(frozen=True, kw_only=True)
class CheckpointCopy(Record):
    """A line of `copies.jsonl`, or an object in `copies/`: a copy that was verified, or that is none any more."""

    name: str
    iteration: int
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of every file, by name, as its commit has them."""
    checksum: str | None = None
    """Its commit's root; None for a program whose checkpoints have none."""
    hashes: dict[str, str] = field(default_factory=dict)
    """XXH3-128 of each file, where there is no root."""
    saved: float = 0.0
    """When its commit was made, in seconds since 1970."""
    time: float
    """When it was verified, or taken back."""
    gone: str | None = None
    """Why it is no copy any more; None: it is one."""

    def is_of(self, commit: CheckpointCommit) -> bool:
        """Whether it holds the bytes of this commit, and not of another one of the same iteration."""
        known = (self.iteration, self.files, self.checksum)
        return known == (commit.iteration, commit.files, commit.checksum) and (
            self.checksum is not None or self.saved == commit.time
        )

    def as_commit(self, folder: Path | str) -> CheckpointCommit:
        """The copy in this folder, or below this URL, as if it were a checkpoint of a run."""
        return CheckpointCommit(
            iteration=self.iteration,
            path=f"{folder}/{self.name}",
            consumed_samples=-1,
            time=self.saved,
            seconds=0.0,
            files=self.files,
            checksum=self.checksum,
        )

    def fault(self, folder: Path) -> str | None:
        """Return what is wrong with it as far as names and sizes tell; None: it is whole. Raises OSError."""
        return checkpoint_fault(self.as_commit(folder))


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
    """When its commit was made, in seconds since 1970."""
    time: float
    """When it was read back."""

    def is_on(self, line: Lineage) -> bool:
        """Whether its commit still counts."""
        commits = (counted.commit for counted in line.backwards())
        commit = next((each for each in commits if each.iteration <= self.iteration), None)
        if commit is None:
            return False
        return (commit.iteration, commit.checksum, commit.time) == (self.iteration, self.checksum, self.saved)


@dataclass(frozen=True, kw_only=True)
class MirrorPass(Record):
    """`last.json`: how the mirror stood when the last pass ended."""

    time: float
    iteration: int | None
    """The newest one that counts and whose copy is whole; None: there is none."""
    behind: int
    """Checkpoints that should be there and are not."""
    complaint: str | None = None
    good_time: float | None = None
    """When a pass last ended without a complaint; None: none has."""
    seen: bool = True
    """Whether the place could be looked at; else `iteration` and `copies` are of the pass before."""
    copies: int = 0
    """How many copies were claimed there, those too that do not count any more."""


def mirror_folder(run: Run) -> Path:
    return run.path / "mirror"


def mirror_policy_path(run: Run) -> Path:
    return mirror_folder(run) / "policy.json"


def read_mirror_policy(run: Run) -> MirrorPolicy | None:
    """Where the run is copied to; None where it is not. Raises RunDirError where the record is damaged."""
    return MirrorPolicy.read(mirror_policy_path(run))


def read_last_pass(run: Run) -> MirrorPass | None:
    """How the last pass ended; None before there was one. Raises RunDirError where the record is damaged."""
    return MirrorPass.read(mirror_folder(run) / "last.json")


def write_last_pass(run: Run, last: MirrorPass) -> None:
    """Say how a pass ended. Raises OSError."""
    last.write(mirror_folder(run) / "last.json")


def write_copy_in_progress(run: Run, iteration: int | None, *, now: float) -> None:
    """Keep the rules of the run from a checkpoint while it is copied; None: from none. Raises OSError."""
    path = mirror_folder(run) / "copying.json"
    if iteration is None:
        path.unlink(missing_ok=True)
    else:
        CopyInProgress(iteration=iteration, time=now).write(path)


def record_verified(run: Run, commit: CheckpointCommit, *, now: float) -> None:
    """Put down that every byte of a checkpoint was read back and is what was saved. Raises OSError."""
    mirror_folder(run).mkdir(exist_ok=True)
    record = VerifiedCheckpoint(iteration=commit.iteration, checksum=commit.checksum, saved=commit.time, time=now)
    append_line(mirror_folder(run) / "verified.jsonl", asdict(record))


def iterations_held_by_mirror(run: Run) -> set[int]:
    """Iterations whose checkpoints no rule may remove: the one that is being copied, and the last verified one.

    Raises RunDirError where a record is damaged.
    """
    copying = CopyInProgress.read(mirror_folder(run) / "copying.json")
    found = set() if copying is None else {copying.iteration}
    line = Lineage(run)
    verified = (
        VerifiedCheckpoint.of(entry) for _, entry in read_lines_backwards(mirror_folder(run) / "verified.jsonl")
    )
    try:
        newest = next((each.iteration for each in verified if each.is_on(line)), None)
    except TypeError as error:
        raise RunDirError(f"unreadable record: {error}", where=mirror_folder(run) / "verified.jsonl") from None
    return found if newest is None else found | {newest}


def read_copies(place: Path) -> dict[str, CheckpointCopy]:
    """The copies that are claimed in a second place, by name. Raises OSError, and RunDirError for a damaged record."""
    return {name: copy for name, copy in _newest_claims(place).items() if copy.gone is None}


def withdrawn_copies(place: Path) -> set[str]:
    """Names of what once was a copy in a second place. Raises as `read_copies` does."""
    return {name for name, copy in _newest_claims(place).items() if copy.gone is not None}


def _newest_claims(place: Path) -> dict[str, CheckpointCopy]:
    found: dict[str, CheckpointCopy] = {}
    for line in read_lines(place / "copies.jsonl"):
        try:
            copy = CheckpointCopy.of(line)
        except TypeError as error:
            raise RunDirError(f"unreadable record: {error}", where=place / "copies.jsonl") from None
        found[copy.name] = copy
    return found


def claim_copy(place: Path, copy: CheckpointCopy) -> None:
    """Put a copy on record that has its name and was verified. Raises OSError."""
    append_line(place / "copies.jsonl", asdict(copy))


def withdraw_copy(place: Path, copy: CheckpointCopy, why: str, *, now: float) -> None:
    """Say that a copy is none any more, before anything is done to it. Raises OSError."""
    append_line(place / "copies.jsonl", asdict(replace(copy, time=now, gone=why)))


def iterations_to_keep(iterations: Iterable[int], *, keep_last: int, keep_every: int | None) -> set[int]:
    """Which of these stay: the newest ones, and multiples of `keep_every`."""
    rising = sorted(iterations)
    return set(rising[-keep_last:]) | {each for each in rising if keep_every and each % keep_every == 0}


def copies_newest_first(found: Mapping[str, CheckpointCopy]) -> list[CheckpointCopy]:
    """The copies, those of the newest iteration first."""
    return sorted(found.values(), key=lambda copy: copy.iteration, reverse=True)


def name_exists(path: Path) -> bool:
    """Whether something has this name, a link into nowhere too."""
    return os.path.lexists(path)
