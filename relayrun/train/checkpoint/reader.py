"""Reads a torch_dist checkpoint and compares each byte with its hash before it is used.

`parse_metadata` reads `.metadata`, and torch reads tensors and objects with `weights_only`, so nothing in a checkpoint
is run. A block is read into memory once, hashed there, and unpacked from there. So it does not matter which rank reads
which blocks, or which layout wrote them. Ranks that need the same blocks read each of them once, see `parallel_load`.

`.metadata` is a pickle, which may name any function to call; torch and megatron-core read it with `pickle.load`. A
checkpoint may come from anybody, so only the names of torch's records are allowed here, and only records made by the
reader get attributes.

`translate_common` turns Megatron-LM's `common.pt` into the common part of a run's checkpoint. The sharded part needs no
translation: both sides have megatron-core's keys.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.futures import Future

from relayrun.errors import InputError
from relayrun.tokens.stores.urls import first_line
from relayrun.train.checkpoint import megatron_folder
from relayrun.train.checkpoint.checksums import DamagedCheckpoint, open_checksums
from relayrun.train.checkpoint.parallel_load import BlockExchange, BlockLocation
from relayrun.train.checkpoint.safe_pickle import NotAllowed, StoredTensor, sealed_class

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
FORMAT_FILE = "metadata.json"


class RefusedCheckpoint(InputError):
    """A checkpoint contains more than values; nothing of it was run."""


def refusal_error(words: str, folder: Path) -> RefusedCheckpoint:
    """Return the error for a checkpoint that is refused because of its content, in `words`."""
    return RefusedCheckpoint(
        f"this checkpoint is not loaded: {words}",
        where=folder,
        hint="take one that relayrun or megatron-core saved, or the weights as safetensors with `relayrun import hf`",
    )


class CheckedReader(FileSystemReader):
    """Reads one checkpoint. Raises DamagedCheckpoint if it does not hold the bytes that were saved."""

    def __init__(self, folder: Path, root: str | None) -> None:
        """Read and compare the small files: the hashes, the metadata, the common part.

        `root`: the checksum of its commit; None if no commit is known. A checkpoint without checksums is read
        unchecked; `checked` is then False.
        """
        super().__init__(folder)
        self.folder = folder
        self.exchange: BlockExchange | None = None
        """Ranks that share the reading of blocks; None: this rank reads all its blocks."""
        self.bytes_wanted = self.bytes_read = 0
        """Bytes of blocks so far: needed by this rank, and read by it, for others as well."""
        self._sums = open_checksums(folder, root)
        self.metadata = parse_metadata(self._whole(METADATA_FILE), folder, checked=self.checked)
        self._common = self._whole(COMMON_FILE)
        self._whole(FORMAT_FILE)  # megatron-core reads it again
        for name, end in file_ends(self.metadata).items():
            try:
                size = (folder / name).stat().st_size
            except FileNotFoundError:
                raise DamagedCheckpoint(f"{name} is missing", where=folder) from None
            if size < end:
                raise DamagedCheckpoint(f"{name} has {size} bytes, its metadata names {end}", where=folder)

    @property
    def checked(self) -> bool:
        """True if the checkpoint has checksums."""
        return self._sums is not None

    def common(self) -> dict[str, Any]:
        """Return the plain values of the checkpoint by name, translated for Megatron-LM. Raises DamagedCheckpoint."""
        found = self._unpacked(COMMON_FILE, self._plain_values)
        if not isinstance(found, dict):
            raise refusal_error(f"{COMMON_FILE} holds {type(found).__name__}", self.folder)
        return found

    def _plain_values(self) -> Any:
        if (found := translate_common(self._common, self.folder)) is not None:
            return found
        return torch.load(io.BytesIO(self._common), map_location="cpu", weights_only=True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, as torch's StorageReader requires."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the blocks of the plan, each once. Raises the DamagedCheckpoint or RefusedCheckpoint of any rank."""
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
        """Unpack a block and distribute it to the items of the plan, as torch's reader does."""
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
        """Return the result of `read`; torch's errors become DamagedCheckpoint or RefusedCheckpoint."""
        try:
            return read()
        except pickle.UnpicklingError as error:
            raise refusal_error(f"{what}: {first_line(error)}", self.folder) from None
        except (EOFError, RuntimeError) as error:
            if self.checked or (isinstance(error, RuntimeError) and "zip archive" not in str(error)):
                raise
            raise DamagedCheckpoint(f"{what} cannot be read: {first_line(error)}", where=self.folder) from None

    def _read(self, place: BlockLocation) -> bytearray:
        with open(self.folder / place.file, "rb") as file:
            file.seek(place.at)
            data = bytearray(place.bytes)
            del data[file.readinto(data) :]
        self.bytes_read += len(data)
        if self._sums is not None:
            self._sums.check_block(place.file, place.at, data)
        elif not any(data[:4]):  # a lost write; torch would take it for its legacy format
            raise DamagedCheckpoint(f"{place.file} holds zeros at byte {place.at}", where=self.folder)
        return data

    def _whole(self, name: str) -> bytes:
        if self._sums is not None:
            return self._sums.read(name)
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{name} is missing", where=self.folder) from None


def reported_error(error: BaseException, kind: type[E]) -> E | None:
    """Return the first error of this kind, by rank, in `error` or in torch's collected errors; None without one."""
    failures = error.failures if isinstance(error, CheckpointException) else {0: (error, None)}
    return next((cause for _, (cause, _) in sorted(failures.items()) if isinstance(cause, kind)), None)


def read_metadata(folder: Path) -> Metadata:
    """Read and parse the metadata of a checkpoint. Raises OSError, and as `parse_metadata`."""
    return parse_metadata((folder / METADATA_FILE).read_bytes(), folder)


def parse_metadata(data: bytes, folder: Path, *, checked: bool = False) -> Metadata:
    """Return the metadata in `data`, the bytes of a `.metadata`.

    `checked`: the bytes have the saved hash. Raises RefusedCheckpoint if it names anything but records,
    DamagedCheckpoint, naming `folder`, if it cannot be read; with `checked` RefusedCheckpoint for both.
    """
    words = "it holds something else"
    try:
        found = _Records(io.BytesIO(data)).load()
        if isinstance(found, Metadata) and isinstance(found.storage_data, dict):
            return found
    except NotAllowed as error:
        raise refusal_error(f"{METADATA_FILE}: {error}", folder) from None
    except Exception as error:  # flipped bytes in a pickle can raise anything
        words = f"{type(error).__name__}: {error}"
    if checked:
        raise refusal_error(f"{METADATA_FILE}: {words}", folder)
    raise DamagedCheckpoint(f"its {METADATA_FILE} cannot be read: {words}", where=folder)


def file_ends(metadata: Metadata) -> dict[str, int]:
    """Return the least size in bytes of each file, by name, that contains all blocks."""
    found: dict[str, int] = {}
    for item in metadata.storage_data.values():
        found[item.relative_path] = max(found.get(item.relative_path, 0), item.offset + item.length)
    return found


_TORCH = "torch.distributed.checkpoint."
ALLOWED_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
    _TORCH + "filesystem": {"_StorageInfo", "_StoragePrefix"},
    _TORCH + "metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    _TORCH + "planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}
"""Records of values and their constructors: none opens, imports or calls anything from the pickle. Megatron-LM's
checkpoints contain records of the planner."""
_OF_MEGATRON = {
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): SavePlan,
}
"""Records that add fields to torch's. torch's classes accept these fields, and need no import of megatron-core, which
takes seconds."""


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return sealed_class("getattr", _member)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (record := _OF_MEGATRON.get((module, name))) is not None:
            return _sealed(record)
        if name not in ALLOWED_NAMES.get(module, ()):
            raise NotAllowed(f"it names {module}.{name}, which is no part of a checkpoint")
        try:
            return _sealed(super().find_class(module, name))
        except (ImportError, AttributeError):
            raise NotAllowed(f"it names {module}.{name}, which the libraries here do not have") from None


def _sealed(kind: Any) -> Any:
    """Return the object that a pickle may name in place of a record, an enumeration or a function."""
    make: Callable[..., Any] = kind
    if isinstance(kind, type) and issubclass(kind, Enum):
        make = lambda *given: _Member(kind(*given))  # noqa: E731
    elif isinstance(kind, type) and is_dataclass(kind):
        make = functools.partial(object.__new__, kind)
    return sealed_class(f"{kind.__module__}.{kind.__qualname__}", make, kind=kind)


class _Member:
    """Wraps a member of an enumeration, since the member itself belongs to the process."""

    def __init__(self, member: Enum) -> None:
        self.member = member

    def __eq__(self, other: object) -> bool:
        return (other.member if isinstance(other, _Member) else other) is self.member

    def __hash__(self) -> int:
        return hash(self.member)


def _member(owner: Any, name: Any) -> _Member:
    """Stand for getattr(class, name), which Python 3.11.0 to 3.11.3 write for a member of an enumeration."""
    kind = getattr(owner, "kind", None) if isinstance(owner, type) else None
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str) and name in kind.__members__:
        return _Member(kind[name])
    raise NotAllowed("it asks for an attribute of what is no enumeration")


MEGATRON_LAYOUT = "those of Megatron-LM"
"""Equals no layout of ranks, so that generators start anew."""


def translate_common(data: bytes, folder: Path) -> dict[str, Any] | None:
    """Return the common part for the bytes of a common.pt; None if it is not from Megatron-LM.

    Its `data` is None: Megatron-LM records the number of samples, not their order.
    """
    found = megatron_folder.parse_common(data, folder)
    if found is None:
        return None
    state: dict[str, Any] = {
        "layout": MEGATRON_LAYOUT,
        "fixed": found.fixed_settings(),
        "data": None,
        "progress": found.progress(),
    }
    if found.optimizer is not None and megatron_folder.is_plain_value(found.optimizer):
        state["optimizer"] = with_torch_tensors(found.optimizer)
    return state


def with_torch_tensors(value: Any) -> Any:
    """Return these values with torch's tensors."""
    if isinstance(value, StoredTensor):
        dtype = getattr(torch, value.dtype)
        if not value.data:
            return torch.empty(value.shape, dtype=dtype)
        return torch.frombuffer(bytearray(value.data), dtype=dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: with_torch_tensors(each) for key, each in value.items()}
    return type(value)(with_torch_tensors(each) for each in value) if isinstance(value, (list, tuple)) else value
