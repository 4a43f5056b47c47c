"""Which checkpoints count, and from which one the next attempt starts. Standard library only.

The line of a run: the commits of its attempts in order, each attempt cutting off what lies beyond the base
that it froze at its begin, and each commit what lies beyond it. A commit of an older attempt that appears after
a newer one began is cut off by that one's base, whatever it holds.

Whoever starts from the line needs its newest end. So it is read from there: a run's age costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from relayrun.control.rundir.read_once import ReadOnce
from relayrun.control.rundir.records import AttemptStart, CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import fsync_directory, path_exists, unused_name


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
        """`begun`: see `begun_backwards`, where somebody reads it besides."""
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
