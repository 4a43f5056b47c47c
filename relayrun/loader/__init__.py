"""The data of relayrun in a training program of one's own: mixtures of token shards and of text, resumed exactly.

    from relayrun.loader import Loader

    loader = Loader({"tokenizer": "gpt2", "mixture": {"web": {"path": "/data/web", "weight": 3},
                                                      "code": {"path": "/data/code", "weight": 1}}},
                    seq_length=4096, batch_size=512, rank=rank, world_size=world_size)
    for batch in loader:                             # of this rank: {"input_ids": int64 [rows, 4096], "labels": ...}
        ...
        state = loader.state_dict()                  # some kB of JSON, the same on every rank
    loader.load_state_dict(state)                    # the next batch follows it; the number of ranks may be another

Batch k, over all ranks, depends on the data, the seed and k alone: rank r of R has rows k * batch_size + r * rows to
k * batch_size + (r + 1) * rows - 1, with rows = batch_size / R. A loader is for one thread; threads of its own read
ahead, and `close` ends them. Before a `Loader` is made, pydantic is not imported; torch only by `as_torch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from relayrun.errors import ConfigError
from relayrun.tokens.order.sample_rows import RowBatch, RowMasks

if TYPE_CHECKING:
    from relayrun.loader.torch_batches import MegatronSamples, TorchBatches
    from relayrun.loader.trainer_samples import TrainerSamples
    from relayrun.tokens.order.batches import BatchReader
    from relayrun.tokens.order.sampler import ReplicaSampleReader

STATE_VERSION = 1
_UNUSED_SECTIONS = {
    "project": "loader",
    "name": "loader",
    "model": dict.fromkeys(
        ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"), 1
    ),
    "optimizer": {"lr": 1.0},
    "checkpoint": {"interval": 1},
    "job": {"time": "1"},
    "cluster": {"name": "local", "scheduler": "local"},
}
"""Required sections of a run config that do not change its data."""


class Loader(Iterator[dict[str, Any]]):
    """An endless iterator over this rank's share of global batches.

    `data`: the settings of `data` in a run config, with paths from the working directory, or a run config to take them
    from. `seq_length`: of inputs, in tokens. `batch_size`: samples of a global batch, a multiple of `world_size`.
    `rank`, `world_size`: of the data-parallel ranks. `gather`: returns a list of its argument on every rank, such as a
    call of `torch.distributed.all_gather_object`; only for `state_dict` of text on several ranks. `read_ahead`: False:
    without threads, for a worker of a DataLoader or a program that reads ahead itself.

    Raises ConfigError and InputError for settings, shards and tokenizers that a submit refuses.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | str | Path,
        *,
        seq_length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 1234,
        gather: Callable[[Any], list[Any]] | None = None,
        read_ahead: bool = True,
    ) -> None:
        from relayrun.submit.check.data import build_manifest
        from relayrun.tokens.mixture.build_datasets import training_order
        from relayrun.tokens.streams.run_tokenizer import counted_token_ids

        if batch_size < 1 or not 0 <= rank < world_size or batch_size % world_size:
            wrong = f"batch_size {batch_size}, rank {rank}, world_size {world_size}"
            raise ConfigError(wrong, hint="a batch is a multiple of world_size, and rank counts from 0")
        self.rank, self.world_size, self.batch_size = rank, world_size, batch_size
        config = self._config = _config(data, seq_length=seq_length, batch_size=batch_size, seed=seed)
        self._sizes, self._gather, self._read_ahead = config.training.batch_sizes, gather, read_ahead
        self._manifest = build_manifest(config)
        self._order = training_order(config, self._manifest)
        streams: dict[str, Any] = {} if read_ahead else {**self._order.streams}
        for stream in streams.values():
            stream.blocks.depth = 0
        if (lanes := self._order.lanes) is not None and lanes % world_size:
            wrong = f"the {lanes} lanes of text cannot be divided among {world_size} ranks"
            raise ConfigError(wrong, hint=f"take a number of ranks that divides data.lanes = {lanes}")
        size, counted = self._manifest.vocabulary_size, counted_token_ids(config.data, self._manifest)
        self._masks = RowMasks(config.data, eod=self._manifest.eod, counted=counted, vocabulary_size=size)
        self._consumed = self._asked = 0
        self._reader: BatchReader | None = None
        self._lanes: ReplicaSampleReader | None = None

    @property
    def position(self) -> int:
        """Samples of all ranks before the next batch."""
        return self._consumed

    def ledger(self) -> dict[str, int]:
        """Return the samples of each data set before the next batch; they sum to `position`."""
        return self._order.schedule.counts(self._consumed)

    def __next__(self) -> dict[str, Any]:
        """Return `input_ids` and `labels`, int64 [rows, seq_length]; where settings or rows have them, `loss_mask`,
        float32, and `position_ids`, int64, of the same shape, and `document_lengths`, for each row a list of the tokens
        of its documents, to which attention is restricted."""
        if self._reader is None:
            self._reader = self._open()
        (batch,) = next(self._reader)
        self._consumed = self._reader.consumed_samples
        return dict[str, Any](batch)

    def sample(self, k: int) -> dict[str, Any]:
        """Return sample k of all ranks, as a batch of one row. Raises ConfigError for text, whose samples have no
        numbers."""
        if self._order.lanes is not None:
            raise ConfigError("samples of text have no numbers", hint="iterate over the loader")
        from relayrun.tokens.order.batches import check_row

        row = check_row(self._order.row(k), self._order, k, self._manifest.vocabulary_size)
        return self._as_dict(RowBatch.stack([row]))

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """Return the state before the next batch, plain JSON. With text, all ranks of several call it together.
        `position`: the state before this sample, of a program that fetches batches before it trains on them; text goes
        back to the last position that was asked for, at most."""
        at = self._consumed if position is None else position
        cursors: list[Any] = []
        if self._order.lanes is not None and not self._asked <= at <= self._consumed:
            raise ConfigError(
                f"position {at} of text is not between {self._asked} and {self._consumed}",
                hint="a position is the steps taken times batch_size; those behind an earlier one are forgotten",
            )
        if self._lanes is not None:
            self._asked = at
            own = {
                name: [[lane, *cursor] for lane, cursor in lanes.items()]
                for name, lanes in self._lanes.cursors(at).items()
            }
            if self._gather is None and self.world_size > 1:
                raise ConfigError("each rank knows the positions of its own lanes of text", hint="give Loader a gather")
            every = [own] if self._gather is None else self._gather(own)
            cursors = [{name: {one[0]: tuple(one[1:]) for one in lanes} for name, lanes in of.items()} for of in every]
        return {"loader": STATE_VERSION, "batch_size": self.batch_size, **self._order.state(at, cursors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind a state, of any number of ranks. A changed mixture, or another batch size, begins there.

        Raises FatalTrainingError, with each difference, for a state of other data, seed or length.
        """
        if state.get("loader") != STATE_VERSION:
            raise ConfigError(f"the state is of version {state.get('loader')!r}, and this reads {STATE_VERSION}")
        self.close()
        self._consumed = self._asked = self._order.resume(state)

    def record(self, folder: str | Path, state: Mapping[str, Any]) -> None:
        """Write what `relayrun data show | ledger | diff FOLDER` read: the settings, the shards, and a state that is
        saved with a checkpoint. On one rank; later states, from which training went back, are removed."""
        from relayrun.config.compose import resolve
        from relayrun.control.rundir.run import Run
        from relayrun.files import write_atomic, write_json

        run, revisions = Run(Path(folder).absolute()), Run(Path(folder)).revisions()
        for each in (run.config, run.loader_states):
            each.mkdir(parents=True, exist_ok=True)
        if not revisions or resolve.read_resolved_config(run.config_revision(revisions[-1])) != self._config:
            write_atomic(run.config_revision(len(revisions) + 1), resolve.dump_run_config(self._config))
        self._manifest.write(run.manifest)
        for path in run.loader_states.glob("*.json"):
            if int(path.stem) > state["consumed_samples"]:
                path.unlink(missing_ok=True)
        write_json(run.loader_states / f"{state['consumed_samples']:015}.json", dict(state))

    def as_torch(self) -> TorchBatches:
        """Return this loader as a dataset of whole batches for `DataLoader(dataset, batch_size=None)` or torchdata's
        `StatefulDataLoader`, with tensors. It reads ahead in threads, so at most one worker."""
        from relayrun.loader.torch_batches import TorchBatches

        return TorchBatches(self)

    def for_trainer(self) -> TrainerSamples:
        """Return this loader as a dataset of samples for `transformers.Trainer`, and a callback that resumes it. The
        loader has `world_size=1` on every rank: the Trainer deals the rows of a batch to the ranks."""
        from relayrun.loader.trainer_samples import TrainerSamples

        return TrainerSamples(self)

    def megatron_provider(self) -> Callable[[Sequence[int]], tuple[MegatronSamples, None, None]]:
        """Return what `megatron.training.pretrain` takes as `train_valid_test_datasets_provider`: samples by their
        numbers, which Megatron counts and resumes by itself. Only for shards."""
        from relayrun.loader.torch_batches import MegatronSamples

        def provider(samples: Sequence[int]) -> tuple[MegatronSamples, None, None]:
            return MegatronSamples(self, samples[0]), None, None

        provider.is_distributed = True  # type: ignore[attr-defined] # every rank calls it
        return provider

    def close(self) -> None:
        """End the threads; the next batch starts them again."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._lanes = None
        self._asked = self._consumed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> BatchReader:
        from relayrun.tokens.order.batches import PREFETCHED_ITERATIONS, BatchReader

        if self._order.lanes is not None:
            self._lanes = self._order.lane_reader(self._consumed, self.rank, self.world_size)
        return BatchReader(
            self._lanes or self._order,
            data_parallel_rank=self.rank,
            data_parallel_size=self.world_size,
            micro_batch_size=self.batch_size // self.world_size,
            batch_sizes=self._sizes,
            consumed_samples=self._consumed,
            vocabulary_size=self._manifest.vocabulary_size,
            convert=self._as_dict,
            depth=PREFETCHED_ITERATIONS if self._read_ahead else 0,
        )

    def _as_dict(self, rows: RowBatch) -> dict[str, Any]:
        found: dict[str, Any] = {
            "input_ids": rows.tokens[:, :-1].astype(np.int64, "C"),
            "labels": rows.tokens[:, 1:].astype(np.int64, "C"),
            "loss_mask": self._masks.loss(rows),
            "position_ids": self._masks.positions(rows),
            "document_lengths": self._masks.documents(rows),
        }
        return {name: value for name, value in found.items() if value is not None}


def _config(data: Mapping[str, Any] | str | Path, *, seq_length: int, batch_size: int, seed: int) -> Any:
    from relayrun.config.compose import mixture_setting, resolve
    from relayrun.config.compose.yaml_file import LocatedSettings

    settings = LocatedSettings(root=Path.cwd())
    if isinstance(data, Mapping):
        settings.values["data"] = dict(data)
    else:
        settings = resolve.read_settings(Path(data))
        settings.values = {"data": settings.values.get("data", {})}
    training = {
        "steps": 1,
        "micro_batch_size": 1,
        "seq_length": seq_length,
        "global_batch_size": batch_size,
        "seed": seed,
    }
    settings.values |= _UNUSED_SECTIONS | {"training": training}
    mixture_setting.insert_mixture(settings, settings.root or Path.cwd())
    return resolve.require_native(resolve.validate_settings(settings))
