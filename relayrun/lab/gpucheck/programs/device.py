"""Measurements of the device: `python -m ....device device|bandwidth|host_copy`.

`device` writes versions, GPUs and the speed of a matrix product and of a copy. `bandwidth` times an all-reduce of all
ranks, by NCCL or gloo; bus bandwidth is 2 (n - 1) / n x bytes / seconds. `host_copy` times copies to pinned memory.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from functools import partial
from typing import Any

import torch

from relayrun.lab.gpucheck.programs.common import RankProgram, median_seconds

OPTIONAL_PACKAGES = {"transformer_engine": "transformer-engine", "apex": "apex", "flash_attn": "flash-attn"}
"""Packages that change the kernels: distribution name by module."""


def package_versions() -> dict[str, str]:
    """Return versions by name; `absent` for an optional package that is not installed."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    found["megatron-core"] = _version("megatron-core")
    found["CUDA"] = torch.version.cuda or "none"
    found["cuDNN"] = cudnn_version()
    found["NCCL"] = nccl_version()
    found["triton"] = _version("triton")
    for module, name in OPTIONAL_PACKAGES.items():
        found[name] = _version(name) if importlib.util.find_spec(module) is not None else "absent"
    return found


def cudnn_version() -> str:
    """Return cuDNN's version, `none` without a GPU."""
    if not torch.cuda.is_available():
        return "none"
    return str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]


def nccl_version() -> str:
    """Return NCCL's version, `none` without a GPU."""
    if not torch.cuda.is_available():
        return "none"
    try:
        found: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (RuntimeError, AttributeError, ImportError) as error:
        return f"unknown: {error}"
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent" if name == "triton" else "unknown"


def list_gpus() -> list[dict[str, Any]]:
    """Return name, memory in bytes, multiprocessors and compute capability of every GPU."""
    found = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(number)
        found.append(
            {
                "name": about.name,
                "memory_bytes": about.total_memory,
                "multiprocessors": about.multi_processor_count,
                "capability": f"{about.major}.{about.minor}",
            }
        )
    return found


def measure_device() -> None:
    """Write versions and GPUs, then the measured speeds."""
    program = RankProgram.begin()
    device, sizes = program.device, program.setup.sizes
    figures: dict[str, Any] = {"gpus": list_gpus(), "versions": package_versions()}
    program.write(figures)
    on_gpu = device.type == "cuda"
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


if __name__ == "__main__":
    measure_device()
