"""A second place that is a folder: a copy grows in `.staging`, gets its name by a rename, then its line."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from relayrun.control.rundir import mirror
from relayrun.control.rundir.mirror import Copy, Owner
from relayrun.control.rundir.records import Commit
from relayrun.errors import RunDirError
from relayrun.files import free_name, fsync_directory, read_json, write_json
from relayrun.train.checkpoint.checksums import LocalFiles
from relayrun.train.mirror.pace import Pace
from relayrun.train.mirror.place import CopiedFiles, identity, name_of, open_source, read_piece


class FolderPlace:
    """The second place of one run below a folder of this machine; see `relayrun.control.rundir.mirror` for what lies in it."""

    def __init__(self, folder: Path) -> None:
        self.where = folder

    def owner(self) -> Owner | None:
        """Return whose copies lie there; None: nobody's, or the folder is away."""
        return Owner.read(self.where / "mirror.json")

    def prepare(self, owner: Owner) -> None:
        """Make it this run's. Raises RunDirError where what it should lie in is away."""
        above = self.where.parents[1]
        if not above.is_dir():
            raise RunDirError("there is no such folder", where=above, hint="make it, or mount it")
        (self.where / ".staging").mkdir(parents=True, exist_ok=True)
        owner.write(self.where / "mirror.json")

    def copies(self) -> dict[str, Copy]:
        """Return what is claimed to be there, by name."""
        return mirror.copies(self.where)

    def take_back(self, copy: Copy, why: str) -> None:
        """Say that a copy is none any more, before anything is done to it."""
        mirror.take_back(self.where, copy, why, now=time.time())

    def fault(self, copy: Copy) -> str | None:
        """Return what is wrong with a copy as far as names and sizes tell; None: it is whole."""
        return copy.fault(self.where)

    def files(self, copy: Copy) -> CopiedFiles:
        """Return the files that lie under the name of a copy."""
        return LocalFiles(self.where / copy.name)

    def stage(self, commit: Commit, pace: Pace) -> CopiedFiles:
        """Copy what is missing of a checkpoint into `.staging`. Raises as `stage_files`."""
        staged, final = self._staged(commit), self.where / name_of(commit)
        if mirror.exists(final) and not mirror.exists(staged):  # a kill came between name and claim
            os.rename(final, staged)
        stage_files(LocalFiles(Path(commit.path)), commit, staged, pace)
        return LocalFiles(staged)

    def unstage(self, commit: Commit) -> None:
        """Throw away what was staged."""
        staged = self._staged(commit)
        staged.with_name(f"{staged.name}.json").unlink(missing_ok=True)
        remove_tree(staged)

    def publish(self, copy: Copy) -> None:
        """Give what was staged and read back its name, then its line."""
        staged, final = self.where / ".staging" / copy.name, self.where / copy.name
        if mirror.exists(final):  # unclaimed: what a kill left, or of another commit of this iteration
            self._put_away(copy.name, ".removing")
        os.rename(staged, final)
        fsync_directory(self.where)
        mirror.claim(self.where, copy)
        staged.with_name(f"{staged.name}.json").unlink(missing_ok=True)

    def set_aside(self, copy: Copy) -> None:
        """Put what was a copy, and is damaged, where nothing removes it."""
        if mirror.exists(self.where / copy.name):
            self._put_away(copy.name, ".damaged")

    def remove(self, name: str) -> None:
        """Put what was a copy where `tidy` removes it."""
        self._put_away(name, ".removing")

    def tidy(self, names: set[str], missing: set[str]) -> None:
        """Remove what a rule or a kill has left: nothing that is claimed, or that is still to be copied."""
        for name in (names | mirror.withdrawn(self.where)) - self.copies().keys() - missing:
            if mirror.exists(self.where / name):
                self._put_away(name, ".removing")
        shutil.rmtree(self.where / ".removing", ignore_errors=True)
        for entry in (self.where / ".staging").iterdir():
            if entry.name.removesuffix(".json") not in missing:
                remove_tree(entry)

    def _staged(self, commit: Commit) -> Path:
        return self.where / ".staging" / name_of(commit)

    def _put_away(self, name: str, where: str) -> None:
        folder = self.where / where
        folder.mkdir(exist_ok=True)
        os.rename(self.where / name, free_name(folder, name))
        fsync_directory(self.where)


def stage_files(source: CopiedFiles, commit: Commit, staged: Path, pace: Pace) -> None:
    """Copy what is missing of a checkpoint into a folder; on from what an earlier try of the same commit has left.

    Raises NotCopied where the checkpoint is away or changes, OSError where the target cannot be written.
    """
    marker = staged.with_name(f"{staged.name}.json")
    try:
        same = read_json(marker) == identity(commit)
    except (FileNotFoundError, ValueError):
        same = False
    if not same:
        remove_tree(staged)
        staged.parent.mkdir(parents=True, exist_ok=True)
        write_json(marker, identity(commit))
    for name, size in commit.files.items():
        target = staged if name == "." else staged / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy_file(source, name, target, size, pace)
    folders = [staged, *(path for path in staged.rglob("*") if path.is_dir())] if staged.is_dir() else []
    for folder in [*folders, staged.parent]:
        fsync_directory(folder)


def _copy_file(source: CopiedFiles, name: str, target: Path, size: int, pace: Pace) -> None:
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
