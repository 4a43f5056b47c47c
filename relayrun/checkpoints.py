"""Checkpoints of any program: a folder of any files that is whole or not there, hashed, verified, and kept in a number.

    from relayrun import checkpoints

    found = checkpoints.newest("out")                            # every byte compared; None: from the beginning
    with checkpoints.saving("out", step, keep_last=3) as folder:
        torch.save(model.state_dict(), folder / "model.pt")      # any files, closed when the block ends

| in the folder of checkpoints | content |
|---|---|
| `step_0000500/` | a checkpoint, and `checksums.json`, with the hash of each of its files |
| `.staging/` `.quarantine/` | a save under way; damaged checkpoints, each with a reason |

A checkpoint counts once it has its checksums.json, until one of an earlier step is committed after it: training went
back. One process at a time calls these functions for a folder. Of several ranks that is rank 0: all write their files
into a new folder, and rank 0 calls `commit` behind a barrier; at the start it calls `newest` and broadcasts the result.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relayrun import client
from relayrun.control.rundir.checkpoint_records import ResumePoint, quarantine_checkpoint
from relayrun.control.trainers.checkpoint_hashes import MOST_FALL_BACKS
from relayrun.errors import InputError
from relayrun.files import fsync_directory, fsync_tree
from relayrun.leftovers import remove_path
from relayrun.train.checkpoint import checksums
from relayrun.train.checkpoint.checksums import CHECKSUM_INDEX, DamagedCheckpoint

__all__ = ["Checkpoint", "DamagedCheckpoint", "commit", "committed", "newest", "saving"]

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
    remove_path(staged.parent)  # of a save that failed
    staged.mkdir(parents=True)
    yield staged
    _write_index(staged, step)
    final = top / staged.name
    if final.exists():  # training went back
        os.rename(final, staged.with_suffix(".replaced"))
    client.checkpoint_done(step, final)  # counts once it is there: a kill behind the next line leaves none unsaid
    os.rename(staged, final)
    fsync_directory(top)
    there = committed(top)
    for each in there[max(1, keep_last or len(there)) :]:
        if not keep_every or each.step % keep_every:
            os.rename(each.path, staged.with_name(each.path.name))  # whole or not there
    remove_path(staged.parent)


def commit(folder: str | os.PathLike[str]) -> Checkpoint:
    """Hash and commit a checkpoint of a program that saves by itself, under its final name, which has the step as its
    last number."""
    path = Path(folder).absolute()
    step = _step(path)
    if step is None or not path.is_dir():
        raise InputError("this is no folder whose name has a step", where=path, hint="such as checkpoint-500")
    _write_index(path, step)
    client.checkpoint_done(step, path)
    return Checkpoint(step, path)


def newest(root: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the newest checkpoint whose bytes are those that were committed; None if there is none.

    Damaged ones go to `.quarantine` with their reason. Raises DamagedCheckpoint if only damaged ones are left, or three
    in a row are damaged: then it is more likely the memory or the file system of this node.
    """
    top = Path(root).absolute()
    for damaged, each in enumerate(committed(top), start=1):
        faults = checksums.verify_checkpoint(each.path, None)[1]
        if not faults:
            return each
        if damaged > MOST_FALL_BACKS:
            raise DamagedCheckpoint(f"{damaged} in a row are damaged; the last: {faults[0]}", where=each.path)
        base = ResumePoint(iteration=each.step, path=str(each.path))
        target = quarantine_checkpoint(top, base, attempt=0, why=faults[0])
        log.warning("%s is damaged: %s; moved to %s", each.path, faults[0], target)
    if (top / ".quarantine").exists():
        hint = "bring one back from a copy, or remove .quarantine to begin anew"
        raise DamagedCheckpoint("none of its checkpoints is whole", where=top, hint=hint)
    return None


def committed(root: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the checkpoints that count, newest first. Their bytes are not read."""
    found: list[Checkpoint] = []
    indexes = Path(root).absolute().glob(f"*/{CHECKSUM_INDEX}")
    for index in sorted(indexes, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        step = _step(index.parent)
        if step is not None and (not found or step < found[-1].step):
            found.append(Checkpoint(step, index.parent))
    return found


def _step(folder: Path) -> int | None:
    number = re.search(r"(\d+)\D*$", folder.name)
    return None if number is None else int(number[1])


def _write_index(folder: Path, step: int) -> None:
    fsync_tree(folder)
    checksums.write_checksum_index(folder, step, {})
    fsync_directory(folder)
    fsync_directory(folder.parent)
