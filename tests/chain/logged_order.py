"""An order of a user's own: relayrun's windows, and a file that says which of them each attempt read."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np

from relayrun.tokens.order.datasets import DatasetSpec, WindowOrder


class Logged:
    """Reads are logged as `attempt position` lines, a file for each data set and process."""

    def __init__(self, source: DatasetSpec) -> None:
        self._inner = WindowOrder(source.manifest, seq_length=source.seq_length, seed=source.seed, name=source.name)
        attempt = re.search(r"--attempt[ =](\d+)", " ".join(sys.argv))
        self._attempt = attempt[1] if attempt else None
        self._path = Path(source.options["log"]) / f"{source.name}-{os.getpid()}"

    def __len__(self) -> int:
        return len(self._inner)

    def read(self, epoch: int, i: int) -> np.ndarray:
        if self._attempt is not None:
            with self._path.open("a") as file:
                file.write(f"{self._attempt} {epoch * len(self._inner) + i}\n")
        return self._inner.read(epoch, i)
