"""The checkpoints on record: which ones count, where the next attempt resumes, which ones are quarantined.

The lineage of a run is the commits of its attempts in order. Each attempt cuts off every commit beyond the base that it
froze at its start, and each commit cuts off every commit beyond itself. A commit of an older attempt that appears after
a newer attempt has started is cut off by the base of the newer one.

A reader needs the newest end of the lineage, so it is read backwards: the cost does not grow with the age of the run.

Broken checkpoints are moved to checkpoints/.quarantine, never deleted. `Lineage.quarantine` finds a torn checkpoint by
the sizes of its files before an attempt starts; the ranks that load a checkpoint find wrong bytes, and a record beside
the folder then says why. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Generic, TypeVar

from relayrun.control.rundir.records import AttemptStart, CheckpointCommit, Record
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import fsync_directory, path_exists, unused_name

T = TypeVar("T")


class ReadOnce(Generic[T]):
    """The items of an iterator, to be gone through any number of times, also while another goes through them."""

    def __init__(self, items: Iterable[T]) -> None:
        self._read: list[T] = []
        self._rest = iter(items)

    def __iter__(self) -> Iterator[T]:
        number = 0
        while True:
            if number == len(self._read):
                found = next(self._rest, None)
                if found is None:
                    return
                self._read.append(found)
            yield self._read[number]
            number += 1


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A checkpoint from which an attempt can start; iteration 0 without a path is the beginning."""

    iteration: int
    path: str | None


BEGINNING = ResumePoint(iteration=0, path=None)


@dataclass(frozen=True, kw_only=True)
class LineageCommit:
    """A commit of the line."""

    attempt: int
    commit: CheckpointCommit
    published: bool
    """Whether this attempt published it. Otherwise the attempt began with it, and no attempt of this run has it on
    record: another run's checkpoint, or a conversion's."""


class Lineage:
    """The line of a run as it is when it is read: back from the newest attempt, each record once, as far as asked for.

    Whoever waits for changes makes a new one each time.
    """

    def __init__(self, run: Run, *, begun: Iterable[tuple[int, AttemptStart]] | None = None) -> None:
        """`begun`: see `started_attempts_backwards`, where somebody reads it besides."""
        self._run = run
        self._commits = ReadOnce(_lineage_backwards(run, started_attempts_backwards(run) if begun is None else begun))

    def backwards(self) -> Iterator[LineageCommit]:
        """Every commit that counts, the newest first: iterations fall. Raises RunDirError if a record is damaged."""
        return iter(self._commits)

    def line(self) -> list[CheckpointCommit]:
        """Every commit that counts, rising, whether or not its folder is still there."""
        return [counted.commit for counted in self.backwards()][::-1]

    def newest_saves(self, most: int) -> list[float]:
        """Seconds of the newest saves, at most so many, oldest first."""
        seconds = (counted.commit.seconds for counted in self.backwards())
        return list(islice((value for value in seconds if value > 0), most))[::-1]

    def durable(self) -> ResumePoint:
        """The newest whole checkpoint of the line.

        Raises RunDirError if the line has checkpoints and none of them is whole: to start from the beginning
        then would throw the run away, and the file system may only be away for a while.
        """
        newest: CheckpointCommit | None = None
        own = False
        for counted in self.backwards():
            commit = counted.commit
            newest = newest or commit
            own = own or counted.published
            if own and not counted.published and not is_checkpoint_of(self._run, _resume_point_at(commit)):
                break  # where another run's checkpoint, with which this one began, is the only whole one left
            if checkpoint_fault(commit) is None:
                return _resume_point_at(commit)
        if newest is not None:
            raise RunDirError(
                f"no checkpoint of this run is whole; the newest, {newest.path}: {checkpoint_fault(newest)}",
                where=self._run.checkpoints,
                hint="put one back (quarantined ones lie in checkpoints/.quarantine), or start a new run",
            )
        return BEGINNING

    def chosen_by_hand(self) -> ResumePoint | None:
        """The checkpoint that a person set in the tracker file: an older, whole one of the line.

        The program writes the tracker right after a commit, so a tracker that is older than the newest commit
        is what a kill between the two left, and means nothing.
        """
        newest = next(self.backwards(), None)
        try:
            written = self._run.tracker.stat().st_mtime
            value = int(self._run.tracker.read_text(encoding="utf-8").strip())
        except (FileNotFoundError, ValueError):
            return None
        if newest is None or value >= newest.commit.iteration or written <= newest.commit.time:
            return None
        for commit in (counted.commit for counted in self.backwards()):
            if commit.iteration < value:
                break
            if commit.iteration == value and checkpoint_fault(commit) is None:
                return ResumePoint(iteration=commit.iteration, path=commit.path)
        return None

    def quarantine(self, base: ResumePoint, *, attempt: int) -> list[str]:
        """Move checkpoints out of the way that lie beyond `base`: torn ones to .quarantine, whole ones to .superseded.

        Nothing is deleted. Returns what was moved, in words, oldest first.
        """
        beyond = takewhile(lambda commit: commit.iteration > base.iteration, (c.commit for c in self.backwards()))
        moved: list[str] = []
        for commit in reversed(list(beyond)):
            if not Path(commit.path).exists():
                continue
            if not is_checkpoint_of(self._run, ResumePoint(iteration=commit.iteration, path=commit.path)):
                continue
            what = checkpoint_fault(commit)
            folder = self._run.checkpoints / (".superseded" if what is None else ".quarantine")
            folder.mkdir(exist_ok=True)
            target = unused_name(folder, f"{Path(commit.path).name}-{attempt:04}")
            os.rename(commit.path, target)
            moved.append(f"{commit.path} ({what or 'newer than the chosen one'}) moved to {target}")
        if moved:
            fsync_directory(self._run.checkpoints)
        return moved


def _resume_point_at(commit: CheckpointCommit) -> ResumePoint:
    return ResumePoint(iteration=commit.iteration, path=commit.path)


def started_attempts_backwards(run: Run) -> Iterator[tuple[int, AttemptStart]]:
    """The attempts that have begun, the newest first: one that was killed before it began owns nothing."""
    for number in reversed(run.attempt_numbers()):
        if (begin := run.attempt(number).read_begin()) is not None:
            yield number, begin


def _lineage_backwards(run: Run, begun: Iterable[tuple[int, AttemptStart]]) -> Iterator[LineageCommit]:
    limit = float("inf")
    """The highest iteration that still counts."""
    base: LineageCommit | None = None
    """What the last of them began with, until the commit turns up that made it."""
    for number, begin in begun:
        attempt = run.attempt(number)
        for commit in attempt.commits_backwards():
            if commit.iteration > limit:
                continue
            if base is not None and commit.iteration < base.commit.iteration:
                yield base
            base = None
            yield LineageCommit(attempt=number, commit=commit, published=True)
            limit = min(limit, commit.iteration - 1)  # it went back: a rewind that met a damaged checkpoint
        if base is not None and begin.base_iteration < base.commit.iteration:
            yield base
            base = None
        if begin.base_path is not None and begin.base_iteration <= limit:
            commit = CheckpointCommit(
                iteration=begin.base_iteration,
                path=begin.base_path,
                consumed_samples=-1,
                time=begin.start_time,
                seconds=0.0,
            )
            base = LineageCommit(attempt=number, commit=commit, published=False)
        limit = min(limit, begin.base_iteration)
        if not limit:
            break
    if base is not None:
        yield base


def lineage_commits(run: Run) -> list[CheckpointCommit]:
    """Every commit that counts now, rising, whether or not its folder is still there."""
    return Lineage(run).line()


def resume_point(run: Run) -> ResumePoint:
    """The newest whole checkpoint now; see `Lineage.durable`."""
    return Lineage(run).durable()


def is_checkpoint_of(run: Run, base: ResumePoint) -> bool:
    """Whether this run made the checkpoint; a run may begin with one of another run, or of a conversion.

    What lies in its folder is its own, also where that is a link: a person may have moved a checkpoint to another disk.
    """
    if base.path is None:
        return False
    return os.path.realpath(os.path.dirname(base.path)) == os.path.realpath(run.checkpoints)


def newest_commit_at(path: str | os.PathLike[str]) -> CheckpointCommit | None:
    """The newest commit of the checkpoint that lies in this folder of whatever run; None where no run knows it.

    Raises RunDirError if a record is damaged.
    """
    folder = Path(os.path.realpath(path))
    if folder.parent.name != "checkpoints":
        return None
    run = Run(folder.parent.parent)
    for number in reversed(run.attempt_numbers()):
        attempt = run.attempt(number)
        for commit in attempt.commits_backwards():
            if os.path.realpath(commit.path) == str(folder):
                return commit
    return None


def checkpoint_fault(commit: CheckpointCommit) -> str | None:
    """What is wrong with a checkpoint on disk, as far as names and sizes tell; None if it is whole."""
    if not path_exists(commit.path):
        return "missing"
    for name, size in commit.files.items():
        try:
            found = os.stat(commit.path if name == "." else os.path.join(commit.path, name)).st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes, not {size}"
    return None


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
