"""A checkpoint in megatron-core's torch_dist format: weights, optimizer, schedule, generators, data position.

All ranks write in parallel, each into its own file; what data-parallel replicas hold in common is divided
among them. The format is that of `megatron.core.dist_checkpointing` (0.16.1), with its reader for loading.
Its writer is not used: it forks processes and keeps a server process for their results, which a signal to
the whole job kills, and a failure on one rank alone leaves the others waiting. torch's own writer
(`torch.distributed.checkpoint`) makes the same files inside this process and tells all ranks of a failure.

| key | what | split over ranks |
|---|---|---|
| model keys (`decoder...`, `embedding...`) | weights | as the model is |
| `optimizer...` | Adam's moments and step, fp32 weights | `fully_reshardable`: by parameter |
| `random` | generators of `random_state` | one object per rank |
| `data`, `progress`, `layout`, `fixed` | plain values, in common.pt | the same on all |
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from relayrun.config.rampup import BatchSizes
from relayrun.data.mixed import MixedOrder
from relayrun.data.progress import Progress
from relayrun.errors import FatalTrainingError
from relayrun.rundir.layout import RunDir
from relayrun.rundir.records import Commit
from relayrun.training import publish, random_state
from relayrun.training.model import Model
from relayrun.training.optimizer import Optimizer
from relayrun.training.parallel import Ranks

T = TypeVar("T")

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


class SaveFailed(Exception):
    """A save did not work, on all ranks alike. Training can go on."""


class Checkpointer:
    """Saves and loads the state of one run, for one attempt. Every method is called by all ranks together."""

    def __init__(
        self, run: RunDir, attempt: int, *, ranks: Ranks, model: Model, optimizer: Optimizer, order: MixedOrder,
        keep_last: int, keep_every: int | None, fixed: dict[str, object],
    ) -> None:  # fmt: skip
        """`fixed`: settings by name that a resume must find as they were."""
        self._run = run
        self._attempt = attempt
        self._ranks = ranks
        self._model = model
        self._optimizer = optimizer
        self._order = order
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._fixed = fixed
        self._common = {"layout": ranks.layout, "fixed": fixed}

    def save(self, position: Progress) -> Commit:
        """Write, publish and record a checkpoint.

        Raises SaveFailed on every rank if it did not work on one of them, and FatalTrainingError if a
        newer attempt owns the run.
        """
        started, iteration = time.monotonic(), position.iteration
        folder = Path(self._on_first_rank(lambda: str(publish.prepare(self._run, self._attempt, iteration))))
        state = {
            **self._sharded_state(loading=False),
            **self._common,
            "data": self._order.state(position.consumed_samples),
            "progress": position.state(),
        }
        sharded, common = save_preprocess(state)
        self._on_first_rank(lambda: TorchCommonSaveStrategy("torch", 1).save_common(common, str(folder)))
        try:
            FullyParallelSaveStrategyWrapper(
                InProcessStrategy(self._ranks.cpu_group),
                parallel_state.get_data_parallel_group(with_context_parallel=True),
            ).save(sharded, folder)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise SaveFailed(f"rank {rank}: {type(cause).__name__}: {cause}") from None

        def finish() -> Commit:
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))
            check_complete(folder)
            commit = Commit(
                iteration=iteration,
                path=str(self._run.checkpoint(iteration)),
                consumed_samples=position.consumed_samples,
                time=time.time(),
                seconds=time.monotonic() - started,
                files=sizes(folder),
            )
            publish.publish(self._run, self._attempt, commit, folder)
            publish.prune(self._run, self._attempt, self._keep_last, self._keep_every)
            return commit

        return self._on_first_rank(finish)

    def load(self, path: Path, sizes: BatchSizes) -> Progress:
        """Put the state at `path` in place; return where it stands, to go on with these batch sizes.

        Generators are left as they are seeded if the layout of the ranks has changed. Raises
        FatalTrainingError if the data or the kind of optimizer are not those of the checkpoint.
        """
        common = dist_checkpointing.load_common_state_dict(str(path))
        self._order.resume(common["data"])
        position = Progress.resume(common["progress"], sizes)
        for name, value in self._fixed.items():
            if common["fixed"][name] != value:
                raise FatalTrainingError(
                    f"{name} was {common['fixed'][name]} when this checkpoint was saved, and is {value}; "
                    "one kind of optimizer cannot read the state of the other",
                    where=path,
                    hint=f"set {name} back, or start a new run",
                )
        wanted = self._sharded_state(loading=True)
        same_layout = common["layout"] == self._ranks.layout
        if not same_layout:
            del wanted["random"]
            if self._ranks.rank == 0:
                print(f"ranks are now {self._ranks.layout}, were {common['layout']}: dropout masks start anew",
                      flush=True)  # fmt: skip
        state = dist_checkpointing.load(wanted, str(path))
        self._model.load(state["model"])
        self._optimizer.load(state["optimizer"], position)
        if same_layout:
            random_state.restore(state["random"])
        return position

    def _sharded_state(self, *, loading: bool) -> ShardedStateDict:
        model = self._model.sharded_state_dict(dict(_METADATA))
        return {
            "model": model,
            "optimizer": self._optimizer.inner.sharded_state_dict(model, is_loading=loading, metadata=dict(_METADATA)),
            "random": ShardedObject(
                "random", random_state.capture(), (self._ranks.world_size,), (self._ranks.rank,)
            ),
        }  # fmt: skip

    def _on_first_rank(self, action: Callable[[], T]) -> T:
        """Do it on rank 0; return its result, or raise what it met, on every rank."""
        return self._ranks.on_first_rank(action, SaveFailed)


class InProcessStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # megatron-core has no types
    """Writes the sharded part with torch's writer; `group` carries the plans and the news of failures."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__("torch_dist", 1)
        self._group = group

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Raises CheckpointException on every rank if one of them failed."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state_dict_saver.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )


def check_complete(folder: Path) -> None:
    """Raise OSError unless every byte range that the checkpoint's metadata names is on disk."""
    ends: dict[str, int] = {}
    for item in FileSystemReader(folder).read_metadata().storage_data.values():
        ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
    for name, end in {**ends, "common.pt": 1, "metadata.json": 1}.items():
        size = (folder / name).stat().st_size
        if size < end:
            raise OSError(f"{folder / name} has {size} bytes, its checkpoint names {end}")


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below `folder`, by relative name."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
