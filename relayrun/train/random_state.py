"""The state of every random generator of this rank, as plain values and tensors, and back.

Which ones draw: torch's (dropout on a CPU), CUDA's (dropout on a GPU), and megatron-core's named states,
which take their place around dropout in model-parallel regions. Python's and numpy's are kept for
whatever a user's data or a library draws from.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def capture_random_state() -> dict[str, Any]:
    """A copy of all states."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
    }


def restore_random_state(states: dict[str, Any]) -> None:
    """Put back what `capture` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(dict(states["tracker"]))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
