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

from relayrun.control.rundir.lineage import Durable, Lineage, fault
from relayrun.control.rundir.records import Commit, Record
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import free_name, fsync_directory

_NAME = re.compile(r".*?(\d+)\D*-(\d{4,})(?:-\d+)?")
"""The name of what lies in quarantine: its iteration, and the attempt that put it there."""


@dataclass(frozen=True, kw_only=True)
class Reason(Record):
    """`.quarantine/iter_0000100-0007.json`: why a checkpoint lies in the folder beside it."""

    iteration: int
    attempt: int
    """Which put it there."""
    why: str
    time: float
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """A checkpoint beyond the durable one from which nothing can start."""

    iteration: int
    path: str
    why: str
    quarantined: bool
    """Whether an attempt has moved it out of the way already."""


def left_behind(run: Run, line: Lineage, durable: Durable) -> list[LeftBehind]:
    """Checkpoints of later iterations than the durable one that are not whole, the newest first."""
    found = {
        entry.iteration: LeftBehind(iteration=entry.iteration, path=entry.path, why=why, quarantined=False)
        for entry in _beyond(line, durable)
        if (why := fault(entry)) is not None
    }
    for iteration, attempt, folder in _quarantined(run):
        if iteration > durable.iteration:
            found[iteration] = _left_behind(run, iteration, attempt, folder)
    return [found[iteration] for iteration in sorted(found, reverse=True)]


def put_in_quarantine(run: Run, base: Durable, *, attempt: int, why: str) -> Path:
    """Move a checkpoint of this run out of the way, with the reason beside it; return where it lies now.

    A folder that is away already (another program moved it) is none to move: then the reason alone is written.
    """
    assert base.path is not None
    folder = run.checkpoints / ".quarantine"
    folder.mkdir(exist_ok=True)
    target = free_name(folder, f"{Path(base.path).name}-{attempt:04}")
    reason = Reason(iteration=base.iteration, attempt=attempt, why=why, time=time.time())
    reason.write(target.with_name(f"{target.name}.json"))  # first: no kill leaves a folder there that nobody explains
    if Path(base.path).is_dir():
        os.rename(base.path, target)
        fsync_directory(folder)
        fsync_directory(run.checkpoints)
    return target


def in_quarantine(run: Run) -> list[LeftBehind]:
    """Every checkpoint in quarantine with its reason, the newest first."""
    return [_left_behind(run, *entry) for entry in reversed(_quarantined(run))]


def _left_behind(run: Run, iteration: int, attempt: int, folder: Path) -> LeftBehind:
    why = None
    with contextlib.suppress(RunDirError):  # a damaged reason hides no checkpoint
        reason = Reason.read(folder.with_name(f"{folder.name}.json"))
        why = None if reason is None else reason.why
    if why is None and (commit := _commit(run, iteration, before=attempt)) is not None:
        why = fault(replace(commit, path=str(folder)))
    return LeftBehind(iteration=iteration, path=str(folder), why=why or "it was not whole", quarantined=True)


def _beyond(line: Lineage, durable: Durable) -> list[Commit]:
    found = []
    for counted in line.backwards():
        if counted.commit.iteration <= durable.iteration:
            break
        found.append(counted.commit)
    return found


def _quarantined(run: Run) -> list[tuple[int, int, Path]]:
    """(iteration, attempt that moved it, folder), in the order of the attempts."""
    folder = run.checkpoints / ".quarantine"
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    matches = [(match, folder / name) for name in names if (match := _NAME.fullmatch(name))]
    return sorted((int(match[1]), int(match[2]), path) for match, path in matches)


def _commit(run: Run, iteration: int, *, before: int) -> Commit | None:
    """The record of the checkpoint that attempt `before` moved away."""
    for number in reversed(run.attempt_numbers()):
        if number < before:
            for commit in reversed(run.attempt(number).read_commits()):
                if commit.iteration == iteration:
                    return commit
    return None
