"""Health of this node's GPUs from NVML, as JSON: `python -m relayrun.train.gpu_health`.

    {"gpus": [{"index": 0, "ecc_uncorrected": 0, "rows_failed": false, "rows_pending": false, "slowed": 0}], "xids": []}

A value that a device does not report is missing; a device that does not respond has `error`. Without nvidia-ml-py or
the driver the result is {"gpu_error": "..."}. It is a program of its own, since NVML may block on a lost device.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
HARDWARE_XIDS = {48, 64, 74, 79, 94, 95, 119, 120}
"""Xid errors of the hardware: memory, NVLink, a GPU off the bus, its own processor. A program cannot cause them."""
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)\b.*")


def gpu_health() -> dict[str, Any]:
    """Return NVML's report on every GPU that this job sees."""
    try:
        found = call_nvml(lambda nvml: [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())])
    except NoNvml as error:
        return {"gpu_error": str(error)}
    return {"gpus": found, "xids": read_hardware_xids()}


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        return {"index": index, "error": str(error)}
    told = partial(ask_device, nvml)
    kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = told(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, counter)
    slowed = told(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    rows = told(nvml.nvmlDeviceGetRemappedRows, handle)  # corrected, uncorrected, pending, failed
    found: dict[str, Any] = {"index": index}
    if errors is not None:
        found["ecc_uncorrected"] = int(errors)
    if slowed is not None:
        found["slowed"] = int(slowed)
    if rows is not None:
        found |= {"rows_pending": bool(rows[2]), "rows_failed": bool(rows[3])}
    return found


def read_hardware_xids() -> list[str]:
    """Return Xid errors of the hardware from the kernel log, oldest first; empty if this user may not read it."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while line := os.read(fd, 8192):
                lines.append(line.decode(errors="replace"))
        finally:
            os.close(fd)
    return hardware_xids(lines)


def hardware_xids(lines: list[str]) -> list[str]:
    """Return the Xid errors of the hardware among lines of the kernel log."""
    found = (_XID.search(line) for line in lines)
    return [match[0][:200] for match in found if match and int(match[1]) in HARDWARE_XIDS]


class NoNvml(Exception):
    """NVML is missing or does not respond."""


def call_nvml(read: Callable[[Any], T]) -> T:
    """Return `read(pynvml)`. Raises NoNvml."""
    try:
        import pynvml
    except ImportError:
        raise NoNvml("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoNvml(str(error)) from None
    try:
        return read(pynvml)
    except pynvml.NVMLError as error:
        raise NoNvml(str(error)) from None
    finally:
        pynvml.nvmlShutdown()


def ask_device(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer of a device; None if the device cannot answer the question."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


if __name__ == "__main__":
    print(json.dumps(gpu_health()))
    sys.exit(0)
