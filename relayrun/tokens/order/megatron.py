"""`order: megatron`: a data set in the order of megatron-core's GPTDataset, with a GPTDataset for each epoch.

Megatron shuffles documents, joins them to one stream, cuts it into windows and shuffles those. Several epochs in a
single GPTDataset would reorder the first epoch when their number changes. Here each epoch has its own GPTDataset with
`num_samples=None`: epoch 0 has the run's seed, so its order is that of a Megatron run with that seed; later epochs have
seeds derived from (seed, data set, epoch). All shards of the data set are read as if merged.

The three indices (document, sample, shuffle: about 4 bytes per document and 20 per window) are built in memory, or kept
in `data.data_cache_dir` (`relayrun.tokens.order.index_cache`). Documents that `data.split` holds out are left out.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from relayrun.errors import ConfigError
from relayrun.tokens.order.datasets import DatasetSpec, SampleSegment, WindowDataset, side_of_split
from relayrun.tokens.order.index_cache import IndexCache
from relayrun.tokens.shards.shard import Shard

logging.getLogger("megatron.core.datasets.gpt_dataset").setLevel(logging.ERROR)  # it warns of our own cache


class MegatronOrder:
    """A `relayrun.tokens.order.datasets.Dataset`. Raises ConfigError for less than one window."""

    def __init__(self, source: DatasetSpec) -> None:
        if source.split:
            kept = side_of_split(source.manifest, source.seq_length, source.split, held_out=False)
            source = replace(source, manifest=kept)
        self._source = source
        self._documents = MegatronDocuments(source)
        tokens = source.manifest.tokens
        self._length = max(0, tokens - 1) // source.seq_length
        if not self._length:
            words = f"the data set {source.name!r} has {tokens} tokens to train on, fewer than one sample"
            raise ConfigError(words, hint="give more data or a smaller seq_length")
        self._epoch: Callable[[int], MegatronEpoch] = lru_cache(2)(partial(_open_epoch, source, self._documents))

    def __len__(self) -> int:
        return self._length

    def read(self, epoch: int, i: int) -> npt.NDArray[np.int64]:
        """Return the token ids, int64 [seq_length + 1], of sample i of Megatron's order in this epoch."""
        if epoch < 0 or not 0 <= i < self._length:
            raise IndexError(f"epoch {epoch}, window {i}: outside of range({self._length})")
        return np.asarray(self._epoch(epoch)._query_document_sample_shuffle_indices(i)[0], np.int64)

    def origins(self, epoch: int, i: int) -> list[SampleSegment]:
        """Return the origins of the tokens of a sample: documents and offsets."""
        dataset = self._epoch(epoch)
        row = int(dataset.shuffle_index[i])
        at, offset = (int(value) for value in dataset.sample_index[row])
        left, found = self._source.seq_length + 1, []
        while left:
            document = int(dataset.document_index[at])
            count = min(left, int(self._documents.sequence_lengths[document]) - offset)
            if count:
                prefix, number = self._documents.locate(document)
                found.append(SampleSegment(prefix=prefix, document=number, offset=offset, tokens=count))
            left, at, offset = left - count, at + 1, 0
        return found


class MegatronDocuments:
    """All shards as one low-level dataset, with the interface of megatron-core's IndexedDataset for GPTDataset."""

    def __init__(self, source: DatasetSpec) -> None:
        lengths = []
        for shard in source.manifest.shards:  # without the documents that a split holds out
            own = Shard.open(shard.prefix).lengths()
            lengths.append(own[: np.searchsorted(np.cumsum(own, dtype=np.int64), shard.tokens, side="right")])
        self.sequence_lengths = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int32)
        self.path_prefix = source.name
        self._prefixes = [shard.prefix for shard in source.manifest.shards]
        self._first = np.cumsum([0, *map(len, lengths)])
        self._starts = np.concatenate([[0], np.cumsum(self.sequence_lengths, dtype=np.int64)])
        self._stream = WindowDataset(source.manifest, source.seq_length)

    def get(self, document: int, offset: int = 0, length: int | None = None) -> npt.NDArray[np.int64]:
        """Return the tokens of a document, from `offset` on."""
        count = int(self.sequence_lengths[document]) - offset if length is None else int(length)
        return self._stream.tokens(int(self._starts[document]) + offset, count)

    def locate(self, document: int) -> tuple[str, int]:
        """Return the prefix of the shard of a document, and the document's number in it."""
        shard = int(np.searchsorted(self._first, document, side="right")) - 1
        return self._prefixes[shard], document - int(self._first[shard])


class MegatronEpoch(GPTDataset):  # type: ignore[misc]  # megatron-core has no types
    """GPTDataset with a cache that ranks, nodes and threads can share."""

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, ...]:
        build, folder = super()._build_document_sample_shuffle_indices, self.config.relayrun_cache
        if folder is None:
            return tuple(build())
        cache = IndexCache(Path(folder), self.unique_description_hash, opening=self.config.relayrun_opening)
        return tuple(cache.read_or_build(build))


@dataclass
class MegatronEpochConfig(GPTDatasetConfig):  # type: ignore[misc]
    """Without a blend megatron-core takes the data for a mock and caches nothing itself."""

    relayrun_cache: str | None = None
    relayrun_opening: str | None = None


def _open_epoch(source: DatasetSpec, documents: MegatronDocuments, epoch: int) -> MegatronEpoch:
    derived = hashlib.sha256(f"{source.seed}/{source.name}/{epoch}".encode()).digest()[:4]
    config = MegatronEpochConfig(
        random_seed=int.from_bytes(derived, "little") if epoch else source.seed % (1 << 32),  # numpy takes 32 bits
        sequence_length=source.seq_length,
        split="1",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(eod=0, vocab_size=None, unique_identifiers=source.manifest.fingerprint),
        relayrun_cache=source.cache_dir,
        relayrun_opening=source.opening,
    )
    indices = np.arange(len(documents.sequence_lengths), dtype=np.int32)
    identity = f"{source.manifest.fingerprint}/{len(indices)}"
    return MegatronEpoch(documents, identity, indices, None, Split.train, config)
