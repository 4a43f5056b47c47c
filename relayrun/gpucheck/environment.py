"""The part `environment`: versions, the device and its state, and two ceilings that other figures are held against."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Any

import psutil

from relayrun import ROOT, __version__
from relayrun.gpucheck.ranks import add_program
from relayrun.gpucheck.setup import CheckFailed, Figures, Setup
from relayrun.monitoring.environment import code

SMI = (
    "name",
    "driver_version",
    "memory.total",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.limit",
    "temperature.gpu",
)


def measure(setup: Setup, figures: Figures) -> None:
    """Note what is here. Raises CheckFailed where torch sees no GPU and none was to be done without."""
    figures.add("machine", machine(setup))
    figures.add("nvidia_smi", nvidia_smi())
    found = add_program(setup, figures, "relayrun.gpucheck.programs.device")
    if not setup.tiny and not found["gpus"]:
        raise CheckFailed("torch sees no GPU here; --tiny (TINY=1) walks the same way on CPUs")


def machine(setup: Setup) -> dict[str, Any]:
    """Return what the host is: processors, memory and disk in bytes, the code that runs."""
    commit, difference = code(ROOT)
    return {
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "disk_free_bytes": shutil.disk_usage(setup.path).free,
        "relayrun": __version__,
        "commit": commit + ("" if not difference else ", and changes"),
    }


def nvidia_smi() -> list[dict[str, str]]:
    """Return what nvidia-smi says of every GPU, at rest; nothing where there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [dict(zip(SMI, row, strict=True)) for row in rows if len(row) == len(SMI)]
