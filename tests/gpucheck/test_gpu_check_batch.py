"""The search of `relayrun gpu-check` for the micro-batch that fits, on a GPU as small as a test wants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relayrun import places
from relayrun.config.compose import resolve
from relayrun.lab.gpucheck.performance import first_micro_batch
from relayrun.lab.gpucheck.programs.common import is_out_of_memory, search_micro_batch
from relayrun.lab.gpucheck.setup import check_sizes
from relayrun.train.model.size import memory_bytes


@pytest.mark.parametrize(
    ("first", "room", "tried"),
    [
        (4, 9, [4, 8, 16]),  # doubled until memory is out
        (4, 4, [4, 8]),
        (8, 3, [8, 4, 2]),  # halved until it is not
        (4, 0, [4, 2, 1]),  # nothing fits
        (16, 1000, [16, 32, 64]),  # the search ends here
        (1, 1, [1, 2]),
    ],
)
def test_the_batch_is_doubled_until_memory_is_out_or_halved_until_it_is_not(
    first: int, room: int, tried: list[int]
) -> None:
    def attempt(micro_batch: int) -> dict[str, Any]:
        return {"micro_batch": micro_batch, "fits": micro_batch <= room}

    assert [each["micro_batch"] for each in search_micro_batch(first, 64, attempt)] == tried


def test_errors_that_say_memory_is_out_are_known_and_no_others() -> None:
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    assert not is_out_of_memory(MemoryError("out of memory"))  # of the host: no smaller batch helps


def test_the_search_begins_at_half_of_what_the_estimate_says_fits() -> None:
    overrides = ["job.nodes=1", "job.ntasks_per_node=1", "training.seq_length=4096"]
    config = resolve.load_run_config(places.shared_file("configs/runs/llama3-1b.yaml"), overrides)
    memory, sizes = 150_000_000_000, check_sizes(tiny=False)

    def estimate(micro_batch: int) -> float:
        training = config.training.model_copy(update={"micro_batch_size": micro_batch})
        return memory_bytes(config.model_copy(update={"training": training}), sizes.vocabulary).total

    first = first_micro_batch(config, sizes.vocabulary, memory, sizes.largest_batch)
    assert estimate(2 * first) <= 0.9 * memory < estimate(4 * first)
    assert first_micro_batch(config, sizes.vocabulary, None, sizes.largest_batch) == 1
    assert first_micro_batch(config, sizes.vocabulary, 10**9, sizes.largest_batch) == 1
