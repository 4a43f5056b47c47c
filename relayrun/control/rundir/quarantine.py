"""Checkpoints that were left behind because they are not whole, and what is wrong with them. Standard library only.

A torn one is found by its sizes before an attempt begins (`Lineage.quarantine`), one with other bytes by the ranks that
load it. Both are moved, never deleted; why, stands beside the second kind, since sizes do not tell it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from relayrun.control.rundir.lineage import Lineage, ResumePoint, checkpoint_fault
from relayrun.control.rundir.records import CheckpointCommit, Record
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import fsync_directory, unused_name

_QUARANTINE_NAME = re.compile(r".*?(\d+)\D*-(\d{4,})(?:-\d+)?")
"""The name of what lies in quarantine: its iteration, and the attempt that put it there."""


@dataclass(frozen=True, kw_only=True)
class QuarantineReason(Record):
    """`.quarantine/iter_0000100-0007.json`: why a checkpoint lies in the folder beside it."""

    iteration: int
    attempt: int
    """Which put it there."""
    why: str
    time: float
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class BrokenCheckpoint:
    """A checkpoint beyond the durable one from which nothing can start."""

    iteration: int
    path: str
    why: str
    quarantined: bool
    """Whether an attempt has moved it out of the way already."""


def newer_broken_checkpoints(run: Run, line: Lineage, durable: ResumePoint) -> list[BrokenCheckpoint]:
    """Checkpoints of later iterations than the durable one that are not whole, the newest first."""
    found = {
        entry.iteration: BrokenCheckpoint(iteration=entry.iteration, path=entry.path, why=why, quarantined=False)
        for entry in _commits_after(line, durable)
        if (why := checkpoint_fault(entry)) is not None
    }
    for iteration, attempt, folder in _quarantine_folders(run):
        if iteration > durable.iteration:
            found[iteration] = _broken_checkpoint(run, iteration, attempt, folder)
    return [found[iteration] for iteration in sorted(found, reverse=True)]


def quarantine_checkpoint(run: Run, base: ResumePoint, *, attempt: int, why: str) -> Path:
    """Move a checkpoint of this run out of the way, with the reason beside it; return where it lies now.

    A folder that is away already (another program moved it) is none to move: then the reason alone is written.
    """
    assert base.path is not None
    folder = run.checkpoints / ".quarantine"
    folder.mkdir(exist_ok=True)
    target = unused_name(folder, f"{Path(base.path).name}-{attempt:04}")
    reason = QuarantineReason(iteration=base.iteration, attempt=attempt, why=why, time=time.time())
    reason.write(target.with_name(f"{target.name}.json"))  # first: no kill leaves a folder there that nobody explains
    if Path(base.path).is_dir():
        os.rename(base.path, target)
        fsync_directory(folder)
        fsync_directory(run.checkpoints)
    return target


def quarantined_checkpoints(run: Run) -> list[BrokenCheckpoint]:
    """Every checkpoint in quarantine with its reason, the newest first."""
    return [_broken_checkpoint(run, *entry) for entry in reversed(_quarantine_folders(run))]


def _broken_checkpoint(run: Run, iteration: int, attempt: int, folder: Path) -> BrokenCheckpoint:
    why = None
    with contextlib.suppress(RunDirError):  # a damaged reason hides no checkpoint
        reason = QuarantineReason.read(folder.with_name(f"{folder.name}.json"))
        why = None if reason is None else reason.why
    if why is None and (commit := _commit_before(run, iteration, before=attempt)) is not None:
        why = checkpoint_fault(replace(commit, path=str(folder)))
    return BrokenCheckpoint(iteration=iteration, path=str(folder), why=why or "it was not whole", quarantined=True)


def _commits_after(line: Lineage, durable: ResumePoint) -> list[CheckpointCommit]:
    found = []
    for counted in line.backwards():
        if counted.commit.iteration <= durable.iteration:
            break
        found.append(counted.commit)
    return found


def _quarantine_folders(run: Run) -> list[tuple[int, int, Path]]:
    """(iteration, attempt that moved it, folder), in the order of the attempts."""
    folder = run.checkpoints / ".quarantine"
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    matches = [(match, folder / name) for name in names if (match := _QUARANTINE_NAME.fullmatch(name))]
    return sorted((int(match[1]), int(match[2]), path) for match, path in matches)


def _commit_before(run: Run, iteration: int, *, before: int) -> CheckpointCommit | None:
    """The record of the checkpoint that attempt `before` moved away."""
    for number in reversed(run.attempt_numbers()):
        if number < before:
            for commit in reversed(run.attempt(number).read_commits()):
                if commit.iteration == iteration:
                    return commit
    return None
