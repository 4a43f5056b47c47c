"""Health of this node's GPUs from NVML, as JSON: `python -m relayrun.train.gpu_health`.

    {"gpus": [{"index": 0, "ecc_uncorrected": 0, "rows_failed": false, "rows_pending": false, "slowed": 0}]}

A value that a device does not report is missing; a device that does not respond has `error`. Without nvidia-ml-py or
the driver the result is {"gpu_error": "..."}. It is a program of its own, since NVML may block on a lost device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def gpu_health() -> dict[str, Any]:
    """Return NVML's report on every GPU that this job sees."""
    try:
        found = call_nvml(lambda nvml: [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())])
    except NoNvml as error:
        return {"gpu_error": str(error)}
    return {"gpus": found}


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
