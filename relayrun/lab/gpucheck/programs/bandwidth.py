"""Speed of an all-reduce over all ranks: NCCL between GPUs, gloo between CPU processes.

Bus bandwidth is independent of the number of ranks: 2 (n - 1) / n x bytes / seconds.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from relayrun.lab.gpucheck.programs.common import RankProgram, median_seconds


def measure_all_reduce() -> None:
    """Reduce tensors of several sizes on all ranks; rank 0 writes."""
    program = RankProgram.begin()
    device, sizes = program.device, program.setup.sizes
    size = int(os.environ["WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(backend, timeout=timedelta(minutes=2), **options)
    figures: dict[str, Any] = {"ranks": size, "backend": backend, "all_reduce": []}
    for count in sizes.reduced:
        tensor = torch.randn(count // 4, device=device)
        seconds = median_seconds(partial(dist.all_reduce, tensor), device, repeats=sizes.repeats)
        busy = 2 * (size - 1) / size * count / seconds
        figures["all_reduce"].append({"bytes": count, "seconds": seconds, "bus_bytes_per_second": busy})
        program.write(figures)
        del tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    measure_all_reduce()
