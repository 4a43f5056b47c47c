"""The part `environment`: versions, the device and its state, and two ceilings that other figures are held against."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict
from typing import Any

from relayrun import __version__, places
from relayrun.lab.gpucheck.ranks import add_program
from relayrun.lab.gpucheck.setup import CheckFailed, Figures, Setup
from relayrun.train.reporting.environment import code
from relayrun.train.reporting.gpus import gpus


def measure(setup: Setup, figures: Figures) -> None:
    """Note what is here. Raises CheckFailed where torch sees no GPU and none was to be done without."""
    figures.add("machine", machine(setup))
    figures.add("nvml", [asdict(gpu) for gpu in gpus()])  # at rest
    found = add_program(setup, figures, "relayrun.lab.gpucheck.programs.device")
    if not setup.tiny and not found["gpus"]:
        raise CheckFailed("torch sees no GPU here; --tiny (TINY=1) walks the same way on CPUs")


def machine(setup: Setup) -> dict[str, Any]:
    """Return what the host is: processors, memory and disk in bytes, the code that runs."""
    import psutil  # an extra, and a login node reads this module

    commit, difference = code(places.CODE)
    return {
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "disk_free_bytes": shutil.disk_usage(setup.path).free,
        "relayrun": __version__,
        "commit": commit + ("" if not difference else ", and changes"),
    }
