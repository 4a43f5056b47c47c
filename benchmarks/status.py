"""What a look at a thousand runs costs, one of them with 10^6 iterations: CPU seconds with the start of Python.

    python benchmarks/status.py [--runs 1000] [--lines 1000000] [--rounds 3] [--quick]

`relayrun status`, the first lines of `relayrun status -f`, and the same of the long run alone. Each round begins new
programs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' made run directories

import _results  # noqa: E402

from relayrun import places  # noqa: E402
from relayrun.control.rundir.merged_metrics import MergedViews  # noqa: E402
from relayrun.control.rundir.run import Run  # noqa: E402
from tests.history import make_history  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few runs, a short one for the long one; writes no result")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.lines, options.rounds = 20, 1000, 1
    with tempfile.TemporaryDirectory(prefix="status-") as folder:
        (Path(folder) / places.PROJECT_MARKER).touch()
        runs = Path(folder) / "logs" / "runs" / "many"
        long = make_history(runs / "long", lines=options.lines, attempts=20)
        MergedViews(Run(long.path)).update()
        for number in range(options.runs - 1):
            made = make_history(runs / f"run-{number:04}", lines=60, attempts=3)
            MergedViews(Run(made.path)).update()
        python = _results.installed_python(Path(folder) / "venv")
        relayrun = [str(python), "-m", "relayrun.cli"]
        ways: dict[str, Callable[[], float]] = {
            "status": lambda: spent([*relayrun, "status"], folder),
            "status_follow": lambda: spent([*relayrun, "status", "-f"], folder, lines=options.runs),
            "status_long_run": lambda: spent([*relayrun, "status", str(long.path)], folder),
        }
        figures: dict[str, Any] = {}
        for name, way in ways.items():
            way()  # compiles
            figures[name] = _results.spread([way() for _ in range(options.rounds)])
            print(name, figures[name], flush=True)
        figures |= {"runs": options.runs, "lines": options.lines, "load_average": os.getloadavg()[0]}
    print(figures if options.quick else _results.write("status", figures))


def begun(command: list[str], folder: str) -> subprocess.Popen[str]:
    """A program that heeds Ctrl-C, also where a shell has put this one into the background."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=_results.as_installed(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def spent(command: list[str], folder: str, *, lines: int | None = None) -> float:
    """CPU seconds of a program, or until it has written so many lines. Ends where it fails."""
    with begun(command, folder) as program:
        assert program.stdout is not None
        seen = sum(1 for _ in itertools.islice(program.stdout, lines))
        if lines is None:
            _, status, usage = os.wait4(program.pid, 0)
            program.returncode = os.waitstatus_to_exitcode(status)
            if program.returncode or not seen:
                raise SystemExit(f"{' '.join(command)}: exit code {program.returncode}, {seen} lines")
            return usage.ru_utime + usage.ru_stime
        if seen < lines:
            program.kill()
            raise SystemExit(f"{' '.join(command)}: {seen} lines, {lines} expected")
        seconds = _results.cpu_seconds(program.pid, ended=True)
        program.send_signal(signal.SIGINT)
        program.stdout.read()
    return seconds


if __name__ == "__main__":
    main()
