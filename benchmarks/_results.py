"""Where the figures of a benchmark go: `results/NAME.json`, with what they were measured on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import statistics
import sys
import sysconfig
import venv
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relayrun.files import write_json

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("relayrun", "torch", "megatron-core", "numpy", "pyarrow", "datatrove", "tokenizers")


def installed_python(folder: Path) -> Path:
    """Make an environment in `folder`, which is to be new, and return its interpreter: this code and its packages.

    For commands whose start is measured. They lie on the path as where a wheel is installed, without the hook of an
    editable installation, which every start of an interpreter would pay for.
    """
    venv.create(folder, with_pip=False)
    paths = [str(RESULTS.parents[1]), sysconfig.get_path("purelib")]
    purelib = sysconfig.get_path("purelib", vars={"base": str(folder)})
    (Path(purelib) / "relayrun.pth").write_text("\n".join(paths) + "\n")
    return folder / "bin" / "python"


def as_installed() -> dict[str, str]:
    """The environment of a command whose start is measured: bytecode is kept, as where it is installed.

    The first call compiles what has no bytecode yet; do not count it.
    """
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}


def cpu_seconds(pid: int | str = "self", *, ended: bool = False) -> float:
    """CPU time of a process and of those that it has started and that live; `ended`: of those that have ended, too."""
    found = 0.0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        found = sum(map(int, fields[11 : 15 if ended else 13])) / os.sysconf("SC_CLK_TCK")
        for task in Path(f"/proc/{pid}/task").iterdir():
            children = (task / "children").read_text(encoding="utf-8").split()
            found += sum(cpu_seconds(child, ended=ended) for child in children)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Smallest, median and largest of the rounds."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def spreads(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The spread of each number in the figures of several turns, which have the same keys."""
    found: dict[str, Any] = {}
    for key, first in turns[0].items():
        values = [turn[key] for turn in turns if key in turn]
        if isinstance(first, dict):
            found[key] = spreads(values)
        elif isinstance(first, int | float) and not isinstance(first, bool):
            found[key] = spread(values)
    return found


def write(name: str, figures: dict[str, Any], path: Path | None = None) -> Path:
    """Write `results/NAME.json` with the date, the command, versions and the number of CPUs beside the figures.

    `path`: a file in its place.
    """
    path = path or RESULTS / f"{name}.json"
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    write_json(
        path,
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "versions": versions,
            "figures": figures,
        },
    )
    return path
