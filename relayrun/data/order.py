"""Which window is global sample k: a pure function of (seed, data set, k).

    epoch, position = divmod(k, windows_per_epoch)
    window          = Permutation(windows_per_epoch, key(seed, name, epoch))(position)

Samples are numbered from 0 over the whole run. Nothing in this depends on ranks, workers, batch sizes or
the length of the run, so the state of the data is one integer; the rest of what `state` returns is
there to refuse a resume that would see other samples under the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from relayrun.data.manifest import DatasetManifest
from relayrun.data.permutation import Permutation, permutation_key
from relayrun.data.windows import WindowDataset
from relayrun.errors import FatalTrainingError, InputError


class SampleOrder:
    """The samples of one data set in order; sample k is any k >= 0, epoch follows epoch.

    `name` separates the shuffles of data sets that share a seed. `shuffle=False` reads every epoch in
    the order of the stream, for validation. Raises InputError if there is not one whole window.
    """

    def __init__(
        self, manifest: DatasetManifest, *, seq_length: int, seed: int, name: str = "train", shuffle: bool = True
    ) -> None:
        self.manifest = manifest
        self.seq_length = seq_length
        self.seed = seed
        self.name = name
        self.shuffle = shuffle
        self.windows = WindowDataset(manifest, seq_length)
        self.windows_per_epoch = len(self.windows)
        if not self.windows_per_epoch:
            raise InputError(f"the data set {name!r} has {manifest.tokens} tokens, fewer than one sample: "
                             f"seq_length {seq_length} needs {seq_length + 1}",
                             hint="give more data or a smaller seq_length")  # fmt: skip
        # two epochs, since readers of one order may stand on both sides of an epoch's end
        self._permutation = lru_cache(2)(partial(_epoch_permutation, self.windows_per_epoch, seed, name))

    def locate(self, k: int) -> tuple[int, int, int]:
        """(epoch, position in the epoch, window) of global sample k. Raises IndexError if k < 0."""
        if k < 0:
            raise IndexError(f"sample {k}: samples are numbered from 0")
        epoch, position = divmod(k, self.windows_per_epoch)
        return epoch, position, self._permutation(epoch)(position) if self.shuffle else position

    def sample(self, k: int) -> npt.NDArray[np.int64]:
        """Token ids of global sample k, int64 [seq_length + 1]; inputs are [:-1], labels [1:]."""
        return self.windows.read(self.locate(k)[2])

    def state(self, consumed_samples: int) -> dict[str, Any]:
        """What a checkpoint keeps, plain JSON: the next sample is number `consumed_samples`."""
        return {
            "consumed_samples": consumed_samples,
            "name": self.name,
            "seed": self.seed,
            "seq_length": self.seq_length,
            "shuffle": self.shuffle,
            "fingerprint": self.manifest.fingerprint,
            "tokens": self.manifest.tokens,
        }

    def check_state(self, state: Mapping[str, Any]) -> int:
        """Return the consumed samples of a `state`.

        Raises FatalTrainingError, naming each difference, if it was made over other data or in another
        order, so that sample numbers would not mean the same samples.
        """
        consumed = state.get("consumed_samples")
        if not isinstance(consumed, int) or isinstance(consumed, bool) or consumed < 0:
            raise FatalTrainingError(f"the data state of the checkpoint is damaged: consumed_samples is {consumed!r}",
                                     hint="resume from an older checkpoint")  # fmt: skip
        differences = [
            f"{name} was {state.get(name)!r}, is {value!r}"
            for name, value in self.state(consumed).items()
            if state.get(name) != value
        ]
        if differences:
            raise FatalTrainingError(
                "the data order differs from the checkpoint's, samples would be lost or repeated: "
                + "; ".join(differences),
                where=f"data set {self.name!r}",
                hint="restore these settings and the shards as they were, or start a new run",
            )
        return consumed


def _epoch_permutation(windows: int, seed: int, name: str, epoch: int) -> Permutation:
    return Permutation(windows, permutation_key(seed, name, epoch))
