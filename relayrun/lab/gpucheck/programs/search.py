"""The search for the largest micro-batch, and errors that mean out of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OUT_OF_MEMORY_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Texts of out-of-memory errors that have no class of their own in torch."""


MicroBatchTry = dict[str, Any]


def search_micro_batch(first: int, largest: int, attempt: Callable[[int], MicroBatchTry]) -> list[MicroBatchTry]:
    """Try `first`, then double it while it fits and is at most `largest`, or halve it until it fits. Returns all tries
    in order. `attempt(micro_batch)` returns a record with `fits`."""
    tries = [attempt(first)]
    while tries[-1]["fits"] and 2 * tries[-1]["micro_batch"] <= largest:
        tries.append(attempt(2 * tries[-1]["micro_batch"]))
    if not tries[0]["fits"]:
        while not tries[-1]["fits"] and tries[-1]["micro_batch"] > 1:
            tries.append(attempt(tries[-1]["micro_batch"] // 2))
    return tries


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error of torch, or of a library below it, means out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(word.lower() in str(error).lower() for word in OUT_OF_MEMORY_WORDS)
    )
