"""What Megatron-LM's `common.pt` is in the common part of a run's checkpoint, so that a run can begin with it.

The sharded part needs no translation: its keys are megatron-core's on both sides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from relayrun.train.checkpoint import megatron_folder
from relayrun.train.checkpoint.safe_pickle import StoredTensor

MEGATRON_LAYOUT = "those of Megatron-LM"
"""No layout of ranks here, so that generators begin anew."""


def translate_common(data: bytes, folder: Path) -> dict[str, Any] | None:
    """Return the common part that a common.pt with this content comes to; None where it is not Megatron-LM's.

    `data` is None in it: it does not say in which order samples were read, only how many.
    """
    found = megatron_folder.parse_common(data, folder)
    if found is None:
        return None
    state: dict[str, Any] = {
        "layout": MEGATRON_LAYOUT,
        "fixed": {
            "parallel.use_distributed_optimizer": found.distributed is not None,
            "training.precision": found.precision,
        },
        "data": None,
        "progress": found.progress(),
    }
    if found.optimizer is not None and megatron_folder.is_plain_value(found.optimizer):
        state["optimizer"] = with_torch_tensors(found.optimizer)
    return state


def with_torch_tensors(value: Any) -> Any:
    """The same values, with torch's tensors."""
    if isinstance(value, StoredTensor):
        dtype = getattr(torch, value.dtype)
        if not value.data:
            return torch.empty(value.shape, dtype=dtype)
        return torch.frombuffer(bytearray(value.data), dtype=dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: with_torch_tensors(each) for key, each in value.items()}
    return type(value)(with_torch_tensors(each) for each in value) if isinstance(value, (list, tuple)) else value
