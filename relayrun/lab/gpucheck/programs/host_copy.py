"""Speed of a plain copy from the device to pinned host memory: the lower limit of a save's stall."""

from __future__ import annotations

import torch

from relayrun.lab.gpucheck.programs.common import RankProgram, median_seconds


def measure_host_copy() -> None:
    """Copy `--bytes` bytes, at most `copied_at_most`, and write the speed."""
    program = RankProgram.begin("bytes")
    device = program.device
    size = max(1, min(int(program.options.bytes), program.setup.sizes.copied_at_most))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    seconds = median_seconds(
        lambda: target.copy_(source, non_blocking=True), device, repeats=program.setup.sizes.repeats
    )
    program.write({"bytes": size, "seconds": seconds, "bytes_per_second": size / seconds})


if __name__ == "__main__":
    measure_host_copy()
