"""Health of this node's GPUs from NVML, as JSON: `python -m relayrun.train.gpu_health`.

    {"gpus": [{"index": 0, "ecc_uncorrected": 0, "rows_failed": false, "rows_pending": false, "slowed": 0}]}

A value that a device does not report is missing; a device that does not respond has `error`. Without nvidia-ml-py or
the driver the result is {"gpu_error": "..."}. It is a program of its own, since NVML may block on a lost device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def gpu_health() -> dict[str, Any]:
    """Return NVML's report on every GPU that this job sees."""
    try:
        import pynvml
    except ImportError:
        return {"gpu_error": "the package nvidia-ml-py is not installed"}
    try:
        pynvml.nvmlInit()
        try:
            return {"gpus": [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]}
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return {"gpu_error": str(error)}


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    def told(question: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer of the device; None if it cannot answer the question."""
        try:
            return question(handle, *arguments)
        except nvml.NVMLError:
            return None

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        return {"index": index, "error": str(error)}
    kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = told(nvml.nvmlDeviceGetTotalEccErrors, kind, counter)
    slowed = told(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    rows = told(nvml.nvmlDeviceGetRemappedRows)  # corrected, uncorrected, pending, failed
    found: dict[str, Any] = {"index": index}
    if errors is not None:
        found["ecc_uncorrected"] = int(errors)
    if slowed is not None:
        found["slowed"] = int(slowed)
    if rows is not None:
        found |= {"rows_pending": bool(rows[2]), "rows_failed": bool(rows[3])}
    return found


if __name__ == "__main__":
    print(json.dumps(gpu_health()))
    sys.exit(0)
