"""What `begin` and `end` of a job cost a chain with a long past: CPU, memory, opened files of the run directory.

Run directories with 10^4 to 10^6 metrics lines and 2 to 200 attempts are made; `begin` of the next attempt and, when
that has trained and saved, its `end` run as processes of their own, with the start of Python. Beside them the same at
the commit before costs were bounded, where this checkout has it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' made run directories

import _results  # noqa: E402

from relayrun.control.rundir.merged_metrics import MergedViews  # noqa: E402
from relayrun.control.rundir.run import Run  # noqa: E402
from tests.history import cost, make_history, trained  # noqa: E402

BEFORE = "96ec013"
"""The last commit that read all records and rebuilt the views."""
LINES = (10_000, 100_000, 1_000_000)
ATTEMPTS = (2, 20, 200)
HANDFUL = 5
"""Files that may be opened a second time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest run directory alone; writes no results")
    quick = parser.parse_args().quick
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="history-") as folder:
        before = checkout(Path(folder) / "before")
        for lines in LINES[:1] if quick else LINES:
            for attempts in ATTEMPTS[:1] if quick else ATTEMPTS:
                case: dict[str, Any] = {"lines": lines, "attempts": attempts}
                if before is not None:
                    case["before"] = measured(Path(folder), lines, attempts, before)
                case |= measured(Path(folder), lines, attempts, ROOT)
                assert all(case[verb]["opened_again"] <= HANDFUL for verb in ("begin", "end")), case
                print(case, flush=True)
                cases.append(case)
    if not quick:
        largest = cases[-1]
        print(_results.write("history", {"unit": "seconds, MB, files", "largest": largest, "cases": cases}))


def checkout(folder: Path) -> Path | None:
    """The files of BEFORE; None where this checkout's history does not reach back to it."""
    archive = subprocess.run(["git", "archive", BEFORE, "relayrun", "launchers"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        print(f"without {BEFORE}: {archive.stderr.decode().strip()}", file=sys.stderr)
        return None
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def measured(folder: Path, lines: int, attempts: int, package_root: Path) -> dict[str, dict[str, float]]:
    """The cost of `begin` and `end` of the next attempt, which trains as long as those before it."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        run = make_history(Path(work) / "run", lines=lines, attempts=attempts, package_root=package_root)
        if package_root == ROOT:
            MergedViews(Run(run.path)).update()
        begin = cost(run, "begin", package_root=package_root)
        trained(run, attempts + 1, lines, lines + lines // attempts)
        if package_root == ROOT:
            watch = MergedViews(Run(run.path))  # what `watch` does beside the ranks
            while not watch.update(attempt=attempts + 1):
                pass
            watch.note()
        end = cost(run, "end", f"--attempt={attempts + 1}", "--exit-code=0", package_root=package_root)
    return {"begin": begin.figures(), "end": end.figures()}


if __name__ == "__main__":
    main()
