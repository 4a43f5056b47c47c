"""A torch_dist checkpoint without ranks, GPU and megatron-core: read and write its tensors, into a new folder.

`CheckpointReader` reads parts of tensors. `TorchDistSavePlan` names all tensors first and makes each when it is
written. `new_folder` appears whole or not at all.

megatron-core saves a weight of all layers as one tensor with the layers as its first dimension, split over files as
the ranks were. `torch.distributed.checkpoint` finds and reads the pieces that a wanted part overlaps, one at a time, so
memory holds the part and one piece. Every byte is compared with its hash, and nothing in a checkpoint is run.
"""

from __future__ import annotations

import io
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from relayrun.control.trainers.torch_files import METADATA_FILE
from relayrun.errors import InputError, RelayrunError
from relayrun.files import write_json
from relayrun.progress import Progress, count
from relayrun.publishing import InputFiles, fails_to_write, published_folder
from relayrun.tokens.stores.urls import first_line
from relayrun.train.checkpoint import checksums
from relayrun.train.checkpoint.async_writer import ThreadedWriter, WrittenFiles
from relayrun.train.checkpoint.checksums import CHECKSUM_INDEX, DamagedCheckpoint
from relayrun.train.checkpoint.reader import CheckedReader

log = logging.getLogger(__name__)

WEIGHT_PREFIXES = ("embedding.", "decoder.", "output_layer.")
"""Prefixes of the keys of a language model's weights; other keys belong to the optimizer and the run."""


class CheckpointReader:
    """Reads the checkpoint in `folder`: weights, other tensors, objects, plain values."""

    def __init__(self, folder: Path, checksum: str | None = None) -> None:
        """Open a checkpoint. `checksum`: the checksum of its commit; None if no run knows it. Raises InputError if this
        is no torch_dist checkpoint, if a file is missing or differs from the saved one, or if it holds more than
        values."""
        self.folder = folder
        if not (folder / METADATA_FILE).exists() and not (folder / CHECKSUM_INDEX).exists():
            raise InputError(
                "this is no torch_dist checkpoint: it has no .metadata",
                where=folder,
                hint="give a run directory, or one of the folders iter_* in its checkpoints/",
            )
        with _explain_damage(folder, hint="export another iteration"):
            reader = CheckedReader(folder, checksum)
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
        self.tensors = [*self._tensors]
        """Keys of all tensors, also of the optimizer's state."""
        self.objects = metadata.state_dict_metadata.keys() - self._tensors.keys()
        """Keys of everything else."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(value.size) for key, value in self._tensors.items() if key.startswith(WEIGHT_PREFIXES)}

    def common(self) -> dict[str, Any]:
        """Return the plain values of the checkpoint, by name. Raises InputError."""
        with _explain_damage(self.folder):
            return self._reader.common()

    def size(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[key].size)

    def dtype_of(self, key: str) -> torch.dtype:
        """Return the type of a tensor."""
        dtype: torch.dtype = self._tensors[key].properties.dtype
        return dtype

    def blocks(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return offset and shape of each block of a tensor."""
        return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._tensors[key].chunks]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the embeddings, and so of the matrices."""
        return self.dtype_of("embedding.word_embeddings.weight")

    def read(self, key: str, *, start: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Read the part of `shape` that begins at `start` (one number per dimension), converted to `dtype`. Raises
        InputError if it cannot be read."""
        part = torch.empty(list(shape), dtype=dtype)
        wanted = ChunkStorageMetadata(offsets=torch.Size(start), sizes=torch.Size(shape))
        items = create_read_items_for_chunk_list(key, self._tensors[key], [wanted])
        if sum(torch.Size(item.lengths).numel() for item in items) != part.numel():
            raise InputError(f"its pieces of {key} don't make up the whole", where=self.folder)
        try:
            with _explain_damage(self.folder, hint="export another iteration"):
                self._reader.read_data(LoadPlan(items), _Into(part)).wait()
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            raise InputError(f"{key} cannot be read: {first_line(error)}", where=self.folder) from None
        return part

    def read_object(self, key: str) -> Any:
        """Read an object of values and tensors. Raises InputError."""
        try:
            packed = self._reader.read_object(key)
        except (DamagedCheckpoint, OSError, RuntimeError, EOFError, ValueError) as error:
            raise InputError(f"{key} cannot be read: {first_line(error)}", where=self.folder) from None
        return packed[0] if isinstance(packed, list) and len(packed) == 1 else packed


@contextmanager
def _explain_damage(folder: Path, *, hint: str | None = None) -> Iterator[None]:
    try:
        yield
    except DamagedCheckpoint as error:
        raise InputError(f"this checkpoint is damaged: {error.message}", where=folder, hint=hint) from None


class _Into(DefaultLoadPlanner):
    """Reads into one tensor."""

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


@contextmanager
def new_folder(target: Path, read: InputFiles | None = None) -> Iterator[Path]:
    """Yield an empty folder, as `published_folder` does. Raises InputError if `target` exists or cannot be written."""
    with published_folder(target.absolute(), read=read) as made:
        try:
            yield made
        except (Exception, CheckpointException) as error:
            if read is not None:
                read.check()  # a checkpoint that is removed meanwhile is neither damaged nor the output's fault
            words = _why_not_written(error, made)
            if words is None or isinstance(error, RelayrunError):
                raise
            hint = "see that there is room, and that you may write there"
            raise InputError(f"cannot be written: {words}", where=target, hint=hint) from None


def _why_not_written(error: BaseException | None, made: Path) -> str | None:
    """Return why a write below `made` failed; None if the error has another kind."""
    if error is None:
        return None
    if isinstance(error, OSError):
        return error.strerror or str(error) if fails_to_write(error, made) else None
    if isinstance(error, CheckpointException):
        return next((words for inner, _ in error.failures.values() if (words := _why_not_written(inner, made))), None)
    if isinstance(error, SafetensorError):
        return str(error)
    inner = _why_not_written(error.__cause__ or error.__context__, made)
    full = any(words in str(error) for words in ("inline_container", "iostream error"))
    if inner is None and isinstance(error, RuntimeError) and full:
        return "torch's writer met a full or broken disk, a quota or a limit of file sizes"
    return inner


_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class WrittenCheckpoint:
    """A checkpoint that was written, still without hashes."""

    folder: Path
    files: WrittenFiles

    def add_checksums(self, iteration: int) -> None:
        """Write the hashes of all files in the folder; no file may be added afterwards."""
        files = checksums.write_block_checksums(self.folder, 0, iteration, self.files.blocks, self.files.sizes)
        checksums.write_checksum_index(self.folder, iteration, files | self.files.files)


class _RepeatableWriter(ThreadedWriter):
    def storage_meta(self) -> None:
        """Leave out torch's record of a random number and of the folder's temporary name."""


class TorchDistSavePlan(DefaultSavePlanner):
    """The tensors and objects of a checkpoint, as a save plan of torch's writer; each is made when it is written."""

    def __init__(self) -> None:
        super().__init__()
        self._items: list[WriteItem] = []
        self._make: dict[MetadataIndex, Callable[[], torch.Tensor | io.BytesIO]] = {}

    def add_tensor(
        self,
        key: str,
        *,
        size: Sequence[int],
        start: Sequence[int],
        part: Sequence[int],
        dtype: torch.dtype,
        make: Callable[[], torch.Tensor],
    ) -> None:
        """Add the part of shape `part` that begins at `start` in the tensor `key` of shape `size`."""
        offsets = torch.Size(start)
        index = MetadataIndex(key, offsets)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(part)),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(size),
        )
        self._items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self._make[index] = make

    def copy_tensor(self, reader: CheckpointReader, key: str, name: str) -> None:
        """Add the tensor `key` of another checkpoint as `name`, with its blocks."""
        size, dtype = reader.size(key), reader.dtype_of(key)
        for start, part in reader.blocks(key):
            make = partial(reader.read, key, start=start, shape=part, dtype=dtype)
            self.add_tensor(name, size=size, start=start, part=part, dtype=dtype, make=make)

    def add_object(self, key: str, make: Callable[[], Any]) -> None:
        """Add an object; megatron-core keeps it in a list of one."""

        def packed() -> io.BytesIO:
            buffer = io.BytesIO()
            torch.save([make()], buffer)
            return buffer

        index = MetadataIndex(key)
        self._items.append(WriteItem(index=index, type=WriteItemType.BYTE_IO))
        self._make[index] = packed

    def add_extra_states(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Add the empty extra states that megatron-core's modules read. `shapes`: of all weights, by key. Without fp8
        each matrix of each layer and expert has an empty state, and so have the norms of heads and the norm after the
        last layer."""
        for key, shape in shapes.items():
            module, _, name = key.rpartition(".")
            kind = module.rpartition(".")[2]
            if name != "weight" or not (kind.startswith("linear_") or kind.endswith("_layernorm")):
                continue
            grid = list(shape[: 2 if "experts.experts." in key else 1]) if key.startswith("decoder.layers.") else [1]
            for at in itertools.product(*map(range, grid)):
                place = f"shard_{'.'.join(map(str, at))}_{'.'.join(map(str, grid))}"
                self.add_object(f"{module}._extra_state/{place}", lambda: None)

    def write(self, folder: Path, common: dict[str, Any]) -> WrittenCheckpoint:
        """Write the checkpoint into an existing folder. Raises torch's CheckpointException."""
        tensors = [item.tensor_data.chunk for item in self._items if item.tensor_data is not None]
        progress = Progress("writing", sum(chunk.sizes.numel() for chunk in tensors), "parameters")
        with warnings.catch_warnings(), progress:  # one process is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            writer = _RepeatableWriter(folder, 1)
            state_dict_saver.save({}, storage_writer=writer, planner=self, no_dist=True)
        torch.save(common, folder / "common.pt")
        write_json(folder / "metadata.json", _BACKENDS)
        return WrittenCheckpoint(folder, writer.written)

    # methods of torch's SavePlanner
    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Make the tensor, of the shape and type that its item declares, at the moment of its writing."""
        made = self._make[write_item.index]()
        count(made.numel() if isinstance(made, torch.Tensor) else 0)
        return made
