"""Which files or folders of a user's program are checkpoints, and which of them are whole.

    CheckpointRule(folder=Path("out"), pattern="checkpoint-{iteration}", whole_when="trainer_state.json")

`out/checkpoint-500/` is the checkpoint of iteration 500 once `out/checkpoint-500/trainer_state.json` is there, the file
that the program writes last. A program that writes elsewhere and renames has none such: every name that fits is whole.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from relayrun.trainers.base import FoundCheckpoint
from relayrun.trainers.quarantine import quarantine


@dataclass(frozen=True, kw_only=True)
class CheckpointRule:
    """How the names of checkpoints tell their iterations."""

    folder: Path
    pattern: str
    """A name with `{iteration}` in it once."""
    whole_when: str | None
    """A file below a checkpoint's folder that is written last; None: the program publishes them by a rename."""

    def every(self) -> list[tuple[int, Path]]:
        """Iteration and path of everything that has a checkpoint's name, rising."""
        before, _, after = self.pattern.partition("{iteration}")
        name = re.compile(re.escape(before) + r"(\d+)" + re.escape(after))
        try:
            entries = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        found = ((name.fullmatch(entry), self.folder / entry) for entry in entries)
        return sorted((int(match[1]), path) for match, path in found if match is not None)

    def is_whole(self, path: Path) -> bool:
        """Whether nothing of a checkpoint is missing, as far as the rule tells."""
        return path.exists() if self.whole_when is None else (path / self.whole_when).exists()

    def whole(self) -> list[FoundCheckpoint]:
        """Every whole checkpoint that is there now, rising."""
        return [
            FoundCheckpoint(iteration=iteration, path=str(path))
            for iteration, path in self.every()
            if self.is_whole(path)
        ]

    def prepare(self, *, base: int, attempt: int) -> list[str]:
        """Leave nothing beyond iteration `base` that the program could go on from. Returns what was done, in words."""
        beyond = [path for iteration, path in self.every() if iteration > base]
        return quarantine(self.folder, beyond, attempt=attempt, fault=self._fault)

    def _fault(self, path: Path) -> str | None:
        return None if self.is_whole(path) else f"{self.whole_when} is missing"
