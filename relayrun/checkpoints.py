"""Checkpoints of any program: a folder of any files that is whole or not there, hashed, verified, and kept in a number.

    from relayrun import checkpoints

    found = checkpoints.newest("out")                            # every byte compared; None: from the beginning
    with checkpoints.saving("out", step, keep_last=3) as folder:
        torch.save(model.state_dict(), folder / "model.pt")      # any files, closed when the block ends

| in the folder of checkpoints | content |
|---|---|
| `step_0000500/` | a checkpoint, and `checksums.json`, with the hash of each of its files |
| `commits.jsonl` | a line for each save: its name, its step, its sizes, and the hash of its checksums.json |
| `.staging/` `.quarantine/` `.superseded/` | saves under way; damaged checkpoints, each with a reason; replaced ones |

A checkpoint counts from its line on, until one of the same or an earlier step is committed behind it: training went
back. Several ranks that share the folder call `saving`, `commit` and `newest` together, with `rank` and `gather` (it
returns a list of every rank's argument, as a call of `torch.distributed.all_gather_object`): they share the hashing,
and if one of them fails all of them raise. One program at a time saves into a folder, in one thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from relayrun import client
from relayrun.control.rundir.checkpoint_records import (
    ResumePoint,
    checkpoint_fault,
    folder_commits,
    folder_commits_path,
    quarantine_checkpoint,
)
from relayrun.control.rundir.mirror import MirrorOwner
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.trainers.checkpoint_hashes import MOST_FALL_BACKS, READERS
from relayrun.errors import InputError, RelayrunError
from relayrun.files import fsync_directory, fsync_tree, unused_name
from relayrun.leftovers import remove_path
from relayrun.train.checkpoint import checksums
from relayrun.train.checkpoint.checksums import CHECKSUM_INDEX, DamagedCheckpoint, FolderCheckpointFiles
from relayrun.train.mirror.destination import CopyRateLimit
from relayrun.train.mirror.sync import copy_checkpoint, destination_at

__all__ = ["Checkpoint", "CheckpointFailed", "DamagedCheckpoint", "commit", "mirror", "newest", "prune", "saving"]

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
log = logging.getLogger(__name__)


class CheckpointFailed(RelayrunError):
    """A save or a load failed on another rank."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    step: int
    path: Path


@contextlib.contextmanager
def saving(
    root: str | os.PathLike[str],
    step: int,
    *,
    name: str | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    rank: int = 0,
    gather: Gather | None = None,
) -> Iterator[Path]:
    """Yield a folder for the files of a checkpoint; after the block it is `root`/`name`, whole and committed.

    `name`: default step_ and the step in seven digits. `keep_last`, `keep_every`: as for `prune`, which follows. A
    chain around the program is told of the checkpoint (`relayrun.client`). If the block raises on any rank nothing is
    committed; the next save removes what it wrote.
    """
    top, ranks = Path(root).absolute(), _Ranks(rank, gather)
    staged = top / ".staging" / (name or f"step_{step:07}")
    if staged.parent.parent != top or staged.name.startswith("."):
        raise InputError(f"{name} is no name of a checkpoint", where=top, hint="one word, which no dot begins")
    ranks.first(partial(_stage, staged))
    failure: Exception | None = None
    try:
        yield staged
    except Exception as error:
        failure = error
    ranks.every(partial(_raise, failure))
    _commit(ranks, staged, top / staged.name, step)
    if keep_last is not None:
        ranks.first(partial(prune, top, keep_last=keep_last, keep_every=keep_every))


def commit(folder: str | os.PathLike[str], step: int, *, rank: int = 0, gather: Gather | None = None) -> Checkpoint:
    """Hash and commit a checkpoint that has its final name already, of a program that saves by itself."""
    path = Path(folder).absolute()
    if not path.is_dir():
        raise InputError("this is no folder", where=path, hint="a checkpoint is a folder of files")
    return _commit(_Ranks(rank, gather), path, path, step)


def newest(root: str | os.PathLike[str], *, rank: int = 0, gather: Gather | None = None) -> Checkpoint | None:
    """Return the newest checkpoint whose bytes are those that were committed; None if nothing was ever committed.

    Damaged ones go to `.quarantine` with their reason. Raises DamagedCheckpoint if none is whole, or three in a row are
    damaged: then it is more likely the memory or the file system of this node.
    """
    top, ranks = Path(root).absolute(), _Ranks(rank, gather)
    commits = ranks.first(lambda: list(folder_commits(top)))
    damaged = 0
    for each in commits:
        path = top / each.path
        if not ranks.first(path.exists):  # removed by a rule, or by a person
            continue
        why = next((fault for found in ranks.every(partial(_faults, ranks, path, each)) for fault in found), None)
        if why is None:
            return Checkpoint(each.iteration, path)
        damaged += 1
        if damaged > MOST_FALL_BACKS:
            raise DamagedCheckpoint(f"{damaged} checkpoints in a row are damaged; the last: {why}", where=path)
        ranks.first(partial(_quarantine, top, each, why))
    if commits:
        hint = f"bring one back from a copy, or remove {top / 'commits.jsonl'} to begin anew"
        raise DamagedCheckpoint("none of its checkpoints is whole", where=top, hint=hint)
    return None


def prune(root: str | os.PathLike[str], *, keep_last: int, keep_every: int | None = None) -> None:
    """Remove all checkpoints but the newest `keep_last` and steps that are multiples of `keep_every`."""
    top = Path(root).absolute()
    there = [each for each in folder_commits(top) if (top / each.path).exists()]
    (top / ".removing").mkdir(exist_ok=True)
    for each in there[max(1, keep_last) :]:
        if not keep_every or each.iteration % keep_every:
            os.rename(top / each.path, unused_name(top / ".removing", each.path))  # whole or not there
    remove_path(top / ".removing")


def mirror(root: str | os.PathLike[str], place: str) -> list[int]:
    """Copy the checkpoints that `place`, a folder or a URL, lacks, newest first; return their steps. Every copy is read
    back. Raises RelayrunError if one cannot be copied, or `place` has copies of others."""
    top, pace = Path(root).absolute(), CopyRateLimit(None)
    target, commits = destination_at(place, pace), list(folder_commits(top, superseded=True))
    if not commits:
        raise InputError("no checkpoint was committed here", where=top, hint="relayrun checkpoint commit FOLDER")
    begun = commits[-1]  # no other folder has this first commit
    own = MirrorOwner(id=f"{begun.checksum}-{begun.time}", run=str(top))
    if (owner := target.owner()) is not None and owner.id != own.id:
        raise InputError(f"this place has the copies of {owner.run}", where=place, hint="give another place")
    target.prepare(own)
    there, copied = target.copies(), []
    for each in folder_commits(top):
        source = replace(each, path=str(top / each.path))
        if checkpoint_fault(source) is None and not (each.path in there and there[each.path].is_of(each)):
            target.publish(copy_checkpoint(target, source, pace))
            copied.append(each.iteration)
    return copied


class _Ranks:
    """The ranks that call a function together; one without `gather`."""

    def __init__(self, rank: int, gather: Gather | None) -> None:
        self.rank, self.count = rank, 1
        self._gather: Gather = gather or (lambda value: [value])

    def every(self, work: Callable[[], T]) -> list[T]:
        """Do something on every rank; return all results. If it raises on one rank all of them raise."""
        own: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:
            own = error
        found = self._gather((result, None if own is None else f"{type(own).__name__}: {own}"))
        if own is not None:
            raise own
        self.count = len(found)
        for rank, (_, why) in enumerate(found):
            if why is not None:
                raise CheckpointFailed(f"rank {rank}: {why}")
        return [each for each, _ in found]

    def first(self, work: Callable[[], T]) -> T:
        """Do something on rank 0; return its result on every rank."""
        return self.every(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def share(self, names: Iterable[str]) -> list[str]:
        """Return this rank's part of the files."""
        return sorted(names)[self.rank :: self.count]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _stage(staged: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        remove_path(staged)  # of a save that failed
    staged.mkdir(parents=True)


def _commit(ranks: _Ranks, written: Path, final: Path, step: int) -> Checkpoint:
    """Hash the files, give them their name, and append the line."""
    began = time.time()
    names = ranks.first(lambda: [str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()])
    hashes = ranks.every(partial(_hash, written, ranks.share(each for each in names if each != CHECKSUM_INDEX)))

    def publish() -> None:
        known = {name: entry for part in hashes for name, entry in part.items()}
        root = checksums.write_checksum_index(written, step, known)
        fsync_tree(written)
        if written != final:
            if final.exists():  # training went back, or a kill came before the line
                (final.parent / ".superseded").mkdir(exist_ok=True)
                os.rename(final, unused_name(final.parent / ".superseded", final.name))
            os.rename(written, final)
        fsync_directory(final.parent)
        sizes = {name: entry.bytes for name, entry in known.items()}
        sizes[CHECKSUM_INDEX] = (final / CHECKSUM_INDEX).stat().st_size
        now = time.time()
        line = CheckpointCommit(
            iteration=step,
            path=final.name,
            consumed_samples=-1,
            time=now,
            seconds=now - began,
            files=sizes,
            checksum=root,
        )
        line.append(folder_commits_path(final.parent))
        fsync_directory(final.parent)  # the first line makes its file
        client.checkpoint_done(step, final)

    ranks.first(publish)
    return Checkpoint(step, final)


def _hash(folder: Path, names: list[str]) -> dict[str, checksums.FileChecksum]:
    with ThreadPoolExecutor(READERS) as readers:
        each = readers.map(partial(checksums.hash_checkpoint_file, FolderCheckpointFiles(folder)), names)
        return dict(zip(names, each, strict=True))


def _faults(ranks: _Ranks, folder: Path, saved: CheckpointCommit) -> list[str]:
    mine = set(ranks.share(saved.files))
    return checksums.verify_checkpoint(folder, saved.checksum, only=mine)[1]


def _quarantine(top: Path, saved: CheckpointCommit, why: str) -> None:
    base = ResumePoint(iteration=saved.iteration, path=str(top / saved.path))
    target = quarantine_checkpoint(top, base, attempt=0, why=why)
    log.warning("%s is damaged: %s; moved to %s", base.path, why, target)
