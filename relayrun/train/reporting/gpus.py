"""The GPUs of this node as NVIDIA's management library (NVML) knows them, also those that other processes use.

Where the package nvidia-ml-py or the driver is missing there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU now. What a device does not tell is None."""

    index: int
    name: str
    driver: str
    memory_used: int | None
    """Bytes in use by all processes."""
    memory_total: int | None
    """Bytes."""
    sm_clock: int | None
    """MHz, now; `sm_clock_max` is the most."""
    sm_clock_max: int | None
    memory_clock: int | None
    """MHz."""
    power: float | None
    """Watts drawn now; `power_limit` is the most."""
    power_limit: float | None
    temperature: int | None
    """Degrees Celsius."""

    def line(self) -> str:
        """Return the GPU in one line for people."""
        parts = [
            self.name,
            f"driver {self.driver}",
            f"memory {_nvml_value(self.memory_used, MIB)} of {_nvml_value(self.memory_total, MIB)} MiB",
            f"SM clock {_nvml_value(self.sm_clock)} of {_nvml_value(self.sm_clock_max)} MHz",
            f"memory clock {_nvml_value(self.memory_clock)} MHz",
            f"power {_nvml_value(self.power)} of {_nvml_value(self.power_limit)} W",
            f"{_nvml_value(self.temperature)} degrees Celsius",
        ]
        return f"{self.index}: " + ", ".join(parts)


def node_gpus() -> list[Gpu]:
    """Return the GPUs of this node, by index; none where NVML is missing or does not answer."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = _decoded(pynvml.nvmlSystemGetDriverVersion())
        return [_gpu(pynvml, index, driver) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, driver: str) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def told(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(handle, *arguments)
        except nvml.NVMLError:  # not every device answers every question
            return None

    memory = told(nvml.nvmlDeviceGetMemoryInfo)
    power, limit = told(nvml.nvmlDeviceGetPowerUsage), told(nvml.nvmlDeviceGetEnforcedPowerLimit)  # milliwatts
    return Gpu(
        index=index,
        name=_decoded(nvml.nvmlDeviceGetName(handle)),
        driver=driver,
        memory_used=None if memory is None else memory.used,
        memory_total=None if memory is None else memory.total,
        sm_clock=told(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        sm_clock_max=told(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
        memory_clock=told(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        power=None if power is None else power / 1000,
        power_limit=None if limit is None else limit / 1000,
        temperature=told(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
    )


def _decoded(value: Any) -> str:
    """Older versions of the package give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _nvml_value(value: float | None, unit: int = 1) -> str:
    return "?" if value is None else f"{value / unit:.0f}"
