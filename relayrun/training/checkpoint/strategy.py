"""What megatron-core asks of a format: how the sharded part of a state is written and read, and the common part read.

Writing is torch's (`torch.distributed.checkpoint`), in threads of this process; see `writer`. Reading compares every
byte; see `reader`. `group` carries the plans and the news of failures between the ranks.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
)
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.planner import ReadItem

from relayrun.training.checkpoint.reader import CheckedReader
from relayrun.training.checkpoint.writer import ThreadedWriter, Written

Shards = dict[str, list[ShardedBase]]
"""By their key in the checkpoint; a key has several where a rank holds several parts of one tensor."""


class InProcessStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # megatron-core has no types
    """Writes the sharded part."""

    def __init__(self, group: ProcessGroup, threads: int = 1) -> None:
        """`threads`: of this rank, each of which writes a file of its own."""
        super().__init__("torch_dist", 1)
        self._group = group
        self._threads = threads

    def by_key(self, sharded_state_dict: ShardedStateDict) -> Shards:
        """What this rank writes."""
        shards: Shards = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)[0]
        return shards

    def write(self, shards: Shards, folder: str | Path, digests: Mapping[int, str] | None = None) -> Written:
        """Return what this rank wrote. Raises CheckpointException on every rank if one of them failed.

        `digests`: XXH3-128 of tensors in host memory, by their addresses; others are hashed before they are written.
        """
        writer = ThreadedWriter(folder, self._threads, digests)
        state_dict_saver.save(
            mcore_to_pyt_state_dict(shards, False),
            storage_writer=writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )
        return writer.written

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        self.write(self.by_key(sharded_state_dict), checkpoint_dir)


class _PlainObjects(MCoreLoadPlanner):  # type: ignore[misc]
    """The planner of megatron-core; but objects are values and tensors, never code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        found = torch.load(value, map_location="cpu", weights_only=True)
        self.original_state_dict[read_item.dest_index.fqn] = found  # it is flat: keys of the checkpoint


class _Sharded(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Reads the sharded part."""

    def __init__(self, reader: CheckedReader, group: ProcessGroup | None) -> None:
        super().__init__()
        self._reader = reader
        self._group = group

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> dict[str, Any]:
        by_key, paths, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        tensors = [shard for shard in nested_values(sharded_state_dict) if isinstance(shard, ShardedTensor)]
        planner = _PlainObjects(
            shapes_validation_sharded_tensors=[shard for shard in tensors if not shard.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={shard.key: shard for shard in tensors if shard.allow_shape_mismatch},
        )
        state = mcore_to_pyt_state_dict(by_key, True)
        state_dict_loader.load(state, storage_reader=self._reader, planner=planner, process_group=self._group)
        parts = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        found: dict[str, Any] = _replace_sharded_keys_with_state_dict_keys(parts, paths, renamed)
        _restore_dict_types(found, sharded_state_dict)
        return found


class _Common(TorchCommonLoadStrategy):  # type: ignore[misc]
    """Has the common part."""

    def __init__(self, common: dict[str, Any]) -> None:
        super().__init__()
        self._common = common

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return self._common


def load(
    wanted: ShardedStateDict,
    reader: CheckedReader,
    group: ProcessGroup | None = None,
    *,
    common: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state that `wanted` describes, with the common part of the checkpoint; all ranks together.

    `common`: what to take for the common part, and to fill in place; None: it is read.

    The extra state of a module (`_extra_state`, which TransformerEngine keeps for fp8) is None where the checkpoint has
    none: local layers and imports write it for fewer modules.

    Raises Damaged, within torch's CheckpointException where a rank met it while all were reading.
    """
    there = reader.metadata.state_dict_metadata

    def without_missing(value: Any) -> Any:
        if isinstance(value, ShardedObject) and value.key.endswith("_extra_state") and value.unique_key not in there:
            return LocalNonpersistentObject(None)
        return value

    dict_list_map_inplace(without_missing, wanted)
    state: dict[str, Any] = dist_checkpointing.load(
        wanted,
        str(reader.folder),
        sharded_strategy=_Sharded(reader, group),
        common_strategy=_Common(reader.common() if common is None else common),
    )
    return state
