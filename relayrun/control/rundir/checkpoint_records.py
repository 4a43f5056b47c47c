"""The checkpoints on record: which ones count, where the next attempt resumes, which ones are quarantined.

The lineage of a run is the commits of its attempts in order. Each attempt cuts off every commit beyond the base that it
froze at its start, and each commit cuts off every commit beyond itself; so a late commit of an older attempt does not
count. The lineage is read backwards: the cost does not grow with the age of the run.

Broken checkpoints are moved to checkpoints/.quarantine, never deleted. `Lineage.quarantine` finds a torn checkpoint by
the sizes of its files before an attempt starts; the ranks that load a checkpoint find wrong bytes, and a record beside
the folder then says why. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile, tee
from pathlib import Path
from typing import Generic, TypeVar

from relayrun.control.rundir.records import AttemptStart, CheckpointCommit, Record
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import fsync_directory, path_exists, stat_of, unused_name

T = TypeVar("T")


class ReadOnce(Generic[T]):
    """The items of an iterator, iterable any number of times, even while another iteration is under way."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)

    def __iter__(self) -> Iterator[T]:
        self._items, found = tee(self._items)
        return found


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A checkpoint from which an attempt can start; iteration 0 without a path is the beginning."""

    iteration: int
    path: str | None

    @classmethod
    def of(cls, commit: CheckpointCommit) -> ResumePoint:
        return cls(iteration=commit.iteration, path=commit.path)


BEGINNING = ResumePoint(iteration=0, path=None)


@dataclass(frozen=True, kw_only=True)
class LineageCommit:
    """A commit of the lineage."""

    attempt: int
    commit: CheckpointCommit
    published: bool
    """This attempt published it. Otherwise the attempt began with a checkpoint of which this run has no record: another
    run's, or a converted one."""


class Lineage:
    """The lineage of a run as it is now, read back from the newest attempt, each record once and only if needed."""

    def __init__(self, run: Run, *, begun: Iterable[tuple[int, AttemptStart]] | None = None) -> None:
        """`begun`: the result of `started_attempts_backwards`, if the caller reads it too."""
        self._run = run
        self._commits = ReadOnce(_lineage_backwards(run, started_attempts_backwards(run) if begun is None else begun))

    def backwards(self) -> Iterator[LineageCommit]:
        """Yield every commit that counts, newest first: iterations fall. Raises RunDirError if a record is damaged."""
        return iter(self._commits)

    def line(self) -> list[CheckpointCommit]:
        """Return every commit that counts, by rising iteration, even if its folder is gone."""
        return [counted.commit for counted in self.backwards()][::-1]

    def beyond(self, iteration: int) -> Iterator[CheckpointCommit]:
        """Yield the commits of later iterations that count, newest first."""
        commits = (counted.commit for counted in self.backwards())
        return takewhile(lambda commit: commit.iteration > iteration, commits)

    def newest_saves(self, most: int) -> list[float]:
        """Return the seconds of at most `most` newest saves, oldest first."""
        seconds = (counted.commit.seconds for counted in self.backwards())
        return list(islice((value for value in seconds if value > 0), most))[::-1]

    def durable(self) -> ResumePoint:
        """Return the newest whole checkpoint of the lineage. Raises RunDirError if none of its checkpoints is whole: a
        start from the beginning would throw the run away, and the file system may only be away for a while."""
        newest: CheckpointCommit | None = None
        own = False
        for counted in self.backwards():
            commit = counted.commit
            newest = newest or commit
            own = own or counted.published
            if own and not counted.published and not is_checkpoint_of(self._run, ResumePoint.of(commit)):
                break  # only another run's checkpoint, with which this one began, is left
            if checkpoint_fault(commit) is None:
                return ResumePoint.of(commit)
        if newest is not None:
            raise RunDirError(
                f"no checkpoint of this run is whole; the newest, {newest.path}: {checkpoint_fault(newest)}",
                where=self._run.checkpoints,
                hint="put one back (quarantined ones lie in checkpoints/.quarantine), or start a new run",
            )
        return BEGINNING

    def chosen_by_hand(self) -> ResumePoint | None:
        """Return the checkpoint that a person chose in the tracker file: an older, whole one of the lineage. A tracker
        older than the newest commit only shows a kill between the commit and its update, and is ignored."""
        newest = next(self.backwards(), None)
        try:
            written = self._run.tracker.stat().st_mtime
            value = int(self._run.tracker.read_text(encoding="utf-8").strip())
        except (FileNotFoundError, ValueError):
            return None
        if newest is None or value >= newest.commit.iteration or written <= newest.commit.time:
            return None
        found = (commit for commit in self.beyond(value - 1) if commit.iteration == value)
        return next((ResumePoint.of(commit) for commit in found if checkpoint_fault(commit) is None), None)

    def quarantine(self, base: ResumePoint, *, attempt: int) -> list[str]:
        """Move torn checkpoints beyond `base` to .quarantine, whole ones to .superseded; return a line for each."""
        moved: list[str] = []
        for commit in reversed(list(self.beyond(base.iteration))):
            if not (Path(commit.path).exists() and is_checkpoint_of(self._run, ResumePoint.of(commit))):
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


def started_attempts_backwards(run: Run) -> Iterator[tuple[int, AttemptStart]]:
    """Yield the attempts that have begun, newest first: an attempt that was killed before it began owns nothing."""
    for number in reversed(run.attempt_numbers()):
        if (begin := run.attempt(number).read_begin()) is not None:
            yield number, begin


def _lineage_backwards(run: Run, begun: Iterable[tuple[int, AttemptStart]]) -> Iterator[LineageCommit]:
    limit = float("inf")
    """The highest iteration that still counts."""
    base: LineageCommit | None = None
    """The checkpoint from which the newer attempt began, until its commit is found."""
    for number, begin in begun:
        attempt = run.attempt(number)
        for commit in attempt.commits_backwards():
            if commit.iteration > limit:
                continue
            if base is not None and commit.iteration < base.commit.iteration:
                yield base
            base = None
            yield LineageCommit(attempt=number, commit=commit, published=True)
            # iterations fall in an attempt after a rollback that met a damaged checkpoint
            limit = min(limit, commit.iteration - 1)
        if base is not None and begin.base_iteration < base.commit.iteration:
            yield base
            base = None
        if begin.base_path is not None and begin.base_iteration <= limit:
            iteration, path, began = begin.base_iteration, begin.base_path, begin.start_time
            commit = CheckpointCommit(iteration=iteration, path=path, consumed_samples=-1, time=began, seconds=0.0)
            base = LineageCommit(attempt=number, commit=commit, published=False)
        limit = min(limit, begin.base_iteration)
        if not limit:
            break
    if base is not None:
        yield base


def resume_point(run: Run) -> ResumePoint:
    """Return the newest whole checkpoint now; see `Lineage.durable`."""
    return Lineage(run).durable()


def is_checkpoint_of(run: Run, base: ResumePoint) -> bool:
    """Return whether this run made the checkpoint; a run may begin with another run's checkpoint, or a converted one.
    The run's folder may be a link: a person may have moved it to another disk. A program may make folders in it."""
    if base.path is None:
        return False
    below = os.path.relpath(os.path.realpath(os.path.dirname(base.path)), os.path.realpath(run.checkpoints))
    return below == "." or not below.startswith(".")


def newest_commit_at(path: str | os.PathLike[str]) -> CheckpointCommit | None:
    """Return the newest commit of the checkpoint in this folder of any run; None without one. Raises RunDirError."""
    folder = Path(os.path.realpath(path))
    if folder.parent.name != "checkpoints":
        return None
    run = Run(folder.parent.parent)
    attempts = map(run.attempt, reversed(run.attempt_numbers()))
    commits = (commit for attempt in attempts for commit in attempt.commits_backwards())
    return next((commit for commit in commits if os.path.realpath(commit.path) == str(folder)), None)


def checkpoint_fault(commit: CheckpointCommit) -> str | None:
    """Return the fault of a checkpoint on disk, as far as names and sizes show; None if it is whole."""
    if not path_exists(commit.path):
        return "missing"
    for name, size in commit.files.items():
        found = stat_of(commit.path if name == "." else os.path.join(commit.path, name))
        if found is None:
            return f"{name} is missing"
        if not stat.S_ISREG(found.st_mode):  # a reader of a pipe would wait for ever
            return f"{name} is no file"
        if found.st_size != size:
            return f"{name} has {found.st_size} bytes, not {size}"
    return None


_QUARANTINE_NAME = re.compile(r".*?(\d+)\D*-(\d{4,})(?:-\d+)?")
"""Name of an entry in quarantine: its iteration, and the attempt that moved it."""


@dataclass(frozen=True, kw_only=True)
class QuarantineReason(Record):
    """`.quarantine/iter_0000100-0007.json`: why `attempt` moved a checkpoint there. `time` is seconds since 1970."""

    iteration: int
    attempt: int
    why: str
    time: float


@dataclass(frozen=True, kw_only=True)
class BrokenCheckpoint:
    """A checkpoint beyond the durable one from which no attempt can start."""

    iteration: int
    path: str
    why: str
    quarantined: bool


def newer_broken_checkpoints(run: Run, line: Lineage, durable: ResumePoint) -> list[BrokenCheckpoint]:
    """Return broken checkpoints of later iterations than the durable one, newest first."""
    found = {
        entry.iteration: BrokenCheckpoint(iteration=entry.iteration, path=entry.path, why=why, quarantined=False)
        for entry in line.beyond(durable.iteration)
        if (why := checkpoint_fault(entry)) is not None
    }
    for iteration, attempt, folder in _quarantine_folders(run):
        if iteration > durable.iteration:
            found[iteration] = _broken_checkpoint(run, iteration, attempt, folder)
    return [found[iteration] for iteration in sorted(found, reverse=True)]


def quarantine_checkpoint(checkpoints: Path, base: ResumePoint, *, attempt: int, why: str) -> Path:
    """Move one of the `checkpoints` to quarantine, unless it is gone already, and write the reason; return its new
    path."""
    assert base.path is not None
    folder = checkpoints / ".quarantine"
    folder.mkdir(exist_ok=True)
    target = unused_name(folder, f"{Path(base.path).name}-{attempt:04}")
    reason = QuarantineReason(iteration=base.iteration, attempt=attempt, why=why, time=time.time())
    reason.write(target.with_name(f"{target.name}.json"))  # first: a kill must not leave a folder without a reason
    if Path(base.path).is_dir():
        os.rename(base.path, target)
        fsync_directory(folder)
        fsync_directory(checkpoints)
    return target


def quarantined_checkpoints(run: Run) -> list[BrokenCheckpoint]:
    """Return every checkpoint in quarantine with its reason, newest first."""
    return [_broken_checkpoint(run, *entry) for entry in reversed(_quarantine_folders(run))]


def _broken_checkpoint(run: Run, iteration: int, attempt: int, folder: Path) -> BrokenCheckpoint:
    why = None
    with contextlib.suppress(RunDirError):  # a damaged reason must not hide the checkpoint
        reason = QuarantineReason.read(folder.with_name(f"{folder.name}.json"))
        why = None if reason is None else reason.why
    if why is None and (commit := _commit_before(run, iteration, before=attempt)) is not None:
        why = checkpoint_fault(replace(commit, path=str(folder)))
    return BrokenCheckpoint(iteration=iteration, path=str(folder), why=why or "it was not whole", quarantined=True)


def _quarantine_folders(run: Run) -> list[tuple[int, int, Path]]:
    """Return (iteration, attempt that moved it, folder), in the order of the attempts."""
    folder = run.checkpoints / ".quarantine"
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    matches = [(match, folder / name) for name in names if (match := _QUARANTINE_NAME.fullmatch(name))]
    return sorted((int(match[1]), int(match[2]), path) for match, path in matches)


def _commit_before(run: Run, iteration: int, *, before: int) -> CheckpointCommit | None:
    """Return the record of the checkpoint that attempt `before` moved away."""
    attempts = (run.attempt(number) for number in reversed(run.attempt_numbers()) if number < before)
    commits = (commit for attempt in attempts for commit in attempt.commits_backwards())
    return next((commit for commit in commits if commit.iteration == iteration), None)
