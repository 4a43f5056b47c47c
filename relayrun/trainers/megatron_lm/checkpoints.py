"""Megatron-LM's folder of checkpoints, seen from outside.

    checkpoints/latest_checkpointed_iteration.txt     the tracker: the newest one that is whole, or `release`
    checkpoints/iter_0000010/                         .metadata common.pt metadata.json *.distcp   (torch_dist)
                             mp_rank_00/model_optim_rng.pt                                          (torch)

Megatron writes the tracker last. It loads what the tracker names and looks at nothing else; so a folder that is torn
must not be named there. The files' bytes are unknown to us: Megatron writes no checksums.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from relayrun.files import fsync_directory, write_atomic
from relayrun.trainers.base import FoundCheckpoint
from relayrun.trainers.quarantine import quarantine

TRACKER = "latest_checkpointed_iteration.txt"

DISTRIBUTED = ("metadata.json", ".metadata", "common.pt")
"""Files without which a folder of the format torch_dist cannot be loaded; metadata.json is written last."""

_NAME = re.compile(r"iter_(\d{7,})")


def folder_name(iteration: int) -> str:
    """The name of a checkpoint's folder."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """The iteration that a folder's name tells; None where it is no checkpoint's."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def tracked(folder: Path) -> int | None:
    """The iteration that the tracker names; None where there is no tracker, or it names no iteration."""
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdecimal() else None


def track(folder: Path, iteration: int) -> None:
    """Let Megatron go on from this iteration; 0: from the beginning."""
    if iteration:
        write_atomic(folder / TRACKER, str(iteration))
        return
    with contextlib.suppress(FileNotFoundError):
        (folder / TRACKER).unlink()
        fsync_directory(folder)


def fault(checkpoint: Path) -> str | None:
    """What is missing in a checkpoint's folder, as far as names and sizes tell; None where nothing is."""
    ranks = list(checkpoint.glob("mp_rank_*"))
    if ranks:
        empty = next((rank for rank in ranks if not _filled(rank / "model_optim_rng.pt")), None)
        return None if empty is None else f"{empty.name}/model_optim_rng.pt is missing"
    missing = next((name for name in DISTRIBUTED if not _filled(checkpoint / name)), None)
    return None if missing is None else f"{missing} is missing"


def whole(folder: Path) -> list[FoundCheckpoint]:
    """Every checkpoint that is there, whole, and not beyond the tracker, rising."""
    newest = tracked(folder)
    if newest is None:
        return []
    found = [(iteration, path) for iteration, path in every(folder) if iteration <= newest and fault(path) is None]
    return [FoundCheckpoint(iteration=iteration, path=str(path)) for iteration, path in found]


def every(folder: Path) -> list[tuple[int, Path]]:
    """Iteration and folder of everything that looks like a checkpoint, rising."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = ((_NAME.fullmatch(name), folder / name) for name in names)
    return sorted((int(match[1]), path) for match, path in found if match is not None and path.is_dir())


def prepare(folder: Path, *, base: int, attempt: int) -> list[str]:
    """Make Megatron start from iteration `base`, which is whole; 0: from the beginning. Returns what was done.

    Folders of later iterations are of saves that a kill cut off: Megatron would write into them, or load one. They go
    to `.quarantine`; nothing is deleted.
    """
    beyond = [path for iteration, path in every(folder) if iteration > base]
    done = quarantine(folder, beyond, attempt=attempt, fault=fault)
    if (named := tracked(folder) or 0) != base:
        track(folder, base)
        done.append(f"{folder / TRACKER} named iteration {named}; it names {base or 'none'} now")
    return done


def _filled(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):  # a file system that is away for a moment makes nothing torn
        return False
