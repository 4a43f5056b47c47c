"""What a foreign program must not go on from is moved out of its sight; nothing is deleted."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

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
