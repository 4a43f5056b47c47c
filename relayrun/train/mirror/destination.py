"""The second place of a run's copies.

A copy grows in `.staging`, gets its name by a rename, then its line in the record.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from relayrun.control.rundir import checkpoint_records, mirror
from relayrun.control.rundir.mirror import CheckpointCopy, MirrorOwner
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.errors import RelayrunError, RunDirError
from relayrun.files import fsync_directory, read_json, unused_name, write_json
from relayrun.leftovers import remove_leftovers, remove_path
from relayrun.progress import Progress, count
from relayrun.tokens.stores.direct_io import open_file_checksum
from relayrun.train.checkpoint import checksums
from relayrun.train.checkpoint.checksums import CheckpointFiles
from relayrun.trust import refuse_untrusted

COPY_PIECE_BYTES = 8 << 20
"""Bytes that are copied at a time."""


class CopyFailed(RelayrunError):
    """A checkpoint could not be copied; the text says why."""


def copy_name(commit: CheckpointCommit) -> str:
    return Path(commit.path).name


def copy_faults(
    files: CheckpointFiles, commit: CheckpointCommit, *, hashes: dict[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Read a copy back in full; return its faults, and the hash of each file if its commit has no root, which is
    compared with `hashes` (None: those of the checkpoint itself)."""
    if files.sizes() != commit.files:
        return ["its files have not the names and sizes that were saved"], {}
    with Progress(f"verifying iteration {commit.iteration}", sum(commit.files.values())):
        if commit.checksum is not None:
            return checksums.verify_checkpoint(files.where, commit.checksum)[1], {}
        found = _hashes(files, commit)
        expected = _hashes(CheckpointFiles(Path(commit.path)), commit) if hashes is None else hashes
    return [f"{name} is not the one that was saved" for name in found if found[name] != expected.get(name)], found


def _hashes(files: CheckpointFiles, commit: CheckpointCommit) -> dict[str, str]:
    found = {}
    for name in commit.files:
        with files.open(name) as file:
            found[name] = open_file_checksum(file)
    return found


def source_faults(commit: CheckpointCommit) -> list[str]:
    """Return the faults of the checkpoint itself, after its copy was wrong."""
    if (torn := checkpoint_records.checkpoint_fault(commit)) is not None:
        return [torn]
    return [] if commit.checksum is None else checksums.verify_checkpoint(Path(commit.path), commit.checksum)[1]


def read_pieces(files: CheckpointFiles, name: str, size: int, *, start: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` to `size`. Raises CopyFailed if it cannot be read, or ends before."""
    where = f"{files.where}/{name}"
    try:
        with files.open(name) as source:
            source.seek(start)
            while start < size:
                piece = source.read(min(COPY_PIECE_BYTES, size - start))
                if not piece:
                    raise CopyFailed(f"it has {start} bytes, not {size}", where=where)
                yield piece
                count(len(piece))
                start += len(piece)
    except OSError as error:
        raise CopyFailed(f"it cannot be read: {error.strerror or error}", where=where) from None


def commit_identity(commit: CheckpointCommit) -> dict[str, object]:
    """Return the fields that distinguish a commit from other commits of the same iteration."""
    return {"iteration": commit.iteration, "checksum": commit.checksum, "time": commit.time, "files": commit.files}


class MirrorDestination:
    """The second place of one run; `relayrun.control.rundir.mirror` lists its content. Methods raise OSError, and
    RelayrunError for damaged records."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the run's copies."""
        self.where = folder

    def owner(self) -> MirrorOwner | None:
        """Return the owner of the copies that lie there; None if nobody owns the place, or it is away."""
        return MirrorOwner.read(self.where / "mirror.json")

    def prepare(self, owner: MirrorOwner) -> None:
        """Make it the place of this run. Raises RunDirError if the folder around it is away."""
        above = self.where.parents[1]
        if not above.is_dir():
            raise RunDirError("there is no such folder", where=above, hint="make it, or mount it")
        self.where.mkdir(parents=True, exist_ok=True)
        refuse_place_of_others(self.where)
        (self.where / ".staging").mkdir(exist_ok=True)
        remove_leftovers(self.where)
        owner.write(self.where / "mirror.json")

    def copies(self) -> dict[str, CheckpointCopy]:
        """Return the claimed copies by name."""
        return mirror.read_copies(self.where)

    def take_back(self, copy: CheckpointCopy, why: str) -> None:
        """Record that a copy no longer counts, before it is changed."""
        replace(copy, time=time.time(), gone=why).append(self.where / "copies.jsonl")

    def fault(self, copy: CheckpointCopy) -> str | None:
        """Return the fault of a copy as far as names and sizes show; None if it is whole."""
        return checkpoint_records.checkpoint_fault(copy.as_commit(self.where))

    def files(self, copy: CheckpointCopy) -> CheckpointFiles:
        return CheckpointFiles(self.where / copy.name)

    def stage(self, commit: CheckpointCommit) -> CheckpointFiles:
        """Copy the missing bytes of a checkpoint into `.staging`, without a claim; return the files to be read back.
        Raises like `stage_files`."""
        staged, final = self._staged(copy_name(commit)), self.where / copy_name(commit)
        if os.path.lexists(final) and not os.path.lexists(staged):  # a kill came between name and claim
            os.rename(final, staged)
        stage_files(CheckpointFiles(Path(commit.path)), commit, staged)
        return CheckpointFiles(staged)

    def unstage(self, commit: CheckpointCommit) -> None:
        """Remove the staged files, which differ from the checkpoint."""
        remove_staged(self._staged(copy_name(commit)))

    def publish(self, copy: CheckpointCopy) -> None:
        """Give the staged files, which were read back, their name, then their line in the record."""
        staged, final = self._staged(copy.name), self.where / copy.name
        if os.path.lexists(final):  # unclaimed: what a kill left, or of another commit of this iteration
            self._put_away(copy.name, ".removing")
        os.rename(staged, final)
        fsync_directory(self.where)
        copy.append(self.where / "copies.jsonl")
        commit_marker(staged).unlink(missing_ok=True)

    def set_aside(self, copy: CheckpointCopy) -> None:
        """Move a damaged copy to a place that no rule empties."""
        if os.path.lexists(self.where / copy.name):
            self._put_away(copy.name, ".damaged")

    def remove(self, name: str) -> None:
        self._put_away(name, ".removing")

    def tidy(self, names: set[str], missing: set[str]) -> None:
        """Remove the remains of kills and withdrawn copies, but nothing that is claimed. `names`: possible names of
        this run's copies. `missing`: names that are still to be copied."""
        for name in (names | mirror.newest_claims(self.where).keys()) - self.copies().keys() - missing:
            if os.path.lexists(self.where / name):
                self._put_away(name, ".removing")
        shutil.rmtree(self.where / ".removing", ignore_errors=True)
        for entry in (self.where / ".staging").iterdir():
            if entry.name.removesuffix(".json") not in missing:
                remove_tree(entry)

    def _staged(self, name: str) -> Path:
        return self.where / ".staging" / name

    def _put_away(self, name: str, where: str) -> None:
        folder = self.where / where
        folder.mkdir(exist_ok=True)
        os.rename(self.where / name, unused_name(folder, name))
        fsync_directory(self.where)


def refuse_place_of_others(place: Path) -> None:
    """Raise UntrustedError if another user can lead what is copied to a folder elsewhere: it is his, or he may write
    it, or it contains links."""
    names = ("", "/.staging", "/.removing", "/.damaged", "/mirror.json", "/copies.jsonl")
    if place.parent.is_dir():
        refuse_untrusted(place.parent, [f"{place.name}{name}" for name in names], shared=True)


def stage_files(source: CheckpointFiles, commit: CheckpointCommit, staged: Path) -> None:
    """Copy the missing bytes of a checkpoint into a folder, on from an earlier try of this commit. Raises CopyFailed
    if the checkpoint is away or changes, OSError if the target cannot be written."""
    marker = commit_marker(staged)
    remove_leftovers(staged.parent)
    try:
        same = read_json(marker) == commit_identity(commit)
    except (FileNotFoundError, ValueError):
        same = False
    if not same:
        remove_tree(staged)
        staged.parent.mkdir(parents=True, exist_ok=True)
        write_json(marker, commit_identity(commit))
    with Progress(f"copying iteration {commit.iteration}", sum(commit.files.values())):
        for name, size in commit.files.items():
            target = staged if name == "." else staged / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy_file(source, name, target, size)
    folders = [staged, *(path for path in staged.rglob("*") if path.is_dir())] if staged.is_dir() else []
    for folder in [*folders, staged.parent]:
        fsync_directory(folder)


def _copy_file(source: CheckpointFiles, name: str, target: Path, size: int) -> None:
    with open(target, "ab", buffering=0) as out:
        done = out.tell()
        if done > size:
            out.truncate(0)
            done = 0
        for piece in read_pieces(source, name, size, start=done):
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
    remove_tree(staged)


def remove_tree(path: Path) -> None:
    """Remove a folder or file that may be gone already. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        remove_path(path)
