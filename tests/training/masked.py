"""Data sets of a user's own that give a loss mask with their tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relayrun.tokens.order.datasets import DatasetSpec


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


class FromFile:
    """Tokens and masks of a file. Option `file`: an npz with `tokens` [n, length + 1] and `masks` [n, length]."""

    def __init__(self, spec: DatasetSpec) -> None:
        with np.load(spec.options["file"]) as found:
            self._tokens, self._masks = found["tokens"], found["masks"]

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, epoch: int, i: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self._tokens[i], self._masks[i]
