"""Megatron-LM's folder of checkpoints, seen from outside.

    checkpoints/latest_checkpointed_iteration.txt     the tracker: the newest one that is whole, or `release`
    checkpoints/iter_0000010/                         .metadata common.pt metadata.json *.distcp   (torch_dist)
                             mp_rank_00/model_optim_rng.pt                                          (torch)

Megatron writes the tracker last. It loads what the tracker names and looks at nothing else; so a folder that is torn
must not be named there. The files' bytes are unknown to us: Megatron writes no checksums. That none is missing or too
short is told by `.metadata`, which names every file of a torch_dist checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Container
from pathlib import Path

from relayrun.control.trainers.base import FoundCheckpoint
from relayrun.control.trainers.checkpoint_cleanup import quarantine_checkpoints
from relayrun.control.trainers.megatron_lm_program import UnreadableMetadataError, least_file_sizes
from relayrun.files import fsync_directory, write_atomic

TRACKER_FILE = "latest_checkpointed_iteration.txt"

METADATA_FILE = ".metadata"

TORCH_DIST_FILES = ("metadata.json", METADATA_FILE, "common.pt")
"""Files without which a folder of the format torch_dist cannot be loaded; metadata.json is written last."""

_FOLDER_NAME = re.compile(r"iter_(\d{7,})")


def checkpoint_folder_name(iteration: int) -> str:
    """The name of a checkpoint's folder."""
    return f"iter_{iteration:07d}"


def iteration_of_folder(name: str) -> int | None:
    """The iteration that a folder's name tells; None where it is no checkpoint's."""
    match = _FOLDER_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def tracked_iteration(folder: Path) -> int | None:
    """The iteration that the tracker names; None where there is no tracker, or it names no iteration."""
    try:
        text = (folder / TRACKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdecimal() else None


def write_tracker(folder: Path, iteration: int) -> None:
    """Let Megatron go on from this iteration; 0: from the beginning."""
    if iteration:
        write_atomic(folder / TRACKER_FILE, str(iteration))
        return
    with contextlib.suppress(FileNotFoundError):
        (folder / TRACKER_FILE).unlink()
        fsync_directory(folder)


def checkpoint_fault(checkpoint: Path) -> str | None:
    """What is missing in a checkpoint's folder, as far as names and sizes tell; None where nothing is.

    Raises OSError where that cannot be looked at: a file system that is away for a moment makes nothing torn.
    """
    ranks = sorted(checkpoint.glob("mp_rank_*"))
    if ranks:
        empty = next((rank for rank in ranks if not _is_not_empty(rank / "model_optim_rng.pt")), None)
        return None if empty is None else f"{empty.name}/model_optim_rng.pt is missing"
    if not (checkpoint / "common.pt").exists() and not (checkpoint / "metadata.json").exists():
        needed: tuple[str, ...] = (METADATA_FILE,)  # torch's own format, as of NVIDIA's torch_dcp and fsdp_dtensor
    else:
        needed = TORCH_DIST_FILES
    missing = next((name for name in needed if not _is_not_empty(checkpoint / name)), None)
    return f"{missing} is missing" if missing is not None else _short_file(checkpoint)


def _short_file(checkpoint: Path) -> str | None:
    """Which file that `.metadata` names is not there, or not as long as its blocks; None where all are."""
    try:
        sizes = least_file_sizes(checkpoint / METADATA_FILE)
    except UnreadableMetadataError as error:
        return f"{METADATA_FILE} cannot be read ({error})"
    for name, least in sorted(sizes.items()):
        try:
            size = (checkpoint / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
        if size < least:
            return f"{name} has {size} bytes, not {least}"
    return None


def whole_checkpoints(folder: Path, *, known: Container[int] = ()) -> list[FoundCheckpoint]:
    """Every checkpoint that is there, whole, and not beyond the tracker, rising.

    `known`: iterations that were whole when somebody looked before; they are not looked into again.
    """
    newest = tracked_iteration(folder)
    if newest is None:
        return []
    return [
        FoundCheckpoint(iteration=iteration, path=str(path))
        for iteration, path in all_checkpoints(folder)
        if iteration <= newest and (iteration in known or checkpoint_fault(path) is None)
    ]


def all_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Iteration and folder of everything that looks like a checkpoint, rising."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = ((_FOLDER_NAME.fullmatch(name), folder / name) for name in names)
    return sorted((int(match[1]), path) for match, path in found if match is not None and path.is_dir())


def prepare_checkpoints(folder: Path, *, base: int, attempt: int) -> list[str]:
    """Make Megatron start from iteration `base`, which is whole; 0: from the beginning. Returns what was done.

    Folders of later iterations are of saves that a kill cut off: Megatron would write into them, or load one. They go
    to `.quarantine`; nothing is deleted.
    """
    beyond = [path for iteration, path in all_checkpoints(folder) if iteration > base]
    done = quarantine_checkpoints(folder, beyond, attempt=attempt, fault=checkpoint_fault)
    if (named := tracked_iteration(folder) or 0) != base:
        write_tracker(folder, base)
        done.append(f"{folder / TRACKER_FILE} named iteration {named}; it names {base or 'none'} now")
    return done


def _is_not_empty(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False
