"""megatron-core's own order as a data set of a run, for tests that compare losses: `order: module:MegatronOrder`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from relayrun.tokens.order.datasets import DatasetSpec, WindowDataset
from relayrun.tokens.shards.shard import Shard


def first_epoch(documents: Any, name: str, *, seq_length: int, seed: int) -> GPTDataset:
    """GPTDataset over all `documents`, of IndexedDataset's interface."""
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        split="1",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(eod=0, vocab_size=None, unique_identifiers="none"),
    )
    indices = np.arange(len(documents.sequence_lengths), dtype=np.int32)
    return GPTDataset(documents, name, indices, None, Split.train, config)


class MegatronOrder:
    """The first epoch of GPTDataset over all shards as if merged."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._epoch = first_epoch(_Documents(spec), "none", seq_length=spec.seq_length, seed=spec.seed)

    def __len__(self) -> int:
        return len(self._epoch)

    def read(self, epoch: int, i: int) -> npt.NDArray[np.int64]:
        assert epoch == 0
        return np.asarray(self._epoch._query_document_sample_shuffle_indices(i)[0], np.int64)


class _Documents:
    """Shards with the interface of megatron-core's IndexedDataset for GPTDataset."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.path_prefix = None
        self.sequence_lengths = np.concatenate([Shard.open(each.prefix).lengths() for each in spec.manifest.shards])
        self._starts = np.concatenate([[0], np.cumsum(self.sequence_lengths, dtype=np.int64)])
        self._stream = WindowDataset(spec.manifest, spec.seq_length)

    def get(self, document: int, offset: int = 0, length: int | None = None) -> npt.NDArray[np.int64]:
        count = int(self.sequence_lengths[document]) - offset if length is None else int(length)
        return self._stream.tokens(int(self._starts[document]) + offset, count)
