"""The search for the micro-batch that fits, and the errors that say that one does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OUT_OF_MEMORY_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What errors say where memory is out and torch has no class of its own for it."""


MicroBatchTry = dict[str, Any]


def search_micro_batch(first: int, largest: int, attempt: Callable[[int], MicroBatchTry]) -> list[MicroBatchTry]:
    """Try `first`, then twice as much as long as it fits and is not above `largest`, or half as much until it fits.

    Returns all that was tried, in this order. `attempt(micro_batch)` says whether it `fits`.
    """
    tries = [attempt(first)]
    while tries[-1]["fits"] and 2 * tries[-1]["micro_batch"] <= largest:
        tries.append(attempt(2 * tries[-1]["micro_batch"]))
    if not tries[0]["fits"]:
        while not tries[-1]["fits"] and tries[-1]["micro_batch"] > 1:
            tries.append(attempt(tries[-1]["micro_batch"] // 2))
    return tries


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, or of a library below it, says that memory is out."""
    kind = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
    return isinstance(error, kind) or (
        isinstance(error, RuntimeError) and any(word.lower() in str(error).lower() for word in OUT_OF_MEMORY_WORDS)
    )
