"""A validation set, read by sample number as training's mixture is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relayrun.tokens.order.rows import SampleRow, read_row
from relayrun.tokens.order.samples import Dataset


@dataclass(kw_only=True)
class ValidationSet:
    """The samples of a data set in its order; sample k is any k >= 0, epoch follows epoch."""

    name: str
    dataset: Dataset

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self.dataset)

    def row(self, k: int) -> SampleRow:
        """Sample k, with what the data set knows of its tokens."""
        epoch, i = divmod(k, len(self))
        return read_row(self.dataset, epoch, i)

    def sample(self, k: int) -> npt.NDArray[np.int64]:
        """Token ids of sample k, int64 [seq_length + 1]."""
        return self.row(k).tokens
