"""Which checkpoints count, and from which one the next attempt starts. Standard library only.

The line of a run: the commits of its attempts in order, each attempt cutting off what lies beyond the base
that it froze at its begin. A commit of an older attempt that appears after a newer one began is cut off by
that one's base, whatever it holds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from relayrun.errors import RunDirError
from relayrun.files import fsync_directory
from relayrun.rundir.records import Begin, Commit
from relayrun.rundir.run import Run


@dataclass(frozen=True, kw_only=True)
class Durable:
    """A checkpoint from which an attempt can start; iteration 0 without a path is the beginning."""

    iteration: int
    path: str | None


BEGINNING = Durable(iteration=0, path=None)


def line(run: Run) -> list[Commit]:
    """Every commit that counts, rising, whether or not its folder is still there."""
    found: list[Commit] = []
    for number in run.attempt_numbers():
        attempt = run.attempt(number)
        begin = Begin.read(attempt.begin)
        if begin is None:  # killed before it began: it owns nothing
            continue
        found = [commit for commit in found if commit.iteration <= begin.base_iteration]
        if begin.base_path is not None and not any(commit.iteration == begin.base_iteration for commit in found):
            found.append(
                Commit(
                    iteration=begin.base_iteration,
                    path=begin.base_path,
                    consumed_samples=-1,
                    time=begin.start_time,
                    seconds=0.0,
                )
            )
        found += attempt.read_commits()
    return found


def is_own(run: Run, base: Durable) -> bool:
    """Whether this run made the checkpoint; a run may begin with one of another run, or of a conversion."""
    return base.path is not None and Path(os.path.realpath(base.path)).parent == Path(os.path.realpath(run.checkpoints))


def fault(commit: Commit) -> str | None:
    """What is wrong with a checkpoint on disk, as far as names and sizes tell; None if it is whole."""
    if not Path(commit.path).is_dir():
        return "missing"
    for name, size in commit.files.items():
        try:
            found = os.stat(os.path.join(commit.path, name)).st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes, not {size}"
    return None


def durable(run: Run) -> Durable:
    """The newest whole checkpoint of the line.

    Raises RunDirError if the line has checkpoints and none of them is whole: to start from the beginning
    then would throw the run away, and the file system may only be away for a while.
    """
    commits_that_count = line(run)
    for commit in reversed(commits_that_count):
        if fault(commit) is None:
            return Durable(iteration=commit.iteration, path=commit.path)
    if commits_that_count:
        newest = commits_that_count[-1]
        raise RunDirError(
            f"no checkpoint of this run is whole; the newest, {newest.path}: {fault(newest)}",
            where=run.checkpoints,
            hint="put one back (quarantined ones lie in checkpoints/.quarantine), or start a new run",
        )
    return BEGINNING


def chosen_by_hand(run: Run) -> Durable | None:
    """The checkpoint that a person set in the tracker file: an older, whole one of the line.

    The program writes the tracker right after a commit, so a tracker that is older than the newest commit
    is what a kill between the two left, and means nothing.
    """
    counted = line(run)
    try:
        written = run.tracker.stat().st_mtime
        value = int(run.tracker.read_text(encoding="utf-8").strip())
    except (FileNotFoundError, ValueError):
        return None
    if not counted or value >= counted[-1].iteration or written <= counted[-1].time:
        return None
    for commit in counted:
        if commit.iteration == value and fault(commit) is None:
            return Durable(iteration=commit.iteration, path=commit.path)
    return None


def put_aside(run: Run, base: Durable, *, attempt: int) -> list[str]:
    """Move checkpoints out of the way that lie beyond `base`: torn ones to .quarantine, whole ones to .superseded.

    Nothing is deleted. Returns what was moved, in words.
    """
    moved: list[str] = []
    for commit in line(run):
        if commit.iteration <= base.iteration or not Path(commit.path).is_dir():
            continue
        if not is_own(run, Durable(iteration=commit.iteration, path=commit.path)):
            continue
        what = fault(commit)
        folder = run.checkpoints / (".superseded" if what is None else ".quarantine")
        folder.mkdir(exist_ok=True)
        target = folder / f"{Path(commit.path).name}-{attempt:04}"
        os.rename(commit.path, target)
        moved.append(f"{commit.path} ({what or 'newer than the chosen one'}) moved to {target}")
    if moved:
        fsync_directory(run.checkpoints)
    return moved
