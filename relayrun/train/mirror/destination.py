"""A destination of copies: what every kind can do, and the kind that is a folder; the limit of the copy rate.

A destination holds copies, claims them, takes claims back and gives copies back. In a folder a copy grows in
`.staging`, gets its name by a rename, then its line in the record.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from relayrun.control.rundir import checkpoint_records, mirror
from relayrun.control.rundir.mirror import CheckpointCopy, MirrorOwner
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.errors import RelayrunError, RunDirError
from relayrun.files import fsync_directory, read_json, unused_name, write_json
from relayrun.tokens.stores.direct_io import open_file_checksum
from relayrun.train.checkpoint import checksums
from relayrun.train.checkpoint.checksums import CheckpointFiles, LocalCheckpointFiles

COPY_PIECE_BYTES = 8 << 20
"""Bytes that are copied at a time."""


@dataclass
class CopyRateLimit:
    """Keeps copying below so many bytes a second, on average since it began.

    `sleep` and `clock` are those of `time`, but in tests.
    """

    bytes_per_second: float | None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _began: float | None = None
    _bytes: int = 0

    def spend(self, count: int) -> None:
        """Wait until so many more bytes may have been copied."""
        if self.bytes_per_second is None:
            return
        self._began = self.clock() if self._began is None else self._began
        self._bytes += count
        wait = self._began + self._bytes / self.bytes_per_second - self.clock()
        if wait > 0:
            self.sleep(wait)


class CopyFailed(RelayrunError):
    """A checkpoint could not be copied; the text says why."""


class MirroredFiles(CheckpointFiles, Protocol):
    """The files of a copy."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file, by its name; of a copy that is a single file under the name `.`."""


class MirrorDestination(Protocol):
    """The second place of one run. Its methods raise OSError, and RelayrunError for damaged records."""

    @property
    def where(self) -> Path | str:
        """The folder of the run's copies, or its URL."""

    def owner(self) -> MirrorOwner | None:
        """Return whose copies lie there; None: nobody's, or the place is away."""

    def prepare(self, owner: MirrorOwner) -> None:
        """Make it this run's. Raises RelayrunError where what it should lie in is away."""

    def copies(self) -> dict[str, CheckpointCopy]:
        """Return what is claimed to be there, by name."""

    def take_back(self, copy: CheckpointCopy, why: str) -> None:
        """Say that a copy is none any more, before anything is done to it."""

    def fault(self, copy: CheckpointCopy) -> str | None:
        """Return what is wrong with a copy as far as names and sizes tell; None: it is whole."""

    def files(self, copy: CheckpointCopy) -> MirroredFiles:
        """Return the files that lie under the name of a copy."""

    def stage(self, commit: CheckpointCommit, pace: CopyRateLimit) -> MirroredFiles:
        """Copy what is missing of a checkpoint, without a claim; return what is to be read back.

        It goes on from what an earlier try of the same commit has left. Raises NotCopied where the checkpoint cannot
        be read.
        """

    def unstage(self, commit: CheckpointCommit) -> None:
        """Throw away what was staged: it is not what was saved."""

    def publish(self, copy: CheckpointCopy) -> None:
        """Claim what was staged and read back."""

    def set_aside(self, copy: CheckpointCopy) -> None:
        """Put what was a copy, and is damaged, where nothing removes it."""

    def remove(self, name: str) -> None:
        """Remove what was a copy, at once or with the next `tidy`."""

    def tidy(self, names: set[str], missing: set[str]) -> None:
        """Remove what a rule or a kill has left.

        `names`: what a copy of this run may be called. `missing`: of these, what is still to be copied.
        """


def copy_name(commit: CheckpointCommit) -> str:
    """The name of a checkpoint's copy."""
    return Path(commit.path).name


def copy_faults(
    files: MirroredFiles, commit: CheckpointCommit, *, hashes: dict[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Read a copy back in full: what is wrong with it, and the hash of each file where its commit has no root.

    `hashes`: what the files must have where there is no root; without them they are compared with the commit's own.
    """
    if files.sizes() != commit.files:
        return ["its files have not the names and sizes that were saved"], {}
    if commit.checksum is not None:
        return checksums.verify_checkpoint(files, commit.checksum)[1], {}
    found = _hashes(files, commit)
    expected = _hashes(LocalCheckpointFiles(Path(commit.path)), commit) if hashes is None else hashes
    return [f"{name} is not the one that was saved" for name in found if found[name] != expected.get(name)], found


def _hashes(files: CheckpointFiles, commit: CheckpointCommit) -> dict[str, str]:
    found = {}
    for name in commit.files:
        with files.open(name) as file:
            found[name] = open_file_checksum(file)
    return found


def source_faults(commit: CheckpointCommit) -> list[str]:
    """What is wrong with a checkpoint itself, where its copy was not right."""
    if (torn := checkpoint_records.checkpoint_fault(commit)) is not None:
        return [torn]
    return [] if commit.checksum is None else checksums.verify_checkpoint(Path(commit.path), commit.checksum)[1]


def open_source(files: CheckpointFiles, name: str) -> BinaryIO:
    """Open a file to be copied. Raises NotCopied."""
    try:
        return files.open(name)
    except OSError as error:
        raise _unreadable(files, name, error) from None


def read_piece(source: BinaryIO, files: CheckpointFiles, name: str, *, done: int, size: int) -> bytes:
    """Read on in a file of which `done` bytes were read. Raises NotCopied where it ends before `size`."""
    try:
        piece = source.read(min(COPY_PIECE_BYTES, size - done))
    except OSError as error:
        raise _unreadable(files, name, error) from None
    if not piece:
        raise CopyFailed(f"it has {done} bytes, not {size}", where=f"{files.where}/{name}")
    return piece


def _unreadable(files: CheckpointFiles, name: str, error: OSError) -> CopyFailed:
    return CopyFailed(f"it cannot be read: {error.strerror or error}", where=f"{files.where}/{name}")


def commit_identity(commit: CheckpointCommit) -> dict[str, object]:
    """What tells a commit from another one of the same iteration."""
    return {"iteration": commit.iteration, "checksum": commit.checksum, "time": commit.time, "files": commit.files}


class FolderDestination:
    """The second place of one run below a folder of this machine; see `relayrun.control.rundir.mirror` for what lies
    in it."""

    def __init__(self, folder: Path) -> None:
        self.where = folder

    def owner(self) -> MirrorOwner | None:
        """Return whose copies lie there; None: nobody's, or the folder is away."""
        return MirrorOwner.read(self.where / "mirror.json")

    def prepare(self, owner: MirrorOwner) -> None:
        """Make it this run's. Raises RunDirError where what it should lie in is away."""
        above = self.where.parents[1]
        if not above.is_dir():
            raise RunDirError("there is no such folder", where=above, hint="make it, or mount it")
        (self.where / ".staging").mkdir(parents=True, exist_ok=True)
        owner.write(self.where / "mirror.json")

    def copies(self) -> dict[str, CheckpointCopy]:
        """Return what is claimed to be there, by name."""
        return mirror.read_copies(self.where)

    def take_back(self, copy: CheckpointCopy, why: str) -> None:
        """Say that a copy is none any more, before anything is done to it."""
        mirror.withdraw_copy(self.where, copy, why, now=time.time())

    def fault(self, copy: CheckpointCopy) -> str | None:
        """Return what is wrong with a copy as far as names and sizes tell; None: it is whole."""
        return copy.fault(self.where)

    def files(self, copy: CheckpointCopy) -> MirroredFiles:
        """Return the files that lie under the name of a copy."""
        return LocalCheckpointFiles(self.where / copy.name)

    def stage(self, commit: CheckpointCommit, pace: CopyRateLimit) -> MirroredFiles:
        """Copy what is missing of a checkpoint into `.staging`. Raises as `stage_files`."""
        staged, final = self._staged(commit), self.where / copy_name(commit)
        if os.path.lexists(final) and not os.path.lexists(staged):  # a kill came between name and claim
            os.rename(final, staged)
        stage_files(LocalCheckpointFiles(Path(commit.path)), commit, staged, pace)
        return LocalCheckpointFiles(staged)

    def unstage(self, commit: CheckpointCommit) -> None:
        """Throw away what was staged."""
        staged = self._staged(commit)
        staged.with_name(f"{staged.name}.json").unlink(missing_ok=True)
        remove_tree(staged)

    def publish(self, copy: CheckpointCopy) -> None:
        """Give what was staged and read back its name, then its line."""
        staged, final = self.where / ".staging" / copy.name, self.where / copy.name
        if os.path.lexists(final):  # unclaimed: what a kill left, or of another commit of this iteration
            self._put_away(copy.name, ".removing")
        os.rename(staged, final)
        fsync_directory(self.where)
        mirror.claim_copy(self.where, copy)
        staged.with_name(f"{staged.name}.json").unlink(missing_ok=True)

    def set_aside(self, copy: CheckpointCopy) -> None:
        """Put what was a copy, and is damaged, where nothing removes it."""
        if os.path.lexists(self.where / copy.name):
            self._put_away(copy.name, ".damaged")

    def remove(self, name: str) -> None:
        """Put what was a copy where `tidy` removes it."""
        self._put_away(name, ".removing")

    def tidy(self, names: set[str], missing: set[str]) -> None:
        """Remove what a rule or a kill has left: nothing that is claimed, or that is still to be copied."""
        for name in (names | mirror.withdrawn_copies(self.where)) - self.copies().keys() - missing:
            if os.path.lexists(self.where / name):
                self._put_away(name, ".removing")
        shutil.rmtree(self.where / ".removing", ignore_errors=True)
        for entry in (self.where / ".staging").iterdir():
            if entry.name.removesuffix(".json") not in missing:
                remove_tree(entry)

    def _staged(self, commit: CheckpointCommit) -> Path:
        return self.where / ".staging" / copy_name(commit)

    def _put_away(self, name: str, where: str) -> None:
        folder = self.where / where
        folder.mkdir(exist_ok=True)
        os.rename(self.where / name, unused_name(folder, name))
        fsync_directory(self.where)


def stage_files(source: MirroredFiles, commit: CheckpointCommit, staged: Path, pace: CopyRateLimit) -> None:
    """Copy what is missing of a checkpoint into a folder; on from what an earlier try of the same commit has left.

    Raises NotCopied where the checkpoint is away or changes, OSError where the target cannot be written.
    """
    marker = staged.with_name(f"{staged.name}.json")
    try:
        same = read_json(marker) == commit_identity(commit)
    except (FileNotFoundError, ValueError):
        same = False
    if not same:
        remove_tree(staged)
        staged.parent.mkdir(parents=True, exist_ok=True)
        write_json(marker, commit_identity(commit))
    for name, size in commit.files.items():
        target = staged if name == "." else staged / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy_file(source, name, target, size, pace)
    folders = [staged, *(path for path in staged.rglob("*") if path.is_dir())] if staged.is_dir() else []
    for folder in [*folders, staged.parent]:
        fsync_directory(folder)


def _copy_file(source: MirroredFiles, name: str, target: Path, size: int, pace: CopyRateLimit) -> None:
    with open(target, "ab", buffering=0) as out:
        done = out.tell()
        if done > size:
            out.truncate(0)
            done = 0
        with open_source(source, name) as read:
            read.seek(done)
            while done < size:
                piece = read_piece(read, source, name, done=done, size=size)
                view = memoryview(piece)
                while view:
                    view = view[out.write(view) :]
                done += len(piece)
                pace.spend(len(piece))
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what is verified comes from the disk


def remove_tree(path: Path) -> None:
    """Remove a folder or file that may be gone already. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
