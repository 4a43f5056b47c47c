"""The `.metadata` of a torch_dist checkpoint, read without running what somebody put into it.

It is a pickle, and a pickle may name any function to be called. torch and megatron-core read it with
`pickle.load`. A checkpoint may come from anybody, so that here the names are those of torch's records alone. What they
name is out of reach, too: attributes are given to records that this file's reader has made, and to nothing else.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from relayrun.errors import InputError
from relayrun.train.checkpoint.checksums import DamagedCheckpoint
from relayrun.train.checkpoint.safe_pickle import NotAllowed, sealed_class

METADATA_FILE = ".metadata"

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
"""Records of values, and what makes them: nothing here opens, imports or calls anything that a pickle gives it.
Those of the planner stand in checkpoints that Megatron-LM wrote."""

_OF_MEGATRON = {
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): SavePlan,
}
"""Records that add fields to torch's. torch's take these as well, and megatron-core, which takes seconds to import, is
not needed to read them."""


class RefusedCheckpoint(InputError):
    """A checkpoint holds what is no value; nothing of it was run."""


def refusal_error(words: str, folder: Path) -> RefusedCheckpoint:
    """Return the error for a checkpoint that is not loaded because of what it holds, in `words`."""
    return RefusedCheckpoint(
        f"this checkpoint is not loaded: {words}",
        where=folder,
        hint="take one that relayrun or megatron-core saved, or the weights as safetensors with `relayrun import hf`",
    )


class _Member:
    """Stands for a member of an enumeration: the member itself is the process's."""

    def __init__(self, member: Enum) -> None:
        self.member = member

    def __eq__(self, other: object) -> bool:
        return (other.member if isinstance(other, _Member) else other) is self.member

    def __hash__(self) -> int:
        return hash(self.member)


def _member(owner: Any, name: Any) -> _Member:
    """What Python 3.11.0 to 3.11.3 write for a member of an enumeration: getattr(class, name)."""
    kind = getattr(owner, "kind", None) if isinstance(owner, type) else None
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str) and name in kind.__members__:
        return _Member(kind[name])
    raise NotAllowed("it asks for an attribute of what is no enumeration")


def _sealed(kind: Any) -> Any:
    """Return what a pickle may name in place of a record, an enumeration or a function; a record's fields follow."""
    make: Callable[..., Any] = kind
    if isinstance(kind, type) and issubclass(kind, Enum):
        make = lambda *given: _Member(kind(*given))  # noqa: E731
    elif isinstance(kind, type) and is_dataclass(kind):
        make = functools.partial(object.__new__, kind)
    return sealed_class(f"{kind.__module__}.{kind.__qualname__}", make, kind=kind)


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


def parse_metadata(data: bytes, folder: Path, *, checked: bool = False) -> Metadata:
    """Return the metadata that `data`, the content of a `.metadata`, holds.

    `checked`: these bytes are those that were saved. Raises Refused if it names anything but records, and Damaged,
    naming `folder`, if it cannot be read; Refused too where it is known to be as it was saved.
    """
    words = "it holds something else"
    try:
        found = _Records(io.BytesIO(data)).load()
        if isinstance(found, Metadata) and isinstance(found.storage_data, dict):
            return found
    except NotAllowed as error:
        raise refusal_error(f"{METADATA_FILE}: {error}", folder) from None
    except Exception as error:  # whatever a pickle of flipped bytes makes of these records
        words = f"{type(error).__name__}: {error}"
    if checked:
        raise refusal_error(f"{METADATA_FILE}: {words}", folder)
    raise DamagedCheckpoint(f"its {METADATA_FILE} cannot be read: {words}", where=folder)


def read_metadata(folder: Path) -> Metadata:
    """Read and parse the metadata of a checkpoint. Raises OSError, and as `parse_metadata`."""
    return parse_metadata((folder / METADATA_FILE).read_bytes(), folder)


def file_ends(metadata: Metadata) -> dict[str, int]:
    """Return how many bytes each file must have at least, by name, for all blocks to be there."""
    found: dict[str, int] = {}
    for item in metadata.storage_data.values():
        found[item.relative_path] = max(found.get(item.relative_path, 0), item.offset + item.length)
    return found
