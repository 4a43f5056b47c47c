"""Reads a torch_dist checkpoint and compares each byte with its hash before anything is made of it.

Nothing that a checkpoint holds is run: its records are read by `metadata`, its tensors and objects by torch with
`weights_only`. What is read is what is compared: a block goes from the file into memory once, is hashed there, and is
unpacked from there. So it does not matter which rank reads which blocks, or how the ranks were laid out when they were
written. Ranks that want the same blocks read each of them once, see `exchange`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from relayrun.train.checkpoint import megatron_state
from relayrun.train.checkpoint.checksums import DamagedCheckpoint, open_checksums
from relayrun.train.checkpoint.division import BlockLocation
from relayrun.train.checkpoint.exchange import BlockExchange
from relayrun.train.checkpoint.metadata import (
    METADATA_FILE,
    RefusedCheckpoint,
    file_ends,
    parse_metadata,
    refusal_error,
)

T = TypeVar("T")

COMMON_FILE = "common.pt"
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
        self.exchange: BlockExchange | None = None
        """The ranks with which this one divides what all of them want; None: it reads all that it wants."""
        self.bytes_wanted = self.bytes_read = 0
        """Bytes of blocks so far: what this rank needed, and what it has read, for others as well."""
        self._sums = open_checksums(folder, root)
        self.metadata = parse_metadata(self._whole(METADATA_FILE), folder, checked=self.checked)
        self._common = self._whole(COMMON_FILE)
        self._whole(FORMAT_FILE)  # megatron-core reads it once more
        for name, end in file_ends(self.metadata).items():
            try:
                size = (folder / name).stat().st_size
            except FileNotFoundError:
                raise DamagedCheckpoint(f"{name} is missing", where=folder) from None
            if size < end:
                raise DamagedCheckpoint(f"{name} has {size} bytes, its metadata names {end}", where=folder)

    @property
    def checked(self) -> bool:
        """Whether the checkpoint has hashes to compare with."""
        return self._sums is not None

    def common(self) -> dict[str, Any]:
        """The plain values of the checkpoint, by name; of one of Megatron-LM, what they come to. Raises Damaged."""
        found = self._unpacked(COMMON_FILE, self._plain_values)
        if not isinstance(found, dict):
            raise refusal_error(f"{COMMON_FILE} holds {type(found).__name__}", self.folder)
        return found

    def _plain_values(self) -> Any:
        if (found := megatron_state.translate_common(self._common, self.folder)) is not None:
            return found
        return torch.load(io.BytesIO(self._common), map_location="cpu", weights_only=True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As torch asks for it."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan says, each block once. Raises Damaged, Refused: what any rank of the exchange met."""
        wanted: dict[BlockLocation, list[ReadItem]] = {}
        met: Exception | None = None
        try:
            for item in plan.items:
                info = self.storage_data[item.storage_index]
                wanted.setdefault(BlockLocation(info.relative_path, info.offset, info.length), []).append(item)
        except KeyError as error:
            met = error

        def put(place: BlockLocation, data: bytearray) -> None:
            self._unpacked("a block", lambda: self._put(wanted[place], data, planner))

        places = sorted(wanted)
        self.bytes_wanted += sum(place.bytes for place in places)
        if self.exchange is not None:
            self.exchange.blocks(places, self._read, put, met=met)
        elif met is not None:
            raise met
        else:
            for place in places:
                put(place, self._read(place))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _put(self, items: list[ReadItem], data: bytearray, planner: LoadPlanner) -> None:
        """Unpack a block, and hand out what each item of a plan takes of it, as torch's reader does."""
        applied = self.storage_data[items[0].storage_index].transform_descriptors or ()
        content = io.BytesIO(data)
        if applied:
            content = io.BytesIO(self.transforms.transform_load_stream(items[0], applied, content).read(-1))
        if items[0].type == LoadItemType.BYTE_IO:
            for item in items:
                content.seek(0)
                planner.load_bytes(item, content)
            return
        whole = torch.load(content, map_location="cpu", weights_only=True)
        for item in items:
            part = narrow_tensor_by_index(whole, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            assert target.size() == part.size(), f"{item.storage_index}: {part.size()} there, {target.size()} here"
            target.copy_(part)
            planner.commit_tensor(item, target)

    def _unpacked(self, what: str, read: Callable[[], T]) -> T:
        """What `read` returns; what torch says of it becomes Damaged or Refused."""
        try:
            return read()
        except pickle.UnpicklingError as error:
            raise refusal_error(f"{what}: {_first_line(error)}", self.folder) from None
        except (EOFError, RuntimeError) as error:
            if self.checked or (isinstance(error, RuntimeError) and "zip archive" not in str(error)):
                raise
            raise DamagedCheckpoint(f"{what} cannot be read: {_first_line(error)}", where=self.folder) from None

    def _read(self, place: BlockLocation) -> bytearray:
        """Read a block and compare it with its hash. Raises Damaged."""
        with open(self.folder / place.file, "rb") as file:
            file.seek(place.at)
            data = bytearray(place.bytes)
            del data[file.readinto(data) :]
        self.bytes_read += len(data)
        if self._sums is not None:
            self._sums.check_block(place.file, place.at, data)
        elif not any(data[:4]):  # a lost write; torch would take it for a pickle of old
            raise DamagedCheckpoint(f"{place.file} holds zeros at byte {place.at}", where=self.folder)
        return data

    def _whole(self, name: str) -> bytes:
        if self._sums is not None:
            return self._sums.read(name)
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{name} is missing", where=self.folder) from None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def reported_damage(error: BaseException) -> DamagedCheckpoint | None:
    """Return what a rank said of bytes that are not those that were saved; None: no rank did."""
    return next((cause for cause in _causes(error) if isinstance(cause, DamagedCheckpoint)), None)


def reported_refusal(error: BaseException) -> RefusedCheckpoint | None:
    """Return what a rank said of a checkpoint that holds more than values; None: no rank did."""
    return next((cause for cause in _causes(error) if isinstance(cause, RefusedCheckpoint)), None)


def _causes(error: BaseException) -> list[BaseException]:
    """The error itself, or what torch gathered from all ranks, by rank."""
    if isinstance(error, CheckpointException):
        return [cause for _, (cause, _) in sorted(error.failures.items())]
    return [error]
