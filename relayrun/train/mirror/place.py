"""What a second place can do, wherever it lies: hold copies, claim them, take claims back, give copies back."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Protocol

from relayrun.control.rundir import lineage
from relayrun.control.rundir.mirror import CheckpointCopy, MirrorOwner
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.errors import RelayrunError
from relayrun.tokens.stores.checksum import open_file_checksum
from relayrun.train.checkpoint import checksums
from relayrun.train.checkpoint.checksums import CheckpointFiles, LocalCheckpointFiles
from relayrun.train.mirror.pace import COPY_PIECE_BYTES, CopyRateLimit


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
    if (torn := lineage.checkpoint_fault(commit)) is not None:
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
