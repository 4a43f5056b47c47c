"""Made-up data: `data.mock_data`, for speed tests and for a first start without tokenizer and shards.

Every window counts up by one from a random token, modulo the vocabulary: a model can learn it, so a falling loss says
that training works.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relayrun.tokens.order.spec import DatasetSpec

MOCK_WINDOWS = 1 << 20
"""Windows of an epoch."""


class MockDataset:
    """A `Dataset` without files: a pure function of (seed, epoch, i)."""

    def __init__(self, source: DatasetSpec) -> None:
        self._seed = source.seed
        self._tokens = source.seq_length + 1
        self._vocabulary_size = int(source.options["vocabulary_size"])

    def __len__(self) -> int:
        return MOCK_WINDOWS

    def read(self, epoch: int, i: int) -> npt.NDArray[np.int64]:
        """Token ids, int64 [seq_length + 1]."""
        first = int(np.random.SeedSequence((self._seed, epoch, i)).generate_state(1, np.uint64)[0])
        return (first % self._vocabulary_size + np.arange(self._tokens, dtype=np.int64)) % self._vocabulary_size
