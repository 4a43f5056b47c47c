"""Checkpoints that a foreign program must not see: old ones are removed, incomplete ones are quarantined.

A checkpoint leaves its name by a rename, so a kill at any point leaves it whole or out of sight. The watch removes
the files in short slices, beside its other duties.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from relayrun.control.rundir import campaign, evaluations, mirror
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.base import FoundCheckpoint
from relayrun.files import fsync_directory, leads_out, unused_name
from relayrun.leftovers import remove_path
from relayrun.trust import UntrustedError, refuse_untrusted


def quarantine_checkpoints(
    folder: Path, paths: Sequence[Path], *, attempt: int, fault: Callable[[Path], str | None]
) -> list[str]:
    """Move checkpoints of `folder` to its `.quarantine`; return one line per move. `attempt`: the attempt that moves
    them. `fault`: returns the defect of a checkpoint, None without one."""
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


KEPT_FILES = 2000
"""Files of the checkpoints that are kept besides the base: each is linked before the ranks start."""


@dataclass(frozen=True)
class ResumeGuard:
    """Keeps checkpoints from a program that may begin anew over them, until its first iteration shows where it began.

    Each file has a second name in `.kept`, which outlives a rename or a removal of the first, and is read-only for its
    owner, so that no program but root's writes into it.
    """

    folder: Path

    def keep(self, paths: Sequence[Path]) -> list[str]:
        """Keep checkpoints of the folder, the most important first; return a line if any of them is not kept."""
        self._all()  # raises UntrustedError
        count, refused = 0, []
        for path in paths:
            count += len(names := _files_of(path))
            if count > KEPT_FILES and path != paths[0]:
                refused.append(f"{path} and older ones: more than {KEPT_FILES:,} files")
                break
            kept = self.folder / ".kept" / quote(os.path.relpath(path, self.folder), safe="")
            try:
                for name in names:
                    (kept / name).parent.mkdir(parents=True, exist_ok=True)
                    os.link(path / name, kept / name)
            except OSError as error:
                remove_path(kept)
                refused.append(f"{path}: no hard link to its files: {error.strerror}")
            _set_writable(kept, False)
        return [f"not kept from a program that begins anew: {refused[0]}"] if refused else []

    def replaced(self) -> list[str]:
        """Return the names of kept checkpoints that the program wrote anew."""
        return [path.name for path, kept in self._all() if path.exists() and _differs(path, kept)]

    def release(self, *, restore: bool, attempt: int) -> list[str]:
        """Give the files back; return one line per action. `restore`: put back what has changed, unless the program is
        known to have resumed: then it may remove its old checkpoints."""
        done = []
        for path, kept in self._all():
            _set_writable(kept, True)
            if restore and _differs(path, kept):
                anew = [path] if path.exists() else []
                done += quarantine_checkpoints(
                    self.folder, anew, attempt=attempt, fault=lambda _: "it was written anew"
                )
                path.parent.mkdir(parents=True, exist_ok=True)
                os.rename(kept, path)
                done.append(f"{path} is there again as it was")
            remove_path(kept)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self.folder / ".kept")
        return done

    def _all(self) -> list[tuple[Path, Path]]:
        """Return each kept checkpoint with its second name. Raises UntrustedError if somebody else can have made it."""
        if not os.path.lexists(self.folder / ".kept"):
            return []
        refuse_untrusted(self.folder, [".kept"], shared=True)
        found = [(unquote(kept.name), kept) for kept in sorted(self.folder.glob(".kept/*"))]
        for name, kept in found:
            if kept.is_symlink() or leads_out(name):
                raise UntrustedError("this is no kept checkpoint", where=kept, hint="look at it and remove it")
        return [(self.folder / name, kept) for name, kept in found]


def _files_of(path: Path) -> list[str]:
    """Return the files of a checkpoint relative to it: of a file the empty name, of a link none."""
    if path.is_symlink():
        return []
    if not path.is_dir():
        return [""]
    found = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    return [str(file.relative_to(path)) for file in found if not file.is_symlink()]


def _differs(path: Path, kept: Path) -> bool:
    return any(not (path / name).exists() or not os.path.samefile(path / name, kept / name) for name in _files_of(kept))


def _set_writable(kept: Path, writable: bool) -> None:
    for name in _files_of(kept) if kept.exists() else ():
        with contextlib.suppress(OSError):  # another user's
            mode = (kept / name).stat().st_mode
            os.chmod(kept / name, mode | stat.S_IWUSR if writable else mode & ~stat.S_IWUSR)


REMOVE_SECONDS = 0.5
"""Seconds per look for the removal of files: the watch has other duties."""


@dataclass(frozen=True)
class CheckpointRetention:
    """Keeps a run's newest checkpoints, and multiples of an interval."""

    run: Run
    attempt: Attempt
    begin: AttemptStart
    """The start of the observed attempt; once another attempt has begun, this one removes nothing."""
    keep_last: int
    """Number of newest checkpoints that stay, at least 1."""
    keep_every: int | None = None
    """Multiples of it stay for good; None: none do."""
    tracked: Callable[[], int | None] = lambda: None
    """Returns the iteration that the program would load next, which always stays; None without one."""

    @property
    def _hidden(self) -> Path:
        return self.run.checkpoints / ".removing"

    def look(self, found: Sequence[FoundCheckpoint], *, saving: bool) -> None:
        """Hide checkpoints that are too old, and remove some of their files. Raises OSError. `found`: the complete
        checkpoints, rising. `saving`: the program writes one now; then none is hidden."""
        if not saving:
            self._take_away(found)
        self._remove(time.monotonic() + REMOVE_SECONDS)

    def finish(self, found: Sequence[FoundCheckpoint]) -> None:
        """Hide and remove old checkpoints at the end of the training: no later look comes."""
        self._take_away(found)
        self._remove(None)

    def _take_away(self, found: Sequence[FoundCheckpoint]) -> None:
        found = [checkpoint for checkpoint in found if os.path.lexists(checkpoint.path)]  # a program may remove its own
        if len(found) <= self.keep_last or self.run.attempt_numbers()[-1] != self.attempt.number:
            return
        own = {commit.iteration for commit in self.attempt.read_commits()}
        base, every = self.begin.base_iteration, self.keep_every
        line = [each for each in found if each.iteration <= base or each.iteration in own]
        old = [each for each in line[: -self.keep_last] if not every or each.iteration % every]
        if not old:
            return
        stays = (
            evaluations.iterations_held_by_evaluations(self.run)
            | mirror.iterations_held_by_mirror(self.run)
            | campaign.iterations_held_by_campaign(self.run)
            | {self.tracked()}
        )
        for checkpoint in old:
            if checkpoint.iteration in stays:
                continue
            self._hidden.mkdir(exist_ok=True)
            path = Path(checkpoint.path)
            os.rename(path, unused_name(self._hidden, path.name))
            fsync_directory(path.parent)

    def _remove(self, deadline: float | None) -> None:
        """Remove hidden checkpoints until `deadline` (monotonic), at least one file. Links are not followed."""
        with contextlib.suppress(FileNotFoundError):  # nothing is, or somebody else removes it too
            for folder, folders, names in os.walk(self._hidden, topdown=False):
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
