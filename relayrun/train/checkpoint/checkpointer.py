"""Saves and loads a checkpoint of the whole state, in megatron-core's torch_dist format.

All ranks write in parallel, each into its own files; data-parallel replicas share the work. Loading uses
`megatron.core.dist_checkpointing`, writing torch's writer (`torch.distributed.checkpoint`) in a thread beside training.
megatron-core's own writer forks processes and keeps a server process for their results: a signal to the whole job kills
them, and a failure on one rank leaves the others waiting.

| key | content | split over ranks |
|---|---|---|
| model keys (`decoder...`, `embedding...`) | weights | as the model is |
| `optimizer...` | Adam's moments and step, fp32 weights | `fully_reshardable`: by parameter |
| `optimizer.state...` of another optimizer | its state by name, fp32 weights | by parameter, see `user_optimizer` |
| `random` | generators, see `distributed` | one object per rank |
| `data`, `progress`, `layout`, `fixed`, `optimizer_groups` | plain values, in common.pt | equal on all ranks |
| `guard`, and the import paths of a user's hooks | plain values, in common.pt | rank 0's, for all |
"""

from __future__ import annotations

import io
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from torch.distributed.checkpoint.api import CheckpointException

from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.training import IterationRange
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run, stream_positions_path
from relayrun.errors import FatalTrainingError
from relayrun.files import file_sizes, write_atomic, write_json
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.tokens.order.sampler import Cursor, MixtureSampler, ReplicaSampleReader
from relayrun.train import distributed
from relayrun.train.checkpoint import checksums, compatibility, megatron_strategy, publish
from relayrun.train.checkpoint.async_writer import (
    BackgroundSave,
    HostCopy,
    HostMemoryStats,
    WrittenFiles,
    check_complete,
)
from relayrun.train.checkpoint.checksums import DamagedCheckpoint, FileChecksum
from relayrun.train.checkpoint.megatron_strategy import InProcessStrategy, Shards
from relayrun.train.checkpoint.parallel_load import BlockExchange
from relayrun.train.checkpoint.reader import COMMON_FILE, CheckedReader, RefusedCheckpoint, reported_error
from relayrun.train.distributed import Ranks
from relayrun.train.hook_list import Hooks
from relayrun.train.model.gpt import ModelStage
from relayrun.train.optimizer import parameter_groups, user_optimizer
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer

log = logging.getLogger(__name__)
T = TypeVar("T")
OPTIMIZER_GROUPS = "optimizer_groups"
"""Key of `optimizer.groups`, present if the run has groups."""
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,  # one name for a tensor, even if experts have an optimizer of their own
}


class SaveFailed(Exception):
    """A save failed on all ranks alike; training can continue."""


@dataclass(eq=False)
class Checkpointer:
    """Saves and loads the state of a run, for one attempt. All ranks call every method together."""

    run: Run
    attempt: int
    config: RunConfig
    ranks: Ranks
    model: ModelStage
    optimizer: ScheduledOptimizer
    order: MixtureSampler
    hooks: Hooks
    reading: ReplicaSampleReader | None = None
    """Reader of this rank's streams, set by the loop; None without streams."""

    def __post_init__(self) -> None:
        ranks, config = self.ranks, self.config
        self._writers = ranks.in_save_thread()
        self._settings = config.checkpoint
        self._fixed = compatibility.fixed_settings(config)
        self._groups = [group.model_dump() for group in config.optimizer.groups]
        self._common: dict[str, object] = {"layout": ranks.layout, "fixed": self._fixed}
        if self._groups:
            self._common[OPTIMIZER_GROUPS] = self._groups
        self._host = HostCopy(ranks.device)
        assert self._writers.messages is not None
        self._strategy = InProcessStrategy(self._writers.messages, self._settings.writer_threads)
        self._own_seconds: list[float] = []
        """Seconds of each copy and each write, see `take_own_seconds`."""
        self._division = FullyParallelSaveStrategyWrapper(
            self._strategy,
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            do_cache_distribution=True,  # the shards of every save are equal: negotiate once
        )
        self._first = True

    def reserve(self) -> HostMemoryStats | None:
        """Allocate host memory for the copies of all saves; return the allocation.

        If memory is short, log a warning and return None; the next save tries again, and fails.
        """
        sharded, _ = self._divided(self._sharded_state())
        try:
            return self._host.reserve(_tensors(self._strategy.by_key(sharded)))
        except (RuntimeError, MemoryError) as error:
            log.warning("rank %s: no host memory for the copies of saves: %s", self.ranks.rank, error)
            return None

    def state(self, position: TrainingProgress) -> ShardedStateDict:
        return {
            **self._sharded_state(),
            **self._common,
            "data": self.order.state(position.consumed_samples, self._cursors(position.consumed_samples)),
            "progress": position.state(),
            **self.hooks.state_dict(),
        }

    def take_own_seconds(self) -> float:
        """Return and reset this rank's seconds in saves: its copy, and, unless beside training, its write."""
        taken, self._own_seconds = self._own_seconds, []
        return sum(taken)

    def wanted_state(self) -> ShardedStateDict:
        """Return the state to load for an unchanged layout."""
        return self._sharded_state(found={})

    def restore_copy(
        self, plain: dict[str, Any], fill: Callable[[ShardedStateDict, dict[str, Any]], dict[str, Any]]
    ) -> TrainingProgress:
        """Restore a state of an unchanged layout; return its position.

        `plain`: its plain values. `fill(wanted, plain)` returns the wanted parts merged with the plain values.
        """
        position, hooks = self._position(plain, foreign=False), dict(plain)
        state = fill(self.wanted_state(), plain)
        self.model.load(state["model"])
        self.optimizer.load(state["optimizer"], position)
        self.hooks.load_state_dict(hooks)
        distributed.restore_random_state(state["random"])
        return position

    def start_save(self, position: TrainingProgress, *, copy: bool, beside: bool) -> BackgroundSave:
        """Start to write, publish and record a checkpoint.

        With `copy` the state may change when `BackgroundSave.wait_for_copy` returns, without it when the save is over.
        `beside`: training continues meanwhile. The result of the save raises SaveFailed on every rank if it failed on
        any, and FatalTrainingError if a newer attempt owns the run.
        """
        started = time.monotonic()
        iteration, consumed_samples = position.iteration, position.consumed_samples
        sharded, common = self._divided(self.state(position))
        shards = self._strategy.by_key(sharded)
        plain = torch_bytes(common) if self.ranks.rank == 0 else b""
        readable = {**common["data"], "progress": common["progress"]}
        stream = self._host.new_stream()

        def copy_timed() -> None:
            began = time.perf_counter()
            self._copy(shards, stream, iteration)
            self._own_seconds.append(time.perf_counter() - began)

        def write(copied: Callable[[], None]) -> CheckpointCommit:
            if self.ranks.device.type == "cuda":
                torch.cuda.set_device(self.ranks.device)  # a new thread starts with device 0
            if copy:
                self._agree(copy_timed)
            copied()
            digests = self._host.digests() if copy else {}
            folder = Path(self._on_first_rank(lambda: str(publish.prepare_staging(self.run, self.attempt, iteration))))
            self._on_first_rank(lambda: write_atomic(folder / COMMON_FILE, plain))
            if self.order.lanes is not None:  # for people: a load reads COMMON_FILE
                self._on_first_rank(lambda: write_json(stream_positions_path(folder), readable))
            try:
                written = self._strategy.write(shards, folder, digests)
            except CheckpointException as error:
                rank, (cause, _) = next(iter(error.failures.items()))
                raise SaveFailed(f"rank {rank}: {type(cause).__name__}: {cause}") from None
            if not beside:
                self._own_seconds.append(self._strategy.write_seconds)
            files = {COMMON_FILE: checksums.checksum_of_bytes(plain)}
            for part in self._agree(lambda: self._record(folder, iteration, written)):
                files |= part
            return self._on_first_rank(partial(self._publish, folder, iteration, consumed_samples, started, files))

        return BackgroundSave(iteration, write, beside=beside)

    def _cursors(self, consumed_samples: int) -> list[dict[str, dict[int, Cursor]]]:
        if self.reading is None:
            return []
        return self.ranks.gather(self.reading.cursors(consumed_samples))

    def _copy(self, shards: Shards, stream: torch.cuda.Stream | None, iteration: int) -> None:
        late = self._host.fill(_tensors(shards), stream)
        if late.size:
            rank, size = self.ranks.rank, late.size / (1 << 30)
            log.info("rank %s: the save of iteration %s allocated %.1f GiB of host memory", rank, iteration, size)

    def _record(self, folder: Path, iteration: int, written: WrittenFiles) -> dict[str, FileChecksum]:
        """Write the checksums of this rank's files; return the files."""
        rank = self.ranks.rank
        return checksums.write_block_checksums(folder, rank, iteration, written.blocks, written.sizes) | written.files

    def _publish(
        self, folder: Path, iteration: int, consumed_samples: int, started: float, files: dict[str, FileChecksum]
    ) -> CheckpointCommit:
        backends = json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode()
        write_atomic(folder / CONFIG_FNAME, backends)
        check_complete(folder)
        self.hooks.before_publish(iteration, folder)
        root = checksums.write_checksum_index(
            folder, iteration, files | {CONFIG_FNAME: checksums.checksum_of_bytes(backends)}
        )
        commit = CheckpointCommit(
            iteration=iteration,
            path=str(self.run.checkpoint(iteration)),
            consumed_samples=consumed_samples,
            time=time.time(),
            seconds=time.monotonic() - started,
            files=file_sizes(folder),
            checksum=root,
        )
        publish.publish_checkpoint(self.run, self.attempt, commit, folder)
        publish.prune_checkpoints(self.run, self.attempt, self._settings.keep_last, self._settings.keep_every)
        return commit

    def load(self, path: Path, *, root: str | None, foreign: bool = False) -> TrainingProgress:
        """Load the state at `path`; return its position, to continue with the config's batch sizes.

        `root`: the checksum of its commit, None without a commit. `foreign`: the checkpoint belongs to another run;
        settings may leave parts out, which then start anew. If the layout of the ranks has changed, generators keep
        their seeds.

        Raises DamagedCheckpoint on every rank if a rank read other bytes than were saved; the state is then undefined
        until another load succeeds. Raises FatalTrainingError if model, data or kind of optimizer differ from the
        checkpoint, or if content is missing.
        """
        try:
            return self._load(path, root=root, foreign=foreign)
        except BaseException as error:  # torch's CheckpointException is not an Exception
            if (damaged := reported_error(error, DamagedCheckpoint)) is not None:
                raise damaged from None
            if (refused := reported_error(error, RefusedCheckpoint)) is not None:
                raise FatalTrainingError(refused.message, where=refused.where, hint=refused.hint) from error
            if (words := why_not_loadable(error)) is None:
                raise
            raise FatalTrainingError(
                f"this checkpoint cannot be loaded: {words}",
                where=path,
                hint="write the iteration of an older one into latest_checkpointed_iteration.txt, submit with --resume",
            ) from error

    def _open(self, path: Path, root: str | None) -> CheckedReader:
        """Open a checkpoint on every rank, or raise the first rank's error on all."""
        reader, met = None, None
        try:
            reader = CheckedReader(path, root)
            reader.common()
        except Exception as error:
            met = error
        first = next((error for error in self.ranks.gather(met) if error is not None), None)
        if first is not None:
            raise first
        assert reader is not None
        if not reader.checked and self.ranks.rank == 0:
            log.warning("%s was saved without checksums: its bytes are taken as they are", path)
        return reader

    def _load(self, path: Path, *, root: str | None, foreign: bool) -> TrainingProgress:
        reader = self._open(path, root)
        common = reader.common()
        anew = foreign and self._settings.finetune
        with_optimizer = not (anew or (foreign and self._settings.no_load_optim))
        sizes = self.config.training.batch_sizes
        position = TrainingProgress(sizes) if anew else self._position(common, foreign=foreign)
        if with_optimizer:
            compatibility.refuse_other_fixed_settings(common["fixed"], self._fixed, path)
        wanted = self._sharded_state(found=reader.metadata.state_dict_metadata, optimizer=with_optimizer)
        same_layout = not anew and common["layout"] == self.ranks.layout
        if not same_layout:
            del wanted["random"]
            if self.ranks.rank == 0 and not anew:
                print(
                    f"ranks are now {self.ranks.layout}, were {common['layout']}: dropout masks start anew", flush=True
                )
        self._check_shapes(wanted, reader)
        plain = reader.common()
        if with_optimizer and "optimizer" in plain:
            fitted = (
                user_optimizer.fit_plain_state if self._fixed["optimizer"] == "adam" else user_optimizer.fit_user_state
            )
            plain["optimizer"] = fitted(plain["optimizer"], wanted["optimizer"])
            parameter_groups.fit_groups(plain["optimizer"], wanted["optimizer"])
            before = common.get(OPTIMIZER_GROUPS, [])
            if before != self._groups and self.ranks.rank == 0:
                print(f"optimizer.groups is now {self._groups}, was {before}: it holds from here on", flush=True)
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if self._settings.fully_parallel_load and replicas.size() > 1:
            reader.exchange = BlockExchange(replicas, self.ranks.device)
        state = megatron_strategy.load_state(wanted, reader, self.ranks.cpu_group, common=plain)
        self._say_how_much(reader)
        self.model.load(state["model"])
        if with_optimizer:
            self.optimizer.load(state["optimizer"], position)
        else:
            self.optimizer.begin(position)
        if not anew:
            self.hooks.load_state_dict(common)
        if same_layout:
            distributed.restore_random_state(state["random"])
        return position

    def _say_how_much(self, reader: CheckedReader) -> None:
        counted = self.ranks.gather((reader.bytes_read, reader.bytes_wanted))
        if self.ranks.rank == 0:
            read, needed = (max(column) for column in zip(*counted, strict=True))
            words = f"a rank read at most {read:,} bytes of tensors, and needs at most {needed:,}"
            log.info("%s: %s", reader.folder, words)

    def _position(self, common: dict[str, Any], *, foreign: bool) -> TrainingProgress:
        sizes = self.config.training.batch_sizes
        if foreign and self._settings.no_load_data:
            iteration = common["progress"]["iteration"]
            return TrainingProgress(sizes, iteration=iteration, legs=[IterationRange(iteration, 0, sizes)])
        try:
            if common["data"] is not None:  # Megatron-LM records the number of samples only
                self.order.resume(common["data"])
        except FatalTrainingError as error:
            if not foreign:
                raise
            raise FatalTrainingError(error.message, where=error.where, hint=compatibility.OTHER_DATA_HINT) from None
        return TrainingProgress.resume(common["progress"], sizes)

    def _check_shapes(self, wanted: ShardedStateDict, reader: CheckedReader) -> None:
        found = reader.metadata.state_dict_metadata
        differences = [
            f"{shard.key} is {list(size) if size else 'not'} there and {list(shard.global_shape)} here"
            for whole in nested_values(wanted["model"])
            for shard in user_optimizer.parameter_sharded_tensors(whole)
            if isinstance(shard, ShardedTensor)
            and (size := getattr(found.get(shard.key), "size", None)) != torch.Size(shard.global_shape)
        ]
        for rank, texts in enumerate(self.ranks.gather(differences[:3])):
            if texts:
                raise FatalTrainingError(
                    f"this checkpoint is of another model (rank {rank}): {'; '.join(texts)}",
                    where=reader.folder,
                    hint="take the model section of the run that made it",
                )

    def _divided(self, state: ShardedStateDict) -> tuple[ShardedStateDict, dict[str, Any]]:
        """Return the part of a state that this rank saves, and its plain values."""
        sharded, common = save_preprocess(state, validate_access_integrity=self._first)
        self._division.apply_saving_parallelization(sharded)
        self._first = False
        return sharded, common

    def _sharded_state(self, *, found: Mapping[str, Any] | None = None, optimizer: bool = True) -> ShardedStateDict:
        """Return the state to save, or to load if `found` is given: the checkpoint's entries by key."""
        model, inner = self.model.sharded_state_dict(dict(_METADATA)), self.optimizer.inner
        part = {}
        if optimizer:  # a request for a state to load into leaves torch's Adam with half of one
            metadata = _METADATA | {user_optimizer.FOUND_KEY: found}
            part = {"optimizer": inner.sharded_state_dict(model, is_loading=found is not None, metadata=metadata)}
        return {
            "model": model,
            **part,
            "random": ShardedObject(
                "random", distributed.capture_random_state(), (self.ranks.world_size,), (self.ranks.rank,)
            ),
        }

    def _on_first_rank(self, action: Callable[[], T]) -> T:
        """In a save thread: run it on rank 0; return its result, or raise its error, on every rank."""
        return self._writers.on_first_rank(action, SaveFailed)

    def _agree(self, action: Callable[[], T]) -> list[T]:
        """In a save thread: run it on every rank; return all results, or raise SaveFailed on all ranks."""
        made, failure = None, None
        try:
            made = action()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        answers = self._writers.gather((failure, made))
        for rank, (text, _) in enumerate(answers):
            if text is not None:
                raise SaveFailed(f"rank {rank}: {text}")
        return [value for _, value in answers]


def _tensors(shards: Shards) -> Iterator[ShardedTensor]:
    return (shard for parts in shards.values() for shard in parts if isinstance(shard, ShardedTensor))


def torch_bytes(value: object) -> bytes:
    """Return a value as a file of `torch.save`."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


CONTENT_ERRORS = (LookupError, TypeError, ValueError, AttributeError, AssertionError, CheckpointingException)
"""Errors that megatron-core and torch raise for missing keys, or values of another type or shape."""
_STATE_ERROR_TEXT = re.compile(r"loading state_dict|(?:missing|unexpected) key|size mismatch|not in state dict", re.I)
"""Text of a RuntimeError about the content; a device may raise RuntimeError, too."""
ERROR_TEXT_LIMIT = 300


def why_not_loadable(error: BaseException) -> str | None:
    """Return the fault in the content of a checkpoint; None if a file system, a device or another rank may be the
    cause. torch joins the errors of all ranks in one exception: each rank must have found a fault in the content."""
    if isinstance(error, CheckpointException):
        causes = [why_not_loadable(cause) for cause, _ in error.failures.values()]
        return causes[0] if causes and all(causes) else None
    if isinstance(error, OSError):
        return None
    if isinstance(error, CONTENT_ERRORS) or (isinstance(error, RuntimeError) and _STATE_ERROR_TEXT.search(str(error))):
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return text if len(text) <= ERROR_TEXT_LIMIT else text[: ERROR_TEXT_LIMIT - 3] + "..."
    return None
