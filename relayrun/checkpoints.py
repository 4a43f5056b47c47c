"""Checkpoints of any program: a folder of any files that is whole or not there, hashed, verified, and kept in a number.

    from relayrun import checkpoints

    found = checkpoints.newest("out")                            # every byte compared; None: from the beginning
    with checkpoints.saving("out", step, keep_last=3) as folder:
        torch.save(model.state_dict(), folder / "model.pt")      # any files, closed when the block ends

| in the folder of checkpoints | content |
|---|---|
| `step_0000500/` | a checkpoint, and `checksums.json`, with the hash of each of its files |
| `commits.jsonl` | a line for each save: its name, its step, its sizes, and the hash of its checksums.json |
| `.staging/` `.quarantine/` | a save under way; damaged checkpoints, each with a reason |

A checkpoint counts from its line on, until one of the same or an earlier step is committed behind it: training went
back. One process at a time calls these functions for a folder. Of several ranks that is rank 0: all write their files
into a new folder, and rank 0 calls `commit` behind a barrier; at the start it calls `newest` and broadcasts the result.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relayrun import client
from relayrun.control.rundir.checkpoint_records import (
    FOLDER_COMMITS,
    ResumePoint,
    folder_commits,
    quarantine_checkpoint,
)
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.trainers.checkpoint_hashes import MOST_FALL_BACKS
from relayrun.errors import InputError
from relayrun.files import file_sizes, fsync_directory, fsync_tree
from relayrun.leftovers import remove_path
from relayrun.train.checkpoint import checksums
from relayrun.train.checkpoint.checksums import DamagedCheckpoint

__all__ = ["Checkpoint", "DamagedCheckpoint", "commit", "newest", "saving"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    step: int
    path: Path


@contextlib.contextmanager
def saving(
    root: str | os.PathLike[str], step: int, *, keep_last: int | None = None, keep_every: int | None = None
) -> Iterator[Path]:
    """Yield a folder for the files of a checkpoint; after the block it is `root`/step_N, whole and committed.

    `keep_last`: then all are removed but the newest of this number, and steps that are multiples of `keep_every`. A
    chain around the program is told of the checkpoint (`relayrun.client`). If the block raises nothing is committed;
    the next save removes what it wrote.
    """
    top = Path(root).absolute()
    staged = top / ".staging" / f"step_{step:07}"
    with contextlib.suppress(FileNotFoundError):
        remove_path(staged.parent)  # of a save that failed
    staged.mkdir(parents=True)
    yield staged
    _commit(staged, top / staged.name, step)
    there = [each for each in folder_commits(top) if (top / each.path).exists()]
    for each in there[max(1, keep_last or len(there)) :]:
        if not keep_every or each.iteration % keep_every:
            os.rename(top / each.path, staged.with_name(each.path))  # whole or not there
    remove_path(staged.parent)


def commit(folder: str | os.PathLike[str], step: int) -> Checkpoint:
    """Hash and commit a checkpoint that has its final name already, of a program that saves by itself."""
    path = Path(folder).absolute()
    if not path.is_dir():
        raise InputError("this is no folder", where=path, hint="a checkpoint is a folder of files")
    return _commit(path, path, step)


def newest(root: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the newest checkpoint whose bytes are those that were committed; None if nothing was ever committed.

    Damaged ones go to `.quarantine` with their reason. Raises DamagedCheckpoint if none is whole, or three in a row are
    damaged: then it is more likely the memory or the file system of this node.
    """
    top = Path(root).absolute()
    commits, damaged = list(folder_commits(top)), 0
    for each in commits:
        path = top / each.path
        if not path.exists():  # removed by a rule, or by a person
            continue
        faults = checksums.verify_checkpoint(path, each.checksum)[1]
        if not faults:
            return Checkpoint(each.iteration, path)
        damaged += 1
        if damaged > MOST_FALL_BACKS:
            raise DamagedCheckpoint(f"{damaged} checkpoints in a row are damaged; the last: {faults[0]}", where=path)
        base = ResumePoint(iteration=each.iteration, path=str(path))
        target = quarantine_checkpoint(top, base, attempt=0, why=faults[0])
        log.warning("%s is damaged: %s; moved to %s", path, faults[0], target)
    if commits:
        hint = f"bring one back from a copy, or remove {top / FOLDER_COMMITS} to begin anew"
        raise DamagedCheckpoint("none of its checkpoints is whole", where=top, hint=hint)
    return None


def _commit(written: Path, final: Path, step: int) -> Checkpoint:
    """Hash the files, give them their name, and append the line."""
    began = time.time()
    root = checksums.write_checksum_index(written, step, {})
    fsync_tree(written)
    if written != final:
        if final.exists():  # training went back, or a kill came before the line
            os.rename(final, written.with_suffix(".replaced"))
        os.rename(written, final)
    fsync_directory(final.parent)
    now = time.time()
    line = CheckpointCommit(
        iteration=step,
        path=final.name,
        consumed_samples=-1,
        time=now,
        seconds=now - began,
        files=file_sizes(final),
        checksum=root,
    )
    line.append(final.parent / FOLDER_COMMITS)
    fsync_directory(final.parent)  # the first line makes its file
    client.checkpoint_done(step, final)
    return Checkpoint(step, final)
