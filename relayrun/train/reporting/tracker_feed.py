"""Feeds a tracker of one attempt: `python -m relayrun.train.reporting.tracker_feed wandb --run-dir R --attempt N`.

The hook `TrackerProcesses` of rank 0 starts it, and neither waits for it nor reads from it: a service outage, an
exception, a full disk or a kill here does not affect training. It reads the run directory, and sends first what earlier
attempts could not send; a failure is logged in one line and tried again with growing pauses. Its standard input is a
pipe of rank 0: a byte or its end means that rank 0 leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import TrackerRun, update_tracker_runs
from relayrun.control.trainers.tools import wandb_mode
from relayrun.errors import RelayrunError, RunDirError, run_main
from relayrun.train.hooks import Hook
from relayrun.train.reporting.trackers import PointReader, StreamRolledBack, TensorBoard, TrackerSink, WandB

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
LAST_SECONDS = 5
"""Seconds for the rest after rank 0 has left."""
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 600.0
"""Seconds between a failure and the next try, doubled each time."""
LEAVE_SECONDS = 5.0
"""Seconds that rank 0 waits for its feeds after the outcome is written; less than `rundir.time_limit.GRACE_MARGIN`. The
next attempt's feed sends the rest."""


class TrackerProcesses(Hook):
    """Tracker feeds of one attempt."""

    def __init__(self, run: Run, attempt: int, config: RunConfig, say: Callable[[str], None]) -> None:
        self._run, self._attempt, self._config, self._say = run, attempt, config, say
        self._feeds: list[subprocess.Popen[bytes]] = []

    def at_start(self, iteration: int, consumed_samples: int) -> None:
        run, config, say = self._run, self._config, self._say
        mode = wandb_mode(os.environ)
        names = (["wandb"] if mode else []) + (["tensorboard"] if config.tracking.tensorboard else [])
        try:
            stream = update_tracker_runs(run)[-1] if names else None
            for name in names:
                self._feeds.append(_start(name, run, self._attempt))
        except (OSError, RelayrunError) as error:
            say(f"warning: W&B and TensorBoard are off in this attempt: {error}")
            return
        if mode and stream is not None:
            say(f"W&B is on ({mode}): project {config.project}, run {config.name}, id {stream.id}")
        else:
            say("W&B is off: neither WANDB_API_KEY nor WANDB_MODE=offline is in the environment")

    def close(self) -> None:
        """Let the feeds send the rest, within LEAVE_SECONDS for all of them together."""
        end = time.monotonic() + LEAVE_SECONDS
        for feed in self._feeds:
            with contextlib.suppress(OSError):
                assert feed.stdin is not None
                feed.stdin.write(b"\n")
                feed.stdin.close()
        for feed in self._feeds:
            try:
                feed.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                feed.kill()
                feed.wait()


def _command(tracker: str, run_dir: Path, attempt: int, parent: int) -> list[str]:
    program = [sys.executable, "-m", "relayrun.train.reporting.tracker_feed", tracker]
    return [*program, f"--run-dir={run_dir}", f"--attempt={attempt}", f"--parent={parent}"]


def _start(name: str, run: Run, attempt: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(_command(name, run.path, attempt, os.getpid()), stdin=subprocess.PIPE, bufsize=0)


def feed_tracker(
    run: Run, begin: AttemptStart, stream: TrackerRun, sink: TrackerSink, wait: Callable[[float], bool]
) -> None:
    """Feed a sink until rank 0 leaves, or rolls back to a checkpoint (raises StreamRolledBack).

    `wait(seconds)` returns True if rank 0 leaves. Raises any error of the sink.
    """
    points = PointReader.of_attempt(run, begin, stream, mark=sink.mark)
    leaving = False
    try:
        while not leaving:
            leaving = wait(POLL_SECONDS)
            before = sink.mark
            for point in points.poll(complete=leaving and run.attempt(begin.attempt).outcome.exists()):
                sink.write(point)
            if sink.mark > before:
                sink.flush()
    except StreamRolledBack:
        sink.close()
        raise
    sink.close()


def rank_zero_wait(parent: int, last_seconds: int = LAST_SECONDS) -> Callable[[float], bool]:
    """Return a `wait` that ends early when rank 0, the process `parent`, leaves; then `last_seconds` remain."""

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            # a forked child of rank 0 may hold the pipe open, so the parent is checked, too
            ready, _, _ = select.select([0], [], [], max(0.0, min(left, POLL_SECONDS)))
            if ready or os.getppid() != parent:
                signal.alarm(last_seconds)
                return True
            if left <= 0:
                return False

    return wait


def main() -> int:
    """Feed the tracker in the arguments until rank 0 leaves; after a failure start over in a fresh process."""
    parser = argparse.ArgumentParser(description="Tell a tracker of one attempt.")
    parser.add_argument("tracker", choices=("wandb", "tensorboard"))
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of rank 0")
    parser.add_argument("--pause", type=float, default=FIRST_PAUSE, help="seconds before another try")
    parser.add_argument("--last-seconds", type=int, default=LAST_SECONDS, help="seconds left when rank 0 has gone")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # for the ranks, but sent to the whole job
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.environ.pop("WANDB_SERVICE", None)  # of another client, or lost before this try
    os.nice(10)
    run = Run(options.run_dir)
    begin = run.attempt(options.attempt).read_begin()
    if begin is None:
        raise RunDirError("this attempt has not begun", where=run.attempt(options.attempt).begin)
    stream = update_tracker_runs(run)[-1]
    wait = rank_zero_wait(options.parent, options.last_seconds)
    pause = options.pause
    try:
        if options.tracker == "tensorboard":
            sink: TrackerSink = TensorBoard(run, stream)
        else:
            config = resolve.read_resolved_config(run.config_revision(begin.config_revision))
            sink = WandB(run, stream, config, wandb_mode(os.environ) or "offline")
        feed_tracker(run, begin, stream, sink, wait)
    except StreamRolledBack:
        start_over(options, FIRST_PAUSE)
    except Exception as error:
        log.warning(
            "%s: %s: %s; training goes on, and %s is tried again in %.0f s",
            options.tracker,
            type(error).__name__,
            error,
            options.tracker,
            pause,
        )
        if wait(pause):
            os._exit(0)  # the client's exit handlers would report the same failure
        start_over(options, min(2 * pause, LONGEST_PAUSE))
    return 0


def start_over(options: argparse.Namespace, pause: float) -> NoReturn:
    """Replace this process by a fresh one: a client that has lost its service does not find another."""
    command = _command(options.tracker, options.run_dir, options.attempt, options.parent)
    command += [f"--pause={pause}", f"--last-seconds={options.last_seconds}"]
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(run_main(main))
