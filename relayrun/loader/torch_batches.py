"""`relayrun.loader` as a dataset of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from relayrun.errors import InputError
from relayrun.loader import Loader


class TorchBatches(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Whole batches of a loader, with arrays as tensors. torchdata's `StatefulDataLoader` finds the state here."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Go on where the loader stands. Raises InputError in one of several workers, which would repeat samples."""
        info = torch.utils.data.get_worker_info()
        if info is not None and info.num_workers > 1:
            raise InputError(f"{info.num_workers} workers would read the same samples", hint="num_workers=1, or 0")
        for batch in self._loader:
            yield {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in batch.items()}

    def state_dict(self) -> dict[str, Any]:
        """See `Loader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Loader.load_state_dict`."""
        self._loader.load_state_dict(state)
