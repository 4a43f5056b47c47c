"""A program without a word of relayrun, whose ranks agree by files.

    restarted_program.py FOLDER LAST FAULT ... [--resume PATH]

Each rank prints its iterations; rank 0 saves every fifth, a folder with the weights and, last, `done`. The weights are
a number that each iteration changes, so two runs are equal bit for bit or not at all.

FAULT is `ROUND:RANK:ITERATION:WHAT`: in that restart, counted from 1, 0 for each, that rank meets WHAT behind that
iteration. WHAT is a signal's name, `exit3`, `torn` (killed in the middle of the save), `whole` (killed right behind
it), `held` (it stands still) or `child` (it leaves a process behind, and is killed).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STEP_SECONDS = 0.05


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("last", type=int)
    parser.add_argument("faults", nargs="*")
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    number, port = os.environ.get("RELAYRUN_RESTART", "1"), os.environ["MASTER_PORT"]
    asked: list[int] = []
    signal.signal(signal.SIGUSR2, lambda heard, _frame: asked.append(heard))
    at, weights = 0, 0.5
    if options.resume is not None:
        at, weights = int(options.resume.name.removeprefix("step-")), float((options.resume / "weights").read_text())
    print(f"rank {rank} of {ranks} begins restart {number} at {at}, port {port}, pid {os.getpid()}", flush=True)
    met = options.folder.parent / "met"
    met.mkdir(exist_ok=True)
    while at < options.last:
        time.sleep(STEP_SECONDS)
        at, weights = at + 1, 3.9 * weights * (1 - weights)
        if rank == 0:
            print(f"step {at} loss {weights!r}", flush=True)
        if asked and rank == 0:
            (met / f"leave-{port}").write_text("")
        (met / f"{port}-{at}-{rank}").write_text("")
        while len(list(met.glob(f"{port}-{at}-*"))) < ranks:  # as in a collective
            time.sleep(0.01)
        fault(options.faults, number, rank, at, options.folder, weights)
        leave = (met / f"leave-{port}").exists() and at % 5 == 0
        if rank == 0 and (at % 5 == 0 or at == options.last):
            save(options.folder, at, weights)
        fault(options.faults, number, rank, at, options.folder, weights, saved=True)
        if leave:
            break
    return 0


def save(folder: Path, at: int, weights: float) -> None:
    path = folder / f"step-{at}"
    path.mkdir()
    (path / "weights").write_text(repr(weights))
    (path / "done").write_text("")
    (folder / "newest").write_text(str(at))


def fault(
    faults: list[str], number: str, rank: int, at: int, folder: Path, weights: float, *, saved: bool = False
) -> None:
    for text in faults:
        where, culprit, iteration, what = text.split(":")
        if where not in ("0", number) or (int(culprit), int(iteration)) != (rank, at) or saved != (what == "whole"):
            continue
        print("half a line", end="", flush=True)
        if what == "exit3":
            os._exit(3)
        elif what == "held":
            time.sleep(3600)
        elif what == "torn":
            (folder / f"step-{at}").mkdir()
            (folder / f"step-{at}" / "weights").write_text(repr(weights)[:4])
        elif what == "child":
            subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(3600)", str(folder)], start_new_session=True
            )
        os.kill(os.getpid(), signal.Signals[what] if what.startswith("SIG") else signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
