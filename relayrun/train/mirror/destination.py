"""The second place of a run's copies.

A copy grows in `.staging`, gets its name by a rename, then its line in the record.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from relayrun.control.rundir import checkpoint_records, mirror
from relayrun.control.rundir.mirror import CheckpointCopy
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.errors import RelayrunError
from relayrun.files import file_sizes, fsync_directory, read_json, unused_name, write_json
from relayrun.leftovers import remove_leftovers, remove_path
from relayrun.progress import Progress, count
from relayrun.train.checkpoint import checksums
from relayrun.train.checkpoint.checksums import open_checkpoint_file
from relayrun.trust import refuse_untrusted

COPY_PIECE_BYTES = 8 << 20
"""Bytes that are copied at a time."""


class CopyFailed(RelayrunError):
    """A checkpoint could not be copied; the text says why."""


def copy_name(commit: CheckpointCommit) -> str:
    return Path(commit.path).name


def copy_faults(
    folder: Path, commit: CheckpointCommit, *, hashes: dict[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Read a copy back in full; return its faults, and the hash of each file if its commit has no root, which is
    compared with `hashes` (None: those of the checkpoint itself)."""
    if file_sizes(folder) != commit.files:
        return ["its files have not the names and sizes that were saved"], {}
    with Progress(f"verifying iteration {commit.iteration}", sum(commit.files.values())):
        if commit.checksum is not None:
            return checksums.verify_checkpoint(folder, commit.checksum)[1], {}
        found = _hashes(folder, commit)
        expected = _hashes(Path(commit.path), commit) if hashes is None else hashes
    return [f"{name} is not the one that was saved" for name in found if found[name] != expected.get(name)], found


def _hashes(folder: Path, commit: CheckpointCommit) -> dict[str, str]:
    return {name: checksums.hash_checkpoint_file(folder / name).xxh3_128 or "" for name in commit.files}


def source_faults(commit: CheckpointCommit) -> list[str]:
    """Return the faults of the checkpoint itself, after its copy was wrong."""
    if (torn := checkpoint_records.checkpoint_fault(commit)) is not None:
        return [torn]
    return [] if commit.checksum is None else checksums.verify_checkpoint(Path(commit.path), commit.checksum)[1]


def read_pieces(path: Path, size: int, *, start: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` to `size`. Raises CopyFailed if it cannot be read, or ends before."""
    try:
        with open_checkpoint_file(path) as source:
            source.seek(start)
            while start < size:
                piece = source.read(min(COPY_PIECE_BYTES, size - start))
                if not piece:
                    raise CopyFailed(f"it has {start} bytes, not {size}", where=path)
                yield piece
                count(len(piece))
                start += len(piece)
    except OSError as error:
        raise CopyFailed(f"it cannot be read: {error.strerror or error}", where=path) from None


def commit_identity(commit: CheckpointCommit) -> dict[str, object]:
    """Return the fields that distinguish a commit from other commits of the same iteration."""
    return {"iteration": commit.iteration, "checksum": commit.checksum, "time": commit.time, "files": commit.files}


def withdraw(place: Path, copy: CheckpointCopy, why: str, *, to: str = ".removing") -> None:
    """Record that a copy no longer counts, then move it: to `.removing`, or to a folder that no rule empties."""
    replace(copy, time=time.time(), gone=why).append(place / "copies.jsonl")
    put_away(place, copy.name, to)


def put_away(place: Path, name: str, to: str) -> None:
    """Move what has this name, if anything has, into a folder of the place."""
    if not os.path.lexists(place / name):
        return
    folder = place / to
    folder.mkdir(exist_ok=True)
    os.rename(place / name, unused_name(folder, name))
    fsync_directory(place)


def publish(place: Path, copy: CheckpointCopy) -> None:
    """Give the staged files, which were read back, their name, then their line in the record."""
    staged = place / ".staging" / copy.name
    put_away(place, copy.name, ".removing")  # unclaimed: what a kill left, or of another commit of this iteration
    os.rename(staged, place / copy.name)
    fsync_directory(place)
    copy.append(place / "copies.jsonl")
    commit_marker(staged).unlink(missing_ok=True)


def tidy(place: Path, names: set[str], missing: set[str]) -> None:
    """Remove the remains of kills and withdrawn copies, but nothing that is claimed. `names`: possible names of
    the run's copies. `missing`: names that are still to be copied."""
    for name in (names | mirror.newest_claims(place).keys()) - mirror.read_copies(place).keys() - missing:
        put_away(place, name, ".removing")
    shutil.rmtree(place / ".removing", ignore_errors=True)
    for entry in (place / ".staging").iterdir():
        if entry.name.removesuffix(".json") not in missing:
            remove_path(entry)


def refuse_place_of_others(place: Path) -> None:
    """Raise UntrustedError if another user can lead what is copied to a folder elsewhere: it is his, or he may write
    it, or it contains links."""
    names = ("", "/.staging", "/.removing", "/.damaged", "/mirror.json", "/copies.jsonl")
    if place.parent.is_dir():
        refuse_untrusted(place.parent, [f"{place.name}{name}" for name in names], shared=True)


def stage_files(source: Path, commit: CheckpointCommit, staged: Path) -> None:
    """Copy the missing bytes of a checkpoint into a folder, on from an earlier try of this commit. Raises CopyFailed
    if the checkpoint is away or changes, OSError if the target cannot be written."""
    marker = commit_marker(staged)
    remove_leftovers(staged.parent)
    try:
        same = read_json(marker) == commit_identity(commit)
    except (FileNotFoundError, ValueError):
        same = False
    if not same:
        remove_path(staged)
        staged.parent.mkdir(parents=True, exist_ok=True)
        write_json(marker, commit_identity(commit))
    with Progress(f"copying iteration {commit.iteration}", sum(commit.files.values())):
        for name, size in commit.files.items():
            target = staged / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy_file(source / name, target, size)
    folders = [staged, *(path for path in staged.rglob("*") if path.is_dir())] if staged.is_dir() else []
    for folder in [*folders, staged.parent]:
        fsync_directory(folder)


def _copy_file(source: Path, target: Path, size: int) -> None:
    with open(target, "ab", buffering=0) as out:
        done = out.tell()
        if done > size:
            out.truncate(0)
            done = 0
        for piece in read_pieces(source, size, start=done):
            view = memoryview(piece)
            while view:
                view = view[out.write(view) :]
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what is verified comes from the disk


def commit_marker(staged: Path) -> Path:
    """Return the file beside staged files that names their commit."""
    return staged.with_name(f"{staged.name}.json")


def remove_staged(staged: Path) -> None:
    """Remove staged files and their marker. Raises OSError."""
    commit_marker(staged).unlink(missing_ok=True)
    remove_path(staged)
