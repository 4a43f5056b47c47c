"""Checkpoints that were left behind because they are not whole, and what is wrong with them. Standard library only."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from relayrun.rundir.lineage import Durable, Lineage, fault
from relayrun.rundir.records import Commit
from relayrun.rundir.run import Run

_NAME = re.compile(r"iter_(\d+)-(\d+)")
"""The name of a folder in quarantine: its iteration, and the attempt that put it there."""


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
            commit = _commit(run, iteration, before=attempt)
            why = None if commit is None else fault(replace(commit, path=str(folder)))
            found[iteration] = LeftBehind(
                iteration=iteration, path=str(folder), why=why or "it was not whole", quarantined=True
            )
    return [found[iteration] for iteration in sorted(found, reverse=True)]


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
    matches = [(match, folder / name) for name in names if (match := _NAME.match(name))]
    return sorted((int(match[1]), int(match[2]), path) for match, path in matches)


def _commit(run: Run, iteration: int, *, before: int) -> Commit | None:
    """The record of the checkpoint that attempt `before` moved away."""
    for number in reversed(run.attempt_numbers()):
        if number < before:
            for commit in reversed(run.attempt(number).read_commits()):
                if commit.iteration == iteration:
                    return commit
    return None
