"""What a look at 10,000 runs with 10^6 attempts costs: CPU seconds with the start of Python.

    python benchmarks/control_plane.py [--runs 10000] [--attempts 100] [--rounds 3] [--folder FOLDER] [--quick]

Most runs ended long ago, as in a project that is some years old; `--living` of them have not ended, and as many ended
now. `relayrun status`, `status --all`, `metrics` of all runs, which has their accounts, and the look of cron
(`sentinel`); the first call of each is shown beside the others. Files of attempts are links to those of a few runs:
what they say is the same in all. Attempts before the newest five have their begin and end alone, as after years of
cleaning. The first look comes a minute after the last run is made: what has just changed is not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' made run directories

import _results  # noqa: E402

from relayrun import places  # noqa: E402
from relayrun.control.rundir.merged_metrics import MergedViews  # noqa: E402
from relayrun.control.rundir.records import ChainEnd  # noqa: E402
from relayrun.control.rundir.run import Run, write_stop  # noqa: E402
from relayrun.watch.status.runs import CALM_SECONDS  # noqa: E402
from tests.history import make_history  # noqa: E402

NEWEST = 5
"""Attempts with all their files."""
WORDS = ("begin.json", "end.json")
LINKS = 50_000
"""Hard links of one file: ext4 allows 65,000."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--attempts", type=int, default=100, help="of each run; default: %(default)s")
    parser.add_argument("--living", type=int, default=100, help="runs that have not ended; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where the runs are made and stay; made before, they are used again"
    )
    parser.add_argument("--quick", action="store_true", help="few runs; writes no result")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.attempts, options.living, options.rounds = 100, 5, 10, 1
    with contextlib.ExitStack() as stack:
        folder = str(options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="control-")))
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / places.PROJECT_MARKER).touch()
        make_runs(Path(folder), options.runs, options.attempts, options.living)
        time.sleep(0 if options.quick else CALM_SECONDS)
        python = _results.installed_python(Path(folder) / "venv")
        relayrun = [str(python), "-m", "relayrun.cli"]
        ways = {
            "status": [*relayrun, "status"],
            "status_all": [*relayrun, "status", "--all"],
            "sentinel": [*relayrun, "sentinel", "logs/runs"],
            "metrics": [*relayrun, "metrics"],
        }
        figures: dict[str, Any] = {}
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="control-cache-"))
        environment = _results.as_installed() | {"HOME": folder, "XDG_CACHE_HOME": cache}
        spent([*relayrun, "--help"], folder, environment)  # compiles
        for name, command in ways.items():
            first = spent(command, folder, environment)
            again = _results.spread([spent(command, folder, environment) for _ in range(options.rounds)])
            figures[name] = {"first": first, "again": again}
            print(name, figures[name], flush=True)
        figures |= {
            "runs": options.runs,
            "attempts": options.runs * options.attempts,
            "living": options.living,
            "load_average": os.getloadavg()[0],
        }
    print(figures if options.quick else _results.write("control_plane", figures))


def make_runs(folder: Path, runs: int, attempts: int, living: int) -> None:
    """Make runs of which the first is whole and the others are links to its files; each has a plan of its own."""
    began = time.monotonic()
    for left in (folder / "logs/runs").glob(".sentinel-*"):
        left.unlink()
    shutil.rmtree(folder / "model", ignore_errors=True)
    first, linked = make_history(folder / "model", lines=10 * attempts, attempts=attempts), 0
    MergedViews(Run(first.path)).update()
    text = first.plan.read_text()
    files = kept_files(first, attempts)
    for number in range(runs):
        name = f"run-{number:05}"
        run = Run(folder / "logs" / "runs" / f"project-{number % 20:02}" / name)
        if (run.path / "made").exists():
            continue
        shutil.rmtree(run.path, ignore_errors=True)
        run.path.mkdir(parents=True)
        if linked >= LINKS:  # a new set of files
            linked = 0
            first = make_history(folder / f"model-{number}", lines=10 * attempts, attempts=attempts)
            MergedViews(Run(first.path)).update()
            files = kept_files(first, attempts)
        linked += 1
        for path in files:
            target = run.path / path.relative_to(first.path)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            elif path.name not in ("plan.json", "STOP"):
                os.link(path, target)
        plan = json.loads(text)
        plan |= {"run": f"project-{number % 20:02}/{name}", "job_name": f"{name}-chain"}
        run.plan.write_text(json.dumps(plan))
        if number >= living:
            write_stop(run, ChainEnd(state="done", reason="the last iteration is saved"))
        if number >= 2 * living:
            os.utime(run.stop, (1.6e9, 1.6e9))
        (run.path / "made").touch()
    print(f"{runs} runs made in {time.monotonic() - began:.0f} s", flush=True)


def kept_files(run: Run, attempts: int) -> list[Path]:
    """The files of a run that others have as well."""
    old = {run.attempt(number).path.name for number in range(1, attempts - NEWEST + 1)}
    old_saves = {str(path.name) for path in sorted(run.checkpoints.iterdir())[: -2 * NEWEST]}
    found = []
    for path in sorted(run.path.rglob("*")):
        parts = set(path.relative_to(run.path).parts)
        if parts & ({"local"} | old_saves) or (parts & old and path.is_file() and path.name not in WORDS):
            continue
        found.append(path)
    return found


def spent(command: list[str], folder: str, environment: dict[str, str]) -> float:
    """CPU seconds of a program. Ends where it fails."""
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        seen = sum(1 for _ in program.stdout)
        _, status, usage = os.wait4(program.pid, 0)
        program.returncode = os.waitstatus_to_exitcode(status)
    if program.returncode or (not seen and "sentinel" not in command):
        raise SystemExit(f"{' '.join(command)}: exit code {program.returncode}, {seen} lines")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
