"""What the commands cost that people call again and again: CPU seconds of their processes, from the start to the end.

    python benchmarks/start.py [--rounds 10]

`relayrun --help`, and `relayrun status` of a project like the demo's, with a run of three attempts; then of one with
runs of 2, 20 and 200 attempts. User and system time, that of the interpreter and of programs that the command starts
included; the wall clock says nothing on a machine with other work. A few seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' made run directories

import _results  # noqa: E402

from relayrun import places  # noqa: E402
from tests.history import make_history  # noqa: E402

PROJECTS = {"demo": (3,), "large": (2, 20, 200)}
"""Attempts of the runs of a project."""
COMMANDS = {"help": ("demo", ["--help"]), "status": ("demo", ["status"]), "status_large": ("large", ["status"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    figures: dict[str, Any] = {"rounds": rounds, "unit": "CPU seconds"}
    with tempfile.TemporaryDirectory(prefix="relayrun-start-") as folder:
        python = _results.installed_python(Path(folder) / "environment")
        for project, runs in PROJECTS.items():
            (Path(folder) / project).mkdir()
            (Path(folder) / project / places.PROJECT_MARKER).touch()
            for attempts in runs:
                run = Path(folder) / project / "logs" / "runs" / "p" / str(attempts)
                make_history(run, lines=10 * attempts, attempts=attempts)
        for name, (project, words) in COMMANDS.items():
            spent(python, words, Path(folder) / project)  # compiles
            figures[name] = _results.spread([spent(python, words, Path(folder) / project) for _ in range(rounds)])
    figures["load_average"] = os.getloadavg()[0]
    print(json.dumps(figures, indent=2))
    print(_results.write("start", figures))


def spent(python: Path, words: list[str], folder: Path) -> float:
    """CPU seconds of one call, which must work."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [str(python), "-m", "relayrun", *words]
    subprocess.run(command, cwd=folder, env=_results.as_installed(), stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
