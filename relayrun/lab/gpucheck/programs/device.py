"""Measurements of the device: `python -m relayrun.lab.gpucheck.programs.device NAME`.

A copy to pinned host memory is the lower limit of a save's stall.
"""

from __future__ import annotations

import importlib.metadata
import platform
from functools import partial
from typing import Any

import torch

from relayrun.lab.gpucheck.programs.common import RankProgram, median_seconds, run_measurement

PACKAGES = ("megatron-core", "triton", "transformer-engine", "apex", "flash-attn")
"""Distributions that change the kernels."""


def measure_device() -> None:
    """Write versions and GPUs, then the measured speeds."""
    program = RankProgram.begin()
    device, sizes = program.device, program.setup.sizes
    on_gpu = device.type == "cuda"
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if on_gpu else 0))
    names = [{"name": about.name, "memory_bytes": about.total_memory} for about in gpus]
    figures: dict[str, Any] = {"gpus": names, "versions": package_versions()}
    program.write(figures)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rows = sizes.product
    # random values: zeros run faster than the products of training
    left, right = (torch.randn(rows, rows, device=device, dtype=dtype) for _ in range(2))
    seconds = median_seconds(partial(torch.mm, left, right), device, repeats=sizes.repeats)
    figures["product_tflops"] = 2 * rows**3 / seconds / 1e12
    source = torch.ones((1 << 32) if on_gpu else (1 << 22), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device, repeats=sizes.repeats)
    figures["copy_bytes_per_second"] = 2 * source.numel() / seconds
    program.write(figures)


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


def package_versions() -> dict[str, str]:
    """Return versions by name; `absent` for a package that is not installed."""
    on_gpu = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "none",
        "cuDNN": str(torch.backends.cudnn.version()) if on_gpu else "none",  # type: ignore[no-untyped-call]
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "none",  # type: ignore[no-untyped-call]
        **{name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    run_measurement(measure_device, measure_host_copy)
