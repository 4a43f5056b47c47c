"""A checkpoint in megatron-core's torch_dist format: weights, optimizer, schedule, generators, data position.

All ranks write in parallel, each into files of its own; what data-parallel replicas hold in common is divided
among them. The format is that of `megatron.core.dist_checkpointing` (0.16.1), with its reader for loading and
torch's writer (`torch.distributed.checkpoint`), which runs in a thread while training goes on; see `saver.py`.
megatron-core's own writer is not used: it forks processes and keeps a server process for their results, which a
signal to the whole job kills, and a failure on one rank alone leaves the others waiting.

| key | what | split over ranks |
|---|---|---|
| model keys (`decoder...`, `embedding...`) | weights | as the model is |
| `optimizer...` | Adam's moments and step, fp32 weights | `fully_reshardable`: by parameter |
| `random` | generators of `random_state` | one object per rank |
| `data`, `progress`, `layout`, `fixed` | plain values, in common.pt | the same on all |
| `guard`, and the import path of each of a user's hooks with a state | plain values, in common.pt | rank 0's, for all |
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
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
from torch.distributed.checkpoint.filesystem import FileSystemReader

from relayrun.config.rampup import BatchSizes, Leg
from relayrun.config.schema import Checkpoint
from relayrun.data.order.sampler import MixtureSampler
from relayrun.data.progress import Progress
from relayrun.errors import FatalTrainingError
from relayrun.files import write_atomic
from relayrun.rundir.records import Commit
from relayrun.rundir.run import Run
from relayrun.training.checkpoint import publish, random_state
from relayrun.training.checkpoint.background import BackgroundSave
from relayrun.training.checkpoint.host_copy import HostCopy, Reserved
from relayrun.training.checkpoint.writer import ThreadedWriter, check_complete, sizes
from relayrun.training.hook_list import Hooks
from relayrun.training.model.gpt import Model
from relayrun.training.optimizer import Optimizer
from relayrun.training.parallel import Ranks

log = logging.getLogger(__name__)

T = TypeVar("T")
Shards = dict[str, list[ShardedBase]]
"""By their key in the checkpoint; a key has several where a rank holds several parts of one tensor."""

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


class SaveFailed(Exception):
    """A save did not work, on all ranks alike. Training can go on."""


class Checkpointer:
    """Saves and loads the state of one run, for one attempt. Every method is called by all ranks together."""

    def __init__(
        self,
        run: Run,
        attempt: int,
        *,
        ranks: Ranks,
        model: Model,
        optimizer: Optimizer,
        order: MixtureSampler,
        hooks: Hooks,
        settings: Checkpoint,
        fixed: dict[str, object],
    ) -> None:
        """`fixed`: settings by name that a resume must find as they were."""
        self._run = run
        self._attempt = attempt
        self._ranks = ranks
        self._writers = ranks.in_save_thread()
        self._model = model
        self._optimizer = optimizer
        self._order = order
        self._hooks = hooks
        self._settings = settings
        self._fixed = fixed
        self._common = {"layout": ranks.layout, "fixed": fixed}
        self._host = HostCopy(ranks.device)
        self._strategy = InProcessStrategy(self._writers.cpu_group, settings.writer_threads)
        self._division = FullyParallelSaveStrategyWrapper(
            self._strategy,
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            do_cache_distribution=True,  # the same shards at every save: only the first one is negotiated
        )
        self._first = True

    def reserve(self) -> Reserved | None:
        """Allocate host memory for the copies of all saves; return what that took.

        Where there is not so much, a warning says so and the result is None; the next save tries again, and fails.
        """
        sharded, _ = self._divided(self._sharded_state(loading=False))
        try:
            return self._host.reserve(_tensors(self._strategy.by_key(sharded)))
        except (RuntimeError, MemoryError) as error:
            log.warning("rank %s: no host memory for the copies of saves: %s", self._ranks.rank, error)
            return None

    def begin(self, position: Progress, *, copy: bool, beside: bool) -> BackgroundSave:
        """Start to write, publish and record a checkpoint.

        With `copy` the state may change as soon as `BackgroundSave.wait_for_copy` returns, without it when the
        save is over. `beside`: training goes on meanwhile. The save's result raises SaveFailed on every rank if it
        did not work on one of them, and FatalTrainingError if a newer attempt owns the run.
        """
        started = time.monotonic()
        iteration, consumed_samples = position.iteration, position.consumed_samples
        state = {
            **self._sharded_state(loading=False),
            **self._common,
            "data": self._order.state(consumed_samples),
            "progress": position.state(),
            **self._hooks.state_dict(),
        }
        sharded, common = self._divided(state)
        shards = self._strategy.by_key(sharded)
        plain = _serialised(common) if self._ranks.rank == 0 else b""
        stream = self._host.follow()

        def write(copied: Callable[[], None]) -> Commit:
            if self._ranks.device.type == "cuda":
                torch.cuda.set_device(self._ranks.device)  # a new thread begins with the first one
            if copy:
                self._agree(lambda: self._copy(shards, stream, iteration))
            copied()
            folder = Path(self._on_first_rank(lambda: str(publish.prepare(self._run, self._attempt, iteration))))
            self._on_first_rank(lambda: write_atomic(folder / COMMON_STATE_FNAME, plain))
            try:
                self._strategy.write(shards, folder)
            except CheckpointException as error:
                rank, (cause, _) = next(iter(error.failures.items()))
                raise SaveFailed(f"rank {rank}: {type(cause).__name__}: {cause}") from None
            return self._on_first_rank(partial(self._publish, folder, iteration, consumed_samples, started))

        return BackgroundSave(iteration, write, beside=beside)

    def _copy(self, shards: Shards, stream: torch.cuda.Stream | None, iteration: int) -> None:
        late = self._host.fill(_tensors(shards), stream)
        if late.size:
            rank, size = self._ranks.rank, late.size / (1 << 30)
            log.info("rank %s: the save of iteration %s allocated %.1f GiB of host memory", rank, iteration, size)

    def _publish(self, folder: Path, iteration: int, consumed_samples: int, started: float) -> Commit:
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
        check_complete(folder)
        self._hooks.before_publish(iteration, folder)
        commit = Commit(
            iteration=iteration,
            path=str(self._run.checkpoint(iteration)),
            consumed_samples=consumed_samples,
            time=time.time(),
            seconds=time.monotonic() - started,
            files=sizes(folder),
        )
        publish.publish(self._run, self._attempt, commit, folder)
        publish.prune(self._run, self._attempt, self._settings.keep_last, self._settings.keep_every)
        return commit

    def load(self, path: Path, sizes: BatchSizes, *, foreign: bool = False) -> Progress:
        """Put the state at `path` in place; return where it stands, to go on with these batch sizes.

        `foreign`: it is not of this run; what settings leave out of it begins anew. Generators are left as they
        are seeded if the layout of the ranks has changed. Raises FatalTrainingError if the model, the data or
        the kind of optimizer are not those of the checkpoint.
        """
        common = dist_checkpointing.load_common_state_dict(str(path))
        anew = foreign and self._settings.finetune
        with_optimizer = not (anew or (foreign and self._settings.no_load_optim))
        position = Progress(sizes) if anew else self._position(common, sizes, foreign=foreign)
        if with_optimizer:
            self._check_fixed(common["fixed"], path)
        wanted = self._sharded_state(loading=True, optimizer=with_optimizer)
        same_layout = not anew and common["layout"] == self._ranks.layout
        if not same_layout:
            del wanted["random"]
            if self._ranks.rank == 0 and not anew:
                print(
                    f"ranks are now {self._ranks.layout}, were {common['layout']}: dropout masks start anew", flush=True
                )
        self._check_shapes(wanted, path)
        state = dist_checkpointing.load(wanted, str(path))
        self._model.load(state["model"])
        if with_optimizer:
            self._optimizer.load(state["optimizer"], position)
        else:
            self._optimizer.begin(position)
        if not anew:
            self._hooks.load_state_dict(common)
        if same_layout:
            random_state.restore(state["random"])
        return position

    def _position(self, common: dict[str, Any], sizes: BatchSizes, *, foreign: bool) -> Progress:
        """Where a checkpoint stands in training and in the data."""
        if foreign and self._settings.no_load_data:
            iteration = common["progress"]["iteration"]
            return Progress(sizes, iteration=iteration, legs=[Leg(iteration, 0, sizes)])
        try:
            self._order.resume(common["data"])
        except FatalTrainingError as error:
            if not foreign:
                raise
            hint = "set checkpoint.no_load_data=true to begin anew with these data"
            raise FatalTrainingError(error.message, where=error.where, hint=hint) from None
        return Progress.resume(common["progress"], sizes)

    def _check_fixed(self, found: Mapping[str, object], path: Path) -> None:
        for name, value in self._fixed.items():
            if found[name] != value:
                raise FatalTrainingError(
                    f"{name} was {found[name]} when this checkpoint was saved, and is {value}; "
                    "one kind of optimizer cannot read the state of the other",
                    where=path,
                    hint=f"set {name} back, or start a new run with --load and checkpoint.no_load_optim=true",
                )

    def _check_shapes(self, wanted: ShardedStateDict, path: Path) -> None:
        found = FileSystemReader(path).read_metadata().state_dict_metadata
        differences = [
            f"{shard.key} is {list(size) if size else 'not'} there and {list(shard.global_shape)} here"
            for whole in nested_values(wanted["model"])
            for shard in nested_values([whole.build()] if isinstance(whole, ShardedTensorFactory) else [whole])
            if isinstance(shard, ShardedTensor)
            and (size := getattr(found.get(shard.key), "size", None)) != torch.Size(shard.global_shape)
        ]
        for rank, texts in enumerate(self._ranks.gather(differences[:3])):
            if texts:
                raise FatalTrainingError(
                    f"this checkpoint is of another model (rank {rank}): {'; '.join(texts)}",
                    where=path,
                    hint="take the model section of the run that made it",
                )

    def _divided(self, state: ShardedStateDict) -> tuple[ShardedStateDict, dict[str, Any]]:
        """What this rank saves of a state, and the plain values of it."""
        sharded, common = save_preprocess(state, validate_access_integrity=self._first)
        self._division.apply_saving_parallelization(sharded)
        self._first = False
        return sharded, common

    def _sharded_state(self, *, loading: bool, optimizer: bool = True) -> ShardedStateDict:
        model, inner = self._model.sharded_state_dict(dict(_METADATA)), self._optimizer.inner
        part = {}
        if optimizer:  # asked for a state to load into, torch's Adam would be left with half of one
            part = {"optimizer": inner.sharded_state_dict(model, is_loading=loading, metadata=dict(_METADATA))}
        return {
            "model": model,
            **part,
            "random": ShardedObject("random", random_state.capture(), (self._ranks.world_size,), (self._ranks.rank,)),
        }

    def _on_first_rank(self, action: Callable[[], T]) -> T:
        """In the thread of a save: do it on rank 0; return its result, or raise what it met, on every rank."""
        return self._writers.on_first_rank(action, SaveFailed)

    def _agree(self, action: Callable[[], None]) -> None:
        """In the thread of a save: do it on every rank; raise SaveFailed on all if one could not."""
        failure = None
        try:
            action()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        for rank, text in enumerate(self._writers.gather(failure)):
            if text is not None:
                raise SaveFailed(f"rank {rank}: {text}")


class InProcessStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # megatron-core has no types
    """Writes the sharded part with torch's writer; `group` carries the plans and the news of failures."""

    def __init__(self, group: ProcessGroup, threads: int = 1) -> None:
        """`threads`: of this rank, each of which writes a file of its own."""
        super().__init__("torch_dist", 1)
        self._group = group
        self._threads = threads

    def by_key(self, sharded_state_dict: ShardedStateDict) -> Shards:
        """What this rank writes."""
        shards: Shards = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)[0]
        return shards

    def write(self, shards: Shards, folder: str | Path) -> None:
        """Raises CheckpointException on every rank if one of them failed."""
        state_dict_saver.save(
            mcore_to_pyt_state_dict(shards, False),
            storage_writer=ThreadedWriter(folder, self._threads),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=self._group,
        )

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        self.write(self.by_key(sharded_state_dict), checkpoint_dir)


def _tensors(shards: Shards) -> Iterator[ShardedTensor]:
    return (shard for parts in shards.values() for shard in parts if isinstance(shard, ShardedTensor))


def _serialised(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
