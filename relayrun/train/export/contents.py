"""What a torch_dist checkpoint shall hold, named first and made when its turn to be written comes: no ranks, no GPU."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from relayrun.files import write_json
from relayrun.train.checkpoint import checksums
from relayrun.train.checkpoint.writer import ThreadedWriter, WrittenFiles
from relayrun.train.export.reader import CheckpointReader

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class WrittenCheckpoint:
    """A checkpoint that was written, without its hashes yet."""

    folder: Path
    files: WrittenFiles

    def add_checksums(self, iteration: int) -> None:
        """Write down the hashes of all that lies in the folder; nothing may be added behind it."""
        files = checksums.write_block_checksums(self.folder, 0, iteration, self.files.blocks, self.files.sizes)
        checksums.write_checksum_index(self.folder, iteration, files | self.files.files)


class CheckpointContents(DefaultSavePlanner):
    """The tensors and objects of a checkpoint. Tells torch's writer what there is, and makes each when it is asked."""

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
        """Add the tensor `key` of another checkpoint as `name`, block by block as it lies there."""
        size, dtype = reader.size(key), reader.dtype_of(key)

        def copy(start: Sequence[int], part: Sequence[int]) -> torch.Tensor:
            return reader.read(key, start=start, shape=part, dtype=dtype)

        for start, part in reader.blocks(key):
            self.add_tensor(
                name,
                size=size,
                start=start,
                part=part,
                dtype=dtype,
                make=lambda start=start, part=part: copy(start, part),  # type: ignore[misc]
            )

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
        """Add the empty extra states that megatron-core's modules ask for; `shapes`: of all weights, by their keys.

        It keeps one, empty without fp8, for each matrix of each layer and expert, and for the norms of heads and behind
        the last layer.
        """
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
        """Write it all into a folder that is there. Raises torch's CheckpointException."""
        with warnings.catch_warnings():  # that this is one process, as it shall be
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            writer = ThreadedWriter(folder, 1)
            state_dict_saver.save({}, storage_writer=writer, planner=self, no_dist=True)
        torch.save(common, folder / "common.pt")
        write_json(folder / "metadata.json", _BACKENDS)
        return WrittenCheckpoint(folder, writer.written)

    def create_local_plan(self) -> SavePlan:
        """As torch asks for it."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As torch asks for it."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As torch asks for it."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """As torch asks for it."""
        return self._make[write_item.index]()
