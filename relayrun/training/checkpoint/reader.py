"""Reads a torch_dist checkpoint and compares each byte with its hash before anything is made of it.

Nothing that a checkpoint holds is run: its records are read by `metadata`, its tensors and objects by torch with
`weights_only`. What is read is what is compared: a block goes from the file into memory once, is hashed there, and is
unpacked from there. So it does not matter which rank reads which blocks, or how the ranks were laid out when they were
written.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from relayrun.training.checkpoint import megatron_state
from relayrun.training.checkpoint.checksums import Damaged, open_checksums
from relayrun.training.checkpoint.metadata import METADATA, Refused, ends, parse_metadata, refused

T = TypeVar("T")

COMMON = "common.pt"
FORMAT_FILE = "metadata.json"


class CheckedReader(FileSystemReader):
    """Reads one checkpoint. Raises Damaged where it does not hold the bytes that were saved."""

    def __init__(self, folder: Path, root: str | None) -> None:
        """Read and compare all that is small: the hashes, the metadata, the common part.

        `root`: the checksum of its commit; None where no commit is known, or the commit is of an earlier version.
        A checkpoint that was saved without hashes is read as it is; `checked` tells.
        """
        super().__init__(folder)
        self.folder = folder
        self._sums = open_checksums(folder, root)
        self.metadata = parse_metadata(self._whole(METADATA), folder, checked=self.checked)
        self._common = self._whole(COMMON)
        self._whole(FORMAT_FILE)  # megatron-core reads it once more
        for name, end in ends(self.metadata).items():
            try:
                size = (folder / name).stat().st_size
            except FileNotFoundError:
                raise Damaged(f"{name} is missing", where=folder) from None
            if size < end:
                raise Damaged(f"{name} has {size} bytes, its metadata names {end}", where=folder)

    @property
    def checked(self) -> bool:
        """Whether the checkpoint has hashes to compare with."""
        return self._sums is not None

    def common(self) -> dict[str, Any]:
        """The plain values of the checkpoint, by name; of one of Megatron-LM, what they come to. Raises Damaged."""
        found = self._unpacked(COMMON, self._plain_values)
        if not isinstance(found, dict):
            raise refused(f"{COMMON} holds {type(found).__name__}", self.folder)
        return found

    def _plain_values(self) -> Any:
        if (found := megatron_state.translated(self._common, self.folder)) is not None:
            return found
        return torch.load(io.BytesIO(self._common), map_location="cpu", weights_only=True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As torch asks for it."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As torch's. Raises Damaged, Refused."""
        return self._unpacked("a block", lambda: super(CheckedReader, self).read_data(plan, planner))

    def _unpacked(self, what: str, read: Callable[[], T]) -> T:
        """What `read` returns; what torch says of it becomes Damaged or Refused."""
        try:
            return read()
        except pickle.UnpicklingError as error:
            raise refused(f"{what}: {_first_line(error)}", self.folder) from None
        except (EOFError, RuntimeError) as error:
            if self.checked or (isinstance(error, RuntimeError) and "zip archive" not in str(error)):
                raise
            raise Damaged(f"{what} cannot be read: {_first_line(error)}", where=self.folder) from None

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        file.seek(sinfo.offset)
        data = file.read(sinfo.length)
        if self._sums is not None:
            self._sums.check_block(sinfo.relative_path, sinfo.offset, data)
        elif not any(data[:4]):  # a lost write; torch would take it for a pickle of old
            raise Damaged(f"{sinfo.relative_path} holds zeros at byte {sinfo.offset}", where=self.folder)
        return io.BytesIO(data)

    def _whole(self, name: str) -> bytes:
        if self._sums is not None:
            return self._sums.read(name)
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise Damaged(f"{name} is missing", where=self.folder) from None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def damage(error: BaseException) -> Damaged | None:
    """Return what a rank said of bytes that are not those that were saved; None: no rank did."""
    return next((cause for cause in _causes(error) if isinstance(cause, Damaged)), None)


def refusal(error: BaseException) -> Refused | None:
    """Return what a rank said of a checkpoint that holds more than values; None: no rank did."""
    return next((cause for cause in _causes(error) if isinstance(cause, Refused)), None)


def _causes(error: BaseException) -> list[BaseException]:
    """The error itself, or what torch gathered from all ranks, by rank."""
    if isinstance(error, CheckpointException):
        return [cause for _, (cause, _) in sorted(error.failures.items())]
    return [error]
