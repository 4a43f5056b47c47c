"""Which files or folders of a user's program are checkpoints, and which of them are whole.

    CheckpointRule(folder=Path("out"), pattern="checkpoint-{iteration}", whole_when="trainer_state.json")

`out/checkpoint-500/` is the checkpoint of iteration 500 once `out/checkpoint-500/trainer_state.json` is there, the file
that the program writes last. With a tracker, a file beside the checkpoints that names the newest whole one, those up to
that one are whole. A program that writes elsewhere and renames has neither: every name that fits is whole.
"""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from relayrun.control.trainers.base import FoundCheckpoint
from relayrun.control.trainers.quarantine import quarantine_checkpoints
from relayrun.errors import RunDirError
from relayrun.files import fsync_directory, temporary_prefix, write_atomic


@dataclass(frozen=True, kw_only=True)
class CheckpointRule:
    """How the names of checkpoints tell their iterations."""

    folder: Path
    pattern: str
    """A name with `{iteration}` in it once."""
    whole_when: str | None
    """A file below a checkpoint's folder that is written last; None: nothing is. One that is called *.json must hold
    JSON; of another one its name is enough."""
    tracker: str | None = None
    """A file of `folder`, or a link, that names the newest whole one by its iteration or its name; None: none does."""

    def every(self) -> list[tuple[int, Path]]:
        """Iteration and path of everything that has a checkpoint's name, rising."""
        try:
            entries = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        found = ((self._iteration(entry), self.folder / entry) for entry in entries)
        return sorted((iteration, path) for iteration, path in found if iteration is not None)

    def is_whole(self, path: Path) -> bool:
        """Whether nothing of a checkpoint is missing, as far as the rule tells."""
        return self._fault(path, self.tracked()) is None

    def whole(self) -> list[FoundCheckpoint]:
        """Every whole checkpoint that is there now, rising."""
        newest = self.tracked()
        return [
            FoundCheckpoint(iteration=iteration, path=str(path), may_change=True)
            for iteration, path in self.every()
            if self._fault(path, newest) is None
        ]

    def under_way(self) -> int | None:
        """The iteration of the newest name, where that is not whole; None where it is, or there is none."""
        newest = max(self.every(), default=None)
        return None if newest is None or self.is_whole(newest[1]) else newest[0]

    def tracked(self) -> int | None:
        """The iteration that the tracker names; None where there is no tracker, or it names none."""
        text = self._tracker_text()
        return None if text is None else int(text) if _is_number(text) else self._iteration(os.path.basename(text))

    def prepare(self, *, base: int, attempt: int) -> list[str]:
        """Leave nothing beyond iteration `base` that the program could go on from. Returns what was done, in words."""
        beyond = [path for iteration, path in self.every() if iteration > base]
        newest = self.tracked()
        done = quarantine_checkpoints(
            self.folder, beyond, attempt=attempt, fault=lambda path: self._fault(path, newest)
        )
        if self.tracker is not None and (self._tracker_text() is not None or base) and newest != (base or None):
            self._track(base)
            done.append(f"{self.folder / self.tracker} named iteration {newest}; it names {base or 'none'} now")
        return done

    def _track(self, iteration: int) -> None:
        """Let the tracker name this iteration in the form that it had, by the name found on disk; 0: remove it.

        A name made from the number may be another one (`step-40` for `step-00000040`), which the program does not find.
        """
        assert self.tracker is not None
        path, former = self.folder / self.tracker, self._tracker_text()
        if not iteration:
            path.unlink(missing_ok=True)
            fsync_directory(self.folder)
            return
        name = next((found.name for number, found in self.every() if number == iteration), None)
        if name is None:
            raise RunDirError(f"no checkpoint of iteration {iteration} is there to go on from", where=self.folder)
        if path.is_symlink():
            link = self.folder / f"{temporary_prefix()}{self.tracker}"
            link.symlink_to(os.path.join(os.path.dirname(os.readlink(path)), name))
            os.replace(link, path)
            fsync_directory(self.folder)
        elif former in (None, "release") or _is_number(former):  # Megatron's word for weights without an iteration
            digits = self._digits(name)
            same_form = former is not None and digits is not None and len(digits) == len(former)
            write_atomic(path, f"{digits if same_form else iteration}\n")
        else:
            write_atomic(path, os.path.join(os.path.dirname(former), name))

    def _tracker_text(self) -> str | None:
        """What the tracker says; None without one."""
        if self.tracker is None:
            return None
        path = self.folder / self.tracker
        try:
            return (
                os.readlink(path) if path.is_symlink() else path.read_text(encoding="utf-8", errors="replace").strip()
            )
        except FileNotFoundError:
            return None

    def _iteration(self, name: str) -> int | None:
        digits = self._digits(name)
        return None if digits is None else int(digits)

    def _digits(self, name: str) -> str | None:
        """The iteration as a name has it, with its zeros in front; None where it is no checkpoint's name."""
        before, _, after = self.pattern.partition("{iteration}")
        found = re.fullmatch(re.escape(before) + r"([0-9]+)" + re.escape(after), name)
        return None if found is None else found[1]

    def _fault(self, path: Path, newest: int | None) -> str | None:
        """What is missing of a checkpoint; None where nothing is. `newest`: the iteration that the tracker names."""
        if self.whole_when is not None and (what := _unwritten_fault(path / self.whole_when)) is not None:
            return f"{self.whole_when} {what}"
        if self.tracker is not None and (self._iteration(path.name) or 0) > (newest or 0):
            return f"{self.tracker} does not name it"
        return None if path.exists() else "it is missing"


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]+", text) is not None


def _unwritten_fault(path: Path) -> str | None:
    """What is wrong with a file that is written last; None where nothing is."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    if path.suffix == ".json" and not _holds_json(path, found.st_size, found.st_mtime_ns):
        return "is not written to its end"
    return None


@functools.lru_cache(maxsize=1024)
def _holds_json(path: Path, size: int, changed: int) -> bool:
    """Whether a file holds JSON; read once as long as it has this size and this time of change."""
    del size, changed
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True
