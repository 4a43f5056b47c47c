"""The samples of one data set: a pure function of (seed, name of the data set, sample number).

    epoch, i = divmod(k, windows_per_epoch)
    window   = Permutation(windows_per_epoch, key(seed, name, epoch))(i)

Nothing in this depends on ranks, workers, batch sizes or the length of the run. `Dataset` is what a mixture
asks of its parts; `SampleOrder` is relayrun's own, `order: window`.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from relayrun.errors import ConfigError
from relayrun.tokens.order.block_cache import BlockCache
from relayrun.tokens.order.permutation import Permutation, permutation_key
from relayrun.tokens.order.windows import DocumentOrigin, WindowDataset
from relayrun.tokens.shards.manifest import DatasetManifest


class Dataset(Protocol):
    """A data set of a mixture. The order inside an epoch is its own; epochs follow each other for ever.

    A method `row(epoch, i)` may stand beside `read`, see `relayrun.tokens.order.rows`.

    It must give the same sample for the same (epoch, i) in every process and at every start, and may be
    read by several threads.
    """

    def __len__(self) -> int:
        """Windows in one epoch, the same in every epoch."""

    def read(self, epoch: int, i: int) -> npt.NDArray[np.int64]:
        """Token ids, int64 [seq_length + 1], of window i, 0 <= i < len, of epoch 0, 1, ..."""


class WindowOrder:
    """The samples of one data set in order; sample k is any k >= 0, epoch follows epoch.

    `name` separates the shuffles of data sets that share a seed. `shuffle=False` reads every epoch in
    the order of the stream. `split` is the share of windows, at the end of the stream, that is held out; the
    order is over the rest, or with `held_out` over that share. Raises ConfigError if there is not one whole window.
    """

    def __init__(
        self,
        manifest: DatasetManifest,
        *,
        seq_length: int,
        seed: int,
        name: str = "train",
        shuffle: bool = True,
        split: float = 0.0,
        held_out: bool = False,
        blocks: BlockCache | None = None,
    ) -> None:
        self.manifest = manifest
        self.seq_length = seq_length
        self.seed = seed
        self.name = name
        self.shuffle = shuffle
        self.windows = WindowDataset(manifest, seq_length, blocks=blocks)
        training = len(self.windows) - held_out_window_count(len(self.windows), split)
        self._first = training if held_out else 0
        self.windows_per_epoch = len(self.windows) - training if held_out else training
        if not self.windows_per_epoch:
            share = f", of which data.split {split} is held out" if split else ""
            raise ConfigError(
                f"the data set {name!r} has {manifest.tokens} tokens{share}, fewer than one sample: "
                f"seq_length {seq_length} needs {seq_length + 1}",
                hint="give more data or a smaller seq_length",
            )
        # two epochs, since readers of one order may stand on both sides of an epoch's end
        self._permutation = lru_cache(2)(partial(_window_permutation, self.windows_per_epoch, seed, name))

    def __len__(self) -> int:
        return self.windows_per_epoch

    def window(self, epoch: int, i: int) -> int:
        """Which window of the stream (`WindowDataset`) is number i of an epoch."""
        if epoch < 0 or not 0 <= i < self.windows_per_epoch:
            raise IndexError(f"epoch {epoch}, window {i}: outside of range({self.windows_per_epoch})")
        return self._first + (self._permutation(epoch)(i) if self.shuffle else i)

    def read(self, epoch: int, i: int) -> npt.NDArray[np.int64]:
        """Token ids, int64 [seq_length + 1]; inputs are [:-1], labels [1:]."""
        return self.windows.read(self.window(epoch, i))

    def origins(self, epoch: int, i: int) -> list[DocumentOrigin]:
        """Where the tokens of a sample come from: documents, and offsets in them."""
        return self.windows.origins(self.window(epoch, i))

    def locate(self, k: int) -> tuple[int, int, int]:
        """(epoch, position in the epoch, window) of sample k. Raises IndexError if k < 0."""
        if k < 0:
            raise IndexError(f"sample {k}: samples are numbered from 0")
        epoch, i = divmod(k, self.windows_per_epoch)
        return epoch, i, self.window(epoch, i)

    def sample(self, k: int) -> npt.NDArray[np.int64]:
        """Token ids of sample k, int64 [seq_length + 1]."""
        return self.windows.read(self.locate(k)[2])


def held_out_window_count(windows: int, split: float) -> int:
    """How many windows a share holds out: at least one, and never all."""
    return min(max(1, round(windows * split)), windows - 1) if split and windows else 0


def _window_permutation(windows: int, seed: int, name: str, epoch: int) -> Permutation:
    return Permutation(windows, permutation_key(seed, name, epoch))
