"""The part `environment`: versions, the device and its state, and two ceilings that other figures are held against."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict
from typing import Any

from relayrun import __version__, places
from relayrun.lab.gpucheck.ranks import run_and_record_program
from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, PartFigures
from relayrun.train.reporting.environment import code_version
from relayrun.train.reporting.gpus import node_gpus


def measure_environment(setup: CheckSetup, figures: PartFigures) -> None:
    """Note what is here. Raises CheckFailed where torch sees no GPU and none was to be done without."""
    figures.add("machine", describe_machine(setup))
    figures.add("nvml", [asdict(gpu) for gpu in node_gpus()])  # at rest
    found = run_and_record_program(setup, figures, "relayrun.lab.gpucheck.programs.device")
    if not setup.tiny and not found["gpus"]:
        raise CheckFailed("torch sees no GPU here; --tiny (TINY=1) walks the same way on CPUs")


def describe_machine(setup: CheckSetup) -> dict[str, Any]:
    """Return what the host is: processors, memory and disk in bytes, the code that runs."""
    import psutil  # an extra, and a login node reads this module

    commit, difference = code_version(places.CODE_ROOT)
    return {
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "disk_free_bytes": shutil.disk_usage(setup.path).free,
        "relayrun": __version__,
        "commit": commit + ("" if not difference else ", and changes"),
    }
