"""Checkpoints that a foreign program must not see: old ones are removed, incomplete ones are quarantined.

A checkpoint leaves its name by a rename, so a kill at any point leaves it whole or out of sight. The watch removes
the files in short slices, beside its other duties.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from relayrun.control.rundir import campaign, evaluations, mirror
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.base import FoundCheckpoint
from relayrun.files import fsync_directory, unused_name


def quarantine_checkpoints(
    folder: Path, paths: Sequence[Path], *, attempt: int, fault: Callable[[Path], str | None]
) -> list[str]:
    """Move checkpoints of `folder` to its `.quarantine`. Returns what was moved, in words.

    `attempt`: which moves them. `fault`: what is wrong with one, None where nothing is.
    """
    moved = []
    for path in paths:
        away = folder / ".quarantine"
        away.mkdir(exist_ok=True)
        target = unused_name(away, f"{path.name}-{attempt:04}")
        why = fault(path) or "no attempt has it on record"
        os.rename(path, target)
        moved.append(f"{path} ({why}) moved to {target}")
    if moved:
        fsync_directory(folder)
    return moved


REMOVE_SECONDS = 0.5
"""How long one look removes files: the watch has more to do."""


class CheckpointRetention:
    """Keeps a run's newest checkpoints, and those of every so many iterations.

    Args:
        begin: of the attempt whose observer this is; an attempt behind which another has begun removes nothing.
        keep_last: how many of the newest stay, at least 1.
        keep_every: multiples of it stay for good; None: none do.
        tracked: the iteration that the program would load next, which always stays; None where it says none.
    """

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        begin: AttemptStart,
        *,
        keep_last: int,
        keep_every: int | None = None,
        tracked: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._base = begin.base_iteration
        self._keep_last = max(1, keep_last)
        self._keep_every = keep_every
        self._tracked = tracked
        self._folder = run.checkpoints / ".removing"

    def look(self, found: Sequence[FoundCheckpoint], *, saving: bool) -> None:
        """Take checkpoints that are too old out of sight, and remove a bit of what is. Raises OSError.

        `found`: the whole ones, rising. `saving`: whether the program writes one now; then nothing goes.
        """
        if not saving:
            self._take_away(found)
        self._remove(time.monotonic() + REMOVE_SECONDS)

    def finish(self, found: Sequence[FoundCheckpoint]) -> None:
        """The same when the program has trained all it was to train: no look comes behind this one."""
        self._take_away(found)
        self._remove(None)

    def _take_away(self, found: Sequence[FoundCheckpoint]) -> None:
        found = [checkpoint for checkpoint in found if os.path.lexists(checkpoint.path)]  # a program may remove its own
        if len(found) <= self._keep_last or self._run.attempt_numbers()[-1] != self._attempt.number:
            return
        own = {commit.iteration for commit in self._attempt.read_commits()}
        line = [checkpoint for checkpoint in found if checkpoint.iteration <= self._base or checkpoint.iteration in own]
        old = [checkpoint for checkpoint in line[: -self._keep_last] if not self._is_multiple(checkpoint.iteration)]
        if not old:
            return
        stays = (
            evaluations.iterations_held_by_evaluations(self._run)
            | mirror.iterations_held_by_mirror(self._run)
            | campaign.iterations_held_by_campaign(self._run)
            | {self._tracked()}
        )
        for checkpoint in old:
            if checkpoint.iteration in stays:
                continue
            self._folder.mkdir(exist_ok=True)
            path = Path(checkpoint.path)
            os.rename(path, unused_name(self._folder, path.name))
            fsync_directory(path.parent)

    def _is_multiple(self, iteration: int) -> bool:
        return bool(self._keep_every) and iteration % (self._keep_every or 1) == 0

    def _remove(self, deadline: float | None) -> None:
        """Remove what is out of sight; until `deadline` (monotonic), but always something. Links are not followed."""
        with contextlib.suppress(FileNotFoundError):  # nothing is, or somebody else removes it too
            for folder, folders, names in os.walk(self._folder, topdown=False):
                for name in names:
                    os.unlink(os.path.join(folder, name))
                    if deadline is not None and time.monotonic() > deadline:
                        return
                for name in folders:
                    path = os.path.join(folder, name)
                    if os.path.islink(path):
                        os.unlink(path)
                    else:
                        os.rmdir(path)
