"""A second place that is a folder: a copy grows in `.staging`, gets its name by a rename, then its line."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from relayrun.control.rundir import mirror
from relayrun.control.rundir.mirror import CheckpointCopy, MirrorOwner
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.errors import RunDirError
from relayrun.files import fsync_directory, read_json, unused_name, write_json
from relayrun.train.checkpoint.checksums import LocalCheckpointFiles
from relayrun.train.mirror.pace import CopyRateLimit
from relayrun.train.mirror.place import MirroredFiles, commit_identity, copy_name, open_source, read_piece


class FolderDestination:
    """The second place of one run below a folder of this machine; see `relayrun.control.rundir.mirror` for what lies in it."""

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
        if mirror.name_exists(final) and not mirror.name_exists(staged):  # a kill came between name and claim
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
        if mirror.name_exists(final):  # unclaimed: what a kill left, or of another commit of this iteration
            self._put_away(copy.name, ".removing")
        os.rename(staged, final)
        fsync_directory(self.where)
        mirror.claim_copy(self.where, copy)
        staged.with_name(f"{staged.name}.json").unlink(missing_ok=True)

    def set_aside(self, copy: CheckpointCopy) -> None:
        """Put what was a copy, and is damaged, where nothing removes it."""
        if mirror.name_exists(self.where / copy.name):
            self._put_away(copy.name, ".damaged")

    def remove(self, name: str) -> None:
        """Put what was a copy where `tidy` removes it."""
        self._put_away(name, ".removing")

    def tidy(self, names: set[str], missing: set[str]) -> None:
        """Remove what a rule or a kill has left: nothing that is claimed, or that is still to be copied."""
        for name in (names | mirror.withdrawn_copies(self.where)) - self.copies().keys() - missing:
            if mirror.name_exists(self.where / name):
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
