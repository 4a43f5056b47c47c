"""Which files or folders of a user's program are checkpoints, and which of them are whole.

    CheckpointRule(folder=Path("out"), pattern="checkpoint-{iteration}", whole_when="trainer_state.json")
    CheckpointRule(folder=Path("out"), pattern="step-{iteration}.pt", tracker="latest.txt")

`out/checkpoint-500/` is the checkpoint of iteration 500 once `out/checkpoint-500/trainer_state.json` is there, the file
that the program writes last. `out/step-500.pt` is one once `out/latest.txt` names it, or a later one, by its iteration,
its name or its path. A program that writes elsewhere and renames has neither: every name that fits is whole.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from relayrun.files import fsync_directory, write_atomic
from relayrun.trainers.base import FoundCheckpoint
from relayrun.trainers.quarantine import quarantine


@dataclass(frozen=True, kw_only=True)
class CheckpointRule:
    """How the names of checkpoints tell their iterations."""

    folder: Path
    pattern: str
    """A name with `{iteration}` in it once."""
    whole_when: str | None = None
    """A file below a checkpoint's folder that is written last. One that is called *.json must hold JSON; of another
    one its name is enough."""
    tracker: str | None = None
    """A file beside the checkpoints that is written behind each of them, and names it."""

    def every(self) -> list[tuple[int, Path]]:
        """Iteration and path of everything that has a checkpoint's name, rising."""
        try:
            entries = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        found = ((self._iteration_of(entry), self.folder / entry) for entry in entries)
        return sorted((iteration, path) for iteration, path in found if iteration is not None)

    def is_whole(self, path: Path) -> bool:
        """Whether nothing of a checkpoint is missing, as far as the rule tells; what the tracker says aside."""
        if self.whole_when is None:
            return path.exists()
        last = path / self.whole_when
        if last.suffix != ".json":
            return last.exists()
        try:
            found = last.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return _holds_json(last, found.st_size, found.st_mtime_ns)

    def whole(self) -> list[FoundCheckpoint]:
        """Every whole checkpoint that is there now, rising."""
        most = self._tracked() if self.tracker is not None else None
        if self.tracker is not None and most is None:
            return []
        return [
            FoundCheckpoint(iteration=iteration, path=str(path), may_change=True)
            for iteration, path in self.every()
            if (most is None or iteration <= most) and self.is_whole(path)
        ]

    def under_way(self) -> int | None:
        """The iteration of the newest name, where that is not whole; None where it is, or there is none."""
        newest = max((iteration for iteration, _ in self.every()), default=None)
        return None if newest is None or any(found.iteration == newest for found in self.whole()) else newest

    def prepare(self, *, base: int, attempt: int) -> list[str]:
        """Leave nothing beyond iteration `base` that the program could go on from, and let the tracker name the base.

        Returns what was done, in words. 0: it begins at the beginning.
        """
        beyond = [path for iteration, path in self.every() if iteration > base]
        done = quarantine(self.folder, beyond, attempt=attempt, fault=self._fault)
        return done if self.tracker is None else done + self._track(self.folder / self.tracker, base, attempt)

    def _iteration_of(self, name: str) -> int | None:
        before, _, after = self.pattern.partition("{iteration}")
        found = re.fullmatch(re.escape(before) + r"([0-9]+)" + re.escape(after), name)
        return None if found is None else int(found[1])

    def _fault(self, path: Path) -> str | None:
        return None if self.is_whole(path) else f"{self.whole_when} is missing or not whole"

    def _named(self) -> str:
        """What the tracker says; empty where it is not there."""
        assert self.tracker is not None
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / self.tracker).read_text(encoding="utf-8", errors="replace").strip()
        return ""

    def _tracked(self) -> int | None:
        """The iteration that the tracker names; None where it names none."""
        named = self._named()
        return int(named) if re.fullmatch("[0-9]+", named) else self._iteration_of(Path(named).name)

    def _track(self, tracker: Path, base: int, attempt: int) -> list[str]:
        """Let the tracker name the base in its own way: by the iteration, the name, or the path."""
        named, tracked = self._named(), self._tracked()
        if (tracked or 0) == base:
            return []
        if base == 0:
            return quarantine(self.folder, [tracker], attempt=attempt, fault=lambda _: "the run begins anew")
        path = next((path for iteration, path in self.every() if iteration == base), None)
        if path is None:
            return []
        folder = os.path.dirname(named)  # a path stays one
        own_way = str(base) if re.fullmatch("[0-9]+", named) else os.path.join(folder, path.name)
        write_atomic(tracker, f"{own_way}\n")
        fsync_directory(self.folder)
        return [f"{tracker} named {named or 'nothing'}; it names {own_way} now"]


@functools.lru_cache(maxsize=1024)
def _holds_json(path: Path, size: int, changed: int) -> bool:
    """Whether a file holds JSON; read once as long as it has this size and this time of change."""
    del size, changed
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True
