"""A data set of a user's own that gives a loss mask with its tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relayrun.data.order.spec import DatasetSpec


class Masked:
    """Counting tokens. Option `mask`: `none`, `ones`, or `odd`, where every second target does not count."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._length = spec.seq_length
        self._mask = spec.options["mask"]

    def __len__(self) -> int:
        return 100

    def read(self, epoch: int, i: int) -> npt.NDArray[np.int64] | tuple[npt.NDArray[np.int64], list[int]]:
        tokens = (7 * i + np.arange(self._length + 1)) % 250
        if self._mask == "none":
            return tokens
        return tokens, [int(self._mask == "ones" or at % 2 == 0) for at in range(self._length)]
