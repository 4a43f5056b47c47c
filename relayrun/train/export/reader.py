"""Parts of the tensors of a torch_dist checkpoint, read on their own: no ranks, no GPU, no megatron-core.

megatron-core saves what the layers have in common as one tensor with the layers as its first dimension, split
over files as the ranks were. `torch.distributed.checkpoint` finds and reads the pieces that a wanted part
overlaps, one at a time, so that memory holds the part and one piece. What is read is compared with its hashes, and
nothing of it is run.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from relayrun.errors import InputError
from relayrun.train.checkpoint.checksums import CHECKSUM_INDEX, DamagedCheckpoint
from relayrun.train.checkpoint.metadata import METADATA_FILE
from relayrun.train.checkpoint.reader import CheckedReader

log = logging.getLogger(__name__)

WEIGHT_PREFIXES = ("embedding.", "decoder.", "output_layer.")
"""How the keys of a language model's weights begin; the rest is the optimizer's and the run's."""


class CheckpointReader:
    """The weights of the checkpoint in `folder`, and whatever else it holds."""

    def __init__(self, folder: Path, checksum: str | None = None) -> None:
        """Open a checkpoint. `checksum`: that of its commit, None where no run knows it.

        Raises InputError if this is no torch_dist checkpoint, a file of it is missing, torn or not the one that was
        saved, or it holds more than values.
        """
        self.folder = folder
        if not (folder / METADATA_FILE).exists() and not (folder / CHECKSUM_INDEX).exists():
            raise InputError(
                "this is no torch_dist checkpoint: it has no .metadata",
                where=folder,
                hint="give a run directory, or one of the folders iter_* in its checkpoints/",
            )
        try:
            reader = CheckedReader(folder, checksum)
        except DamagedCheckpoint as error:
            raise InputError(
                f"this checkpoint is damaged: {error.message}", where=folder, hint="export another iteration"
            ) from None
        if not reader.checked:
            log.warning("%s was saved without checksums: its bytes are taken as they are", folder)
        metadata = reader.metadata
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._reader = reader
        self._tensors = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self._objects = {key for key in metadata.state_dict_metadata if key not in self._tensors}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights, by key."""
        return {key: tuple(value.size) for key, value in self._tensors.items() if key.startswith(WEIGHT_PREFIXES)}

    @property
    def tensors(self) -> list[str]:
        """Keys of all tensors, those of the optimizer's state too."""
        return [*self._tensors]

    @property
    def objects(self) -> set[str]:
        """Keys of all that is no tensor."""
        return self._objects

    def common(self) -> dict[str, Any]:
        """Return the plain values of the checkpoint, by name. Raises InputError."""
        try:
            return self._reader.common()
        except DamagedCheckpoint as error:
            raise InputError(f"this checkpoint is damaged: {error.message}", where=self.folder) from None

    def size(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[key].size)

    def dtype_of(self, key: str) -> torch.dtype:
        """Return the type of a tensor."""
        dtype: torch.dtype = self._tensors[key].properties.dtype
        return dtype

    def blocks(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return where each block of a tensor begins, and its shape."""
        return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._tensors[key].chunks]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the embeddings, and so of the matrices."""
        dtype: torch.dtype = self._tensors["embedding.word_embeddings.weight"].properties.dtype
        return dtype

    def read(self, key: str, *, start: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Read the part of `shape` that begins at `start` (one number per dimension), converted to `dtype`.

        Raises InputError if it cannot be read.
        """
        part = torch.empty(list(shape), dtype=dtype)
        wanted = ChunkStorageMetadata(offsets=torch.Size(start), sizes=torch.Size(shape))
        items = create_read_items_for_chunk_list(key, self._tensors[key], [wanted])
        if sum(torch.Size(item.lengths).numel() for item in items) != part.numel():
            raise InputError(f"its pieces of {key} don't make up the whole", where=self.folder)
        try:
            self._reader.read_data(LoadPlan(items), _Into(part)).wait()
        except DamagedCheckpoint as error:
            raise InputError(
                f"this checkpoint is damaged: {error.message}", where=self.folder, hint="export another iteration"
            ) from None
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            raise InputError(f"{key} cannot be read: {str(error).partition(chr(10))[0]}", where=self.folder) from None
        return part

    def read_object(self, key: str) -> Any:
        """Read what is no tensor; values and tensors alone. Raises InputError."""
        index = MetadataIndex(key)
        item = ReadItem(
            type=LoadItemType.BYTE_IO,
            dest_index=index,
            dest_offsets=torch.Size((0,)),
            storage_index=index,
            storage_offsets=torch.Size((0,)),
            lengths=torch.Size((0,)),
        )
        found = _Object()
        try:
            self._reader.read_data(LoadPlan([item]), found).wait()
            packed = torch.load(found.data, map_location="cpu", weights_only=True)
        except (DamagedCheckpoint, OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise InputError(f"{key} cannot be read: {str(error).partition(chr(10))[0]}", where=self.folder) from None
        return packed[0] if isinstance(packed, list) and len(packed) == 1 else packed


class _Object(DefaultLoadPlanner):
    """Keeps the bytes of one object."""

    data: io.BytesIO

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.data = value


class _Into(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self._target
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dimension, offset, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass
