"""Save and load strategy for megatron-core: the sharded part of a state, and the common part of a load.

torch writes (`torch.distributed.checkpoint`) in threads of this process, see `async_writer`. `reader` compares every
byte that it reads. Ranks exchange plans and failures by messages at a save, and by collectives of `group` at a load.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from relayrun.control.trainers.pickle_records import no_collection
from relayrun.train.checkpoint.async_writer import ThreadedWriter, WrittenFiles
from relayrun.train.checkpoint.reader import CheckedReader
from relayrun.train.messages import RankObjectCollectives

T = TypeVar("T")
R = TypeVar("R")

Shards = dict[str, list[ShardedBase]]
"""Shards by key in the checkpoint; a key has several if a rank holds several parts of one tensor."""


class InProcessStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # megatron-core has no types
    """Writes the sharded part."""

    def __init__(self, messages: RankObjectCollectives, threads: int = 1) -> None:
        """`threads`: writer threads of this rank, each with a file of its own."""
        super().__init__("torch_dist", 1)
        self._messages = messages
        self._threads = threads
        self.write_seconds = 0.0
        """Seconds that this rank took to write its part of the newest save."""

    def by_key(self, sharded_state_dict: ShardedStateDict) -> Shards:
        """Return the shards that this rank writes."""
        shards: Shards = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)[0]
        return shards

    def write(self, shards: Shards, folder: str | Path, digests: Mapping[int, str] | None = None) -> WrittenFiles:
        """Return the files that this rank wrote. Raises CheckpointException on every rank if one of them failed.

        `digests`: XXH3-128 of tensors in host memory by their addresses; others are hashed before they are written.
        """
        writer = ThreadedWriter(folder, self._threads, digests)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        first = self._messages.rank == 0
        whole: list[Metadata] = []

        def plan() -> SavePlan:
            state = mcore_to_pyt_state_dict(shards, False)
            planner.set_up_planner(state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=first)
            writer.set_up_storage_writer(first, rank=self._messages.rank, use_collectives=True)
            return writer.prepare_local_plan(planner.create_local_plan())

        def join(plans: list[SavePlan]) -> list[SavePlan]:
            plans, metadata = planner.create_global_plan(plans)
            whole.append(metadata)
            return writer.prepare_global_plan(plans)

        def finish(results: list[list[WriteResult]]) -> list[None]:
            writer.finish(metadata=whole[0], results=results)
            return [None] * len(results)

        # the steps of torch's state_dict_saver, whose collectives would need another group
        with no_collection():  # of rank 0's records of all ranks
            joined = _together(self._messages, "plan", plan, join)

        def write() -> list[WriteResult]:
            began = time.perf_counter()
            results = writer.write_data(planner.finish_plan(joined), planner).wait()
            self.write_seconds = time.perf_counter() - began
            return results

        _together(self._messages, "write", write, finish)
        return writer.written

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        self.write(self.by_key(sharded_state_dict), checkpoint_dir)


def _together(
    messages: RankObjectCollectives, step: str, own: Callable[[], T], join: Callable[[list[T]], list[R]]
) -> R:
    """Run `own` on every rank, then `join` on rank 0, which returns an answer for each rank; return this rank's.

    Raises CheckpointException on every rank if one failed, with the errors of all.
    """
    made, met = None, None
    try:
        made = own()
    except Exception as error:
        met = _wrap_exception(error)
    everywhere = messages.gather((made, met))
    answers: list[tuple[Any, Any]] | None = None
    if everywhere is not None:
        failures = {rank: wrapped for rank, (_, wrapped) in enumerate(everywhere) if wrapped is not None}
        if not failures:
            try:
                answers = [(answer, None) for answer in join([each for each, _ in everywhere])]
            except Exception as error:
                failures = {0: _wrap_exception(error)}
        if failures:
            answers = [(None, failures)] * len(everywhere)
    answer, failures = messages.scatter(answers)
    if failures:
        raise CheckpointException(step, failures)
    found: R = answer
    return found


class _PlainObjects(MCoreLoadPlanner):  # type: ignore[misc]
    """Load planner of megatron-core, restricted to objects that are values and tensors, never code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        found = torch.load(value, map_location="cpu", weights_only=True)
        self.original_state_dict[read_item.dest_index.fqn] = found  # it is flat: keys of the checkpoint


def _read(sharded_state_dict: ShardedStateDict, reader: CheckedReader, group: ProcessGroup | None) -> dict[str, Any]:
    by_key, paths, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
    tensors = [shard for shard in nested_values(sharded_state_dict) if isinstance(shard, ShardedTensor)]
    planner = _PlainObjects(
        shapes_validation_sharded_tensors=[shard for shard in tensors if not shard.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={shard.key: shard for shard in tensors if shard.allow_shape_mismatch},
    )
    state = mcore_to_pyt_state_dict(by_key, True)
    state_dict_loader.load(state, storage_reader=reader, planner=planner, process_group=group)
    parts = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
    found: dict[str, Any] = _replace_sharded_keys_with_state_dict_keys(parts, paths, renamed)
    _restore_dict_types(found, sharded_state_dict)
    return found


def load_state(
    wanted: ShardedStateDict,
    reader: CheckedReader,
    group: ProcessGroup | None = None,
    *,
    common: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state that `wanted` describes, with the common part of the checkpoint; all ranks together.

    `common`: the common part, updated in place; None: it is read. The extra state of a module (`_extra_state`, which
    TransformerEngine keeps for fp8) is None if the checkpoint lacks it: local layers and imports write it for fewer
    modules. Raises DamagedCheckpoint, inside torch's CheckpointException if a rank met it while all were reading.
    """
    there = reader.metadata.state_dict_metadata

    def as_stored(value: Any) -> Any:
        if isinstance(value, ShardedObject) and value.key.endswith("_extra_state") and value.unique_key not in there:
            return LocalNonpersistentObject(None)
        if isinstance(value, ShardedTensor) and value.key not in there:  # local layers of Megatron-LM with experts
            value.key = value.key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        return value

    dict_list_map_inplace(as_stored, wanted)
    force_all_tensors_to_non_fp8(wanted)
    # the steps of megatron-core's load, which since 0.17 reads the common part itself
    state = reader.common() if common is None else common
    sharded, nonpersistent, factories = load_preprocess(wanted)
    sharded, _ = extract_sharded_base(sharded)
    merge(state, nonpersistent)
    validate_sharding_integrity(determine_global_metadata(sharded)[1])
    merge(state, _read(sharded, reader, group))
    found: dict[str, Any] = apply_factory_merges(state, factories)
    return found
