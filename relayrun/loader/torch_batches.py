"""`relayrun.loader` as datasets of torch: whole batches, and samples by their number."""

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
        refuse_several_workers()
        yield from map(as_tensors, self._loader)

    def state_dict(self) -> dict[str, Any]:
        """See `Loader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Loader.load_state_dict`."""
        self._loader.load_state_dict(state)


class MegatronSamples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of a loader by their number, with the keys of megatron-core's `GPTDataset`. Any number of workers."""

    def __init__(self, loader: Loader, samples: int) -> None:
        self._loader, self._samples = loader, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, k: int | None) -> dict[str, torch.Tensor]:
        """Return sample k; without a number, a sample without loss, with which Megatron fills a batch."""
        found = as_tensors(self._loader.sample(k or 0))
        tokens = found["input_ids"][0]
        mask = found["loss_mask"][0] if "loss_mask" in found else torch.ones(len(tokens))
        return {
            "tokens": tokens,
            "labels": found["labels"][0],
            "loss_mask": torch.zeros_like(mask) if k is None else mask,
            "position_ids": found["position_ids"][0] if "position_ids" in found else torch.arange(len(tokens)),
        }


def as_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with its arrays as tensors."""
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in batch.items()}


def refuse_several_workers() -> None:
    """Raise InputError in one of several workers of a `DataLoader`."""
    info = torch.utils.data.get_worker_info()
    if info is not None and info.num_workers > 1:
        raise InputError(f"{info.num_workers} workers would read the same samples", hint="num_workers=1, or 0")
