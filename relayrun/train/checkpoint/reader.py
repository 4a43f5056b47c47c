"""Reads a torch_dist checkpoint and compares each byte with its hash before it is used.

`parse_metadata` reads `.metadata`, and torch reads tensors and objects with `weights_only`, so nothing in a checkpoint
is run. A block is read into memory once, hashed there, and unpacked from there. So it does not matter which rank reads
which blocks, or which layout wrote them. Ranks that need the same blocks read each of them once, see `parallel_load`.

`.metadata` is a pickle, which may name any function to call; torch and megatron-core read it with `pickle.load`. A
checkpoint may come from anybody: here records of the pickle (`pickle_records`) become new records of torch.

`translate_common` turns Megatron-LM's `common.pt` into the common part of a run's checkpoint. The sharded part needs no
translation: both sides have megatron-core's keys.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.futures import Future

from relayrun.control.trainers.pickle_records import (
    MALFORMED,
    MOST_DEEP,
    MOST_KEY,
    MOST_MEMORY,
    CorruptPickle,
    PickledCall,
    PickledName,
    RefusedPickle,
    no_collection,
    read_records,
)
from relayrun.control.trainers.torch_files import (
    MEGATRON_METADATA,
    METADATA_FILE,
    METADATA_NAMES,
    SAVED_FACTOR,
    StoredTensor,
    check_size,
    names_in_torch_file,
    place_of,
    read_bounded,
    read_torch_file,
)
from relayrun.errors import InputError
from relayrun.tokens.stores.urls import first_line
from relayrun.train.checkpoint import megatron_folder
from relayrun.train.checkpoint.checksums import CHECKSUM_INDEX, Checksums, DamagedCheckpoint, missing_is_damage
from relayrun.train.checkpoint.megatron_folder import MegatronCheckpoint
from relayrun.train.checkpoint.parallel_load import BlockExchange, BlockLocation

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
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
        """Read and compare the small files: the hashes, the metadata, the common part. `root`: the checksum of its
        commit, if any is known. A checkpoint without checksums is read with `checked` False."""
        super().__init__(folder)
        self.folder = folder
        self.exchange: BlockExchange | None = None
        """Ranks that share the reading of blocks; None: this rank reads all its blocks."""
        self.bytes_wanted = self.bytes_read = 0
        """Bytes of blocks so far: needed by this rank, and read by it, for others as well."""
        had_sums = root is not None or (folder / CHECKSUM_INDEX).exists()
        self._sums = Checksums(folder, root) if had_sums else None
        self.metadata = parse_metadata(self._whole(METADATA_FILE), folder, checked=self.checked)
        self._common = self._whole(COMMON_FILE)
        self._whole(FORMAT_FILE)  # megatron-core reads it again
        for name, end in file_ends(self.metadata).items():
            with missing_is_damage(name, folder):
                size = (folder / name).stat().st_size
            if size < end:
                raise DamagedCheckpoint(f"{name} has {size} bytes, its metadata names {end}", where=folder)

    @property
    def checked(self) -> bool:
        return self._sums is not None

    def common(self) -> dict[str, Any]:
        """Return the plain values of the checkpoint by name, translated for Megatron-LM. Raises DamagedCheckpoint."""
        found = self._unpacked(COMMON_FILE, self._plain_values)
        if not isinstance(found, dict):
            raise refusal_error(f"{COMMON_FILE} holds {type(found).__name__}", self.folder)
        return found

    def _plain_values(self) -> Any:
        found = megatron_folder.as_checkpoint(read_torch_file(self._common), self.folder)
        if found is not None:
            return translate_common(found)
        return torch.load(io.BytesIO(self._common), map_location="cpu", weights_only=True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
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

    def read_object(self, key: str) -> Any:
        """Read an object of values and tensors. Raises DamagedCheckpoint and RefusedCheckpoint."""
        info = self.storage_data[index := MetadataIndex(key)]
        data = self._read(BlockLocation(info.relative_path, info.offset, info.length))
        return self._unpacked(
            "a block", lambda: torch.load(self._content(index, data), map_location="cpu", weights_only=True)
        )

    def _content(self, index: MetadataIndex, data: bytearray) -> io.BytesIO:
        """Return the file of torch in a block, within bounds, so that torch reads it within bounds."""
        applied = self.storage_data[index].transform_descriptors or ()
        content = io.BytesIO(data)
        if applied:
            content = io.BytesIO(self.transforms.transform_load_stream(None, applied, content).read(-1))  # type: ignore[arg-type]
        names_in_torch_file(content)
        content.seek(0)
        return content

    def _put(self, items: list[ReadItem], data: bytearray, planner: LoadPlanner) -> None:
        """Unpack a block and distribute it to the items of the plan, as torch's reader does."""
        content = self._content(items[0].storage_index, data)
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
        except (RefusedPickle, pickle.UnpicklingError) as error:
            raise refusal_error(f"{what}: {first_line(error)}", self.folder) from None
        except CorruptPickle as error:
            if self.checked:
                raise refusal_error(f"{what}: {error}", self.folder) from None
            raise DamagedCheckpoint(f"{what} cannot be read: {error}", where=self.folder) from None
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
        try:
            with missing_is_damage(name, self.folder):
                check_size(self.folder / name, saved=self.checked)
                return (self.folder / name).read_bytes() if self._sums is None else self._sums.read(name)
        except RefusedPickle as error:
            raise refusal_error(str(error), self.folder) from None


def reported_error(error: BaseException, kind: type[E]) -> E | None:
    """Return the first error of this kind, by rank, in `error` or in torch's collected errors; None without one."""
    failures = error.failures if isinstance(error, CheckpointException) else {0: (error, None)}
    return next((cause for _, (cause, _) in sorted(failures.items()) if isinstance(cause, kind)), None)


def read_metadata(folder: Path) -> Metadata:
    """Read and parse the metadata of a checkpoint. Raises OSError, and as `parse_metadata`."""
    return parse_metadata(read_bounded(folder / METADATA_FILE), folder)


def parse_metadata(data: bytes, folder: Path, *, checked: bool = False) -> Metadata:
    """Return the metadata in `data`, the bytes of a `.metadata`.

    `checked`: the bytes have the saved hash. Raises RefusedCheckpoint if it names anything but records,
    DamagedCheckpoint, naming `folder`, if it cannot be read; with `checked` RefusedCheckpoint for both.
    """
    try:
        with no_collection():
            found = _Records().of(read_records(data, MOST_MEMORY * (SAVED_FACTOR if checked else 1))[0])
        if isinstance(found, Metadata) and _has_blocks(found):
            return found
        words = "it holds something else"
    except RefusedPickle as error:
        raise refusal_error(f"{METADATA_FILE}: {error}", folder) from None
    except MALFORMED as error:
        words = str(error) if isinstance(error, CorruptPickle) else f"{type(error).__name__}: {error}"
    if checked:
        raise refusal_error(f"{METADATA_FILE}: {words}", folder)
    raise DamagedCheckpoint(f"its {METADATA_FILE} cannot be read: {words}", where=folder)


def _has_blocks(metadata: Metadata) -> bool:
    """Return whether blocks, tensors and objects have the types that readers need."""
    places, kinds = metadata.storage_data, metadata.state_dict_metadata
    if not isinstance(places, dict) or not isinstance(kinds, dict):
        return False
    if not all(isinstance(key, MetadataIndex) and isinstance(item, _StorageInfo) for key, item in places.items()):
        return False
    return all(isinstance(kind, BytesStorageMetadata) or _is_tensor(kind) for kind in kinds.values())


def _is_tensor(kind: Any) -> bool:
    sizes = [kind.size, *(size for chunk in kind.chunks for size in (chunk.offsets, chunk.sizes))]
    return isinstance(kind.properties.dtype, torch.dtype) and all(isinstance(size, torch.Size) for size in sizes)


def file_ends(metadata: Metadata) -> dict[str, int]:
    """Return the least size in bytes of each file, by name, that contains all blocks."""
    found: dict[str, int] = {}
    for item in metadata.storage_data.values():
        found[item.relative_path] = max(found.get(item.relative_path, 0), item.offset + item.length)
    return found


_KINDS: dict[str, type] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for module in (dcp_filesystem, dcp_metadata, dcp_planner)
    for name in METADATA_NAMES[module.__name__]
    if (kind := getattr(module, name, None)) is not None
}
"""Records and enumerations of torch by name. Megatron-LM's add fields to torch's, which accept them: no need to import
megatron-core, which takes seconds."""
_KINDS |= {f"{MEGATRON_METADATA}.MCoreMetadata": Metadata, f"{MEGATRON_METADATA}.MCoreSavePlan": SavePlan}


_SCALARS = frozenset((type(None), str, int, bool, float, bytes))


class _Records:
    """Turns the records of one pickle into torch's; each object that is made is a new one."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._deep = 0
        self._kinds: dict[PickledName, tuple[str, type | None, type | None]] = {}
        """Name and kind of each function, and of the class around it."""

    def of(self, found: Any) -> Any:
        """Return the value or torch's record for a part of the pickle. Raises RefusedPickle."""
        if type(found) in _SCALARS:
            return found
        if (made := self._made.get(id(found))) is None:
            self._deep += 1
            if self._deep > MOST_DEEP:
                raise RefusedPickle("its values lie in one another without end")
            made = self._made[id(found)] = self._new(found)
            self._deep -= 1
        return made

    def _new(self, found: Any) -> Any:
        if isinstance(found, PickledCall):
            return self._called(found)
        if isinstance(found, dict):
            return self._dict(found.items())
        if isinstance(found, (list, tuple)):
            return type(found)([self.of(each) for each in found])
        kind = vars(torch).get(found.name) if isinstance(found, PickledName) else None  # getattr would import modules
        if isinstance(kind, torch.dtype) and found.module == "torch":
            return kind
        raise RefusedPickle(f"it names {found}, which is no part of a checkpoint")

    def _dict(self, items: Iterable[Any]) -> dict[Any, Any]:
        made = {}
        for key, value in items:
            if not isinstance(found := self.of(key), (str, int, MetadataIndex)):
                raise RefusedPickle("it has a key that is no name of a tensor")
            made[found] = self.of(value)
        return made

    def _called(self, call: PickledCall) -> Any:
        if call.function not in self._kinds:
            name = str(call.function)
            self._kinds[call.function] = name, _KINDS.get(name), _KINDS.get(name.rpartition(".")[0])
        name, kind, owner = self._kinds[call.function]
        if kind is not None and not issubclass(kind, Enum) and not call.arguments and not call.items:
            return self._record(kind, call.state)
        if name == "torch.Size" and type(call.arguments[0]) is tuple and not call.items and call.state is None:
            return torch.Size(*call.arguments)
        if call.state is not None:
            raise RefusedPickle(f"it gives attributes to {call.function}")
        if kind is not None and issubclass(kind, Enum):
            if len(call.arguments) != 1 or type(call.arguments[0]) is not int:  # with more, it makes classes
                raise RefusedPickle(f"it calls {name} with another argument than a number")
            return kind(call.arguments[0])
        if owner is not None and issubclass(owner, Enum) and not call.arguments:
            return owner[call.function.name.rpartition(".")[2]]
        if name == "collections.OrderedDict" and not call.arguments:
            return OrderedDict(self._dict(call.items))
        if name not in _MAKERS or call.items:
            raise RefusedPickle(f"it names {name}, which is no part of a checkpoint")
        return _MAKERS[name](*self.of(call.arguments))

    def _record(self, kind: type, state: Any) -> Any:
        made: Any = object.__new__(kind)
        found = {name: self.of(each) for name, each in state.items()} if type(state) is dict else self.of(state) or {}
        if kind is TensorProperties:
            made.__setstate__(found)
            return made
        if kind is _StorageInfo:
            place_of(found["relative_path"], found["offset"], found["length"])
        if kind is MetadataIndex and not (isinstance(found["fqn"], str) and _is_offset(found.get("offset"))):
            raise RefusedPickle("it has an index without a name")
        made.__dict__.update(found)
        return made


def _is_offset(value: Any) -> bool:
    return value is None or (isinstance(value, torch.Size) and all(each < MOST_KEY for each in value))


def _layout(name: str) -> torch.layout:
    """Stand for torch's function, which keeps its answers."""
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise RefusedPickle("it names a layout that torch does not have")
    return found


_MAKERS: dict[str, Callable[..., Any]] = {
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": _layout,
    **{f"{module}.{name}": Path for module in ("pathlib", "pathlib._local") for name in METADATA_NAMES[module]},
}
"""Constructors of values."""


MEGATRON_LAYOUT = "those of Megatron-LM"
"""Equals no layout of ranks, so that generators start anew."""


def translate_common(found: MegatronCheckpoint) -> dict[str, Any]:
    """Return the common part of a run for a checkpoint of Megatron-LM.

    Its `data` is None: Megatron-LM records the number of samples, not their order.
    """
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
