"""`python -m relayrun.monitoring.feed wandb|tensorboard --run-dir R --attempt N`: tells a tracker of one attempt.

Rank 0 starts it as a process of its own, and neither waits for it nor reads from it: whatever happens here (a service
that is away, an exception, a full disk, a kill) leaves training alone. It reads the run directory. What the attempts
before it could not hand over is told first; a failure is said in one line and tried again, later and later.

Its standard input is a pipe that rank 0 holds: a byte or its end says that rank 0 leaves.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from relayrun.config import compose
from relayrun.errors import RunDirError, run_main
from relayrun.monitoring.progress import Progress
from relayrun.monitoring.sinks import Sink, TensorBoard, WandB, wandb_mode
from relayrun.monitoring.streams import read_streams
from relayrun.rundir.layout import RunDir
from relayrun.rundir.records import Begin

POLL_SECONDS = 1.0
LAST_SECONDS = 5
"""How long it may take to hand on the rest when rank 0 has gone."""
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 600.0
"""Seconds between a failure and the next try: twice as long after each."""


def feed(run: RunDir, begin: Begin, name: str, make: Callable[[], Sink], wait: Callable[[float], bool]) -> None:
    """Tell a sink until rank 0 leaves. `wait(seconds)` returns whether it does."""
    pause = FIRST_PAUSE
    while True:
        try:
            sink = make()
            progress = Progress.of_attempt(run, begin, mark=sink.mark)
            leaving = False
            while not leaving:
                leaving = wait(POLL_SECONDS)
                complete = leaving and run.attempt(begin.attempt).outcome.exists()
                before = sink.mark
                for point in progress.poll(complete=complete):
                    sink.write(point)
                if sink.mark > before:
                    sink.flush()
                    pause = FIRST_PAUSE
            sink.close()
            return
        except Exception as error:
            print(f"warning: {name}: {type(error).__name__}: {error}; training goes on, and {name} is tried again in "
                  f"{pause:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
            if wait(pause):
                return
            pause = min(2 * pause, LONGEST_PAUSE)


def rank_zero(parent: int) -> Callable[[float], bool]:
    """A `wait` that ends early when rank 0, the process `parent`, leaves; from then on time is short."""

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            # a forked child of rank 0 may hold the pipe open, so the parent is looked at too
            ready, _, _ = select.select([0], [], [], max(0.0, min(left, POLL_SECONDS)))
            if ready or os.getppid() != parent:
                signal.alarm(LAST_SECONDS)
                return True
            if left <= 0:
                return False

    return wait


def main() -> int:
    parser = argparse.ArgumentParser(prog="relayrun.monitoring.feed", description="Tell a tracker of one attempt.")
    parser.add_argument("tracker", choices=("wandb", "tensorboard"))
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of rank 0")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # meant for the ranks, sent to all of the job
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.nice(10)
    run = RunDir(options.run_dir)
    begin = Begin.read(run.attempt(options.attempt).begin)
    streams = read_streams(run)
    if begin is None or not streams:
        raise RunDirError("rank 0 left no streams for this attempt", where=run.streams)
    stream = streams[-1]

    def make() -> Sink:
        if options.tracker == "tensorboard":
            return TensorBoard(run, stream)
        config = compose.read_resolved(run.config_revision(begin.config_revision))
        return WandB(run, stream, config, wandb_mode(os.environ) or "offline")

    name = {"wandb": "W&B", "tensorboard": "TensorBoard"}[options.tracker]
    feed(run, begin, name, make, rank_zero(options.parent))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
