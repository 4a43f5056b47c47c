"""The parent of what is watched is watched: whatever stands still, no node waits for the end of its time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler.local import LocalScheduler
from tests.waiting import wait_for

from .conftest import MakeRun
from .test_local_chain import ends, logs, run_chain

pytestmark = [pytest.mark.slow, pytest.mark.long]

HANG = 10
"""chain.hang_timeout of these runs, in seconds."""
ENDED_WITHIN = 240.0
"""Seconds for the end of a job in which something stands still: the hang limit, 60 s for ranks to leave, 60 s for their
starter, 60 s for the batch script. Its time limit is 3000 s."""
LIMITS = {"time_limit": 3000, "hang_timeout": HANG, "start_timeout": 20, "max_failed_attempts": 1}


def processes_of(run: Run) -> Iterator[tuple[int, int, str]]:
    """Id, parent and command line of each process of the run."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            variables = (entry / "environ").read_bytes()
            if str(run.path) in words or f"RELAYRUN_RUN_DIR={run.path}\0".encode() in variables:
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
                yield int(entry.name), parent, words


def process_of(run: Run, what: str) -> int:
    """The id of one process of a running attempt."""
    found = list(processes_of(run))
    watch = next((pid, parent) for pid, parent, words in found if "relayrun.control.chain watch " in words)
    parents = {pid: parent for pid, parent, _ in found}
    if what == "watch":
        return watch[0]
    if what == "parent of the watch":
        return watch[1]
    if what == "batch script":
        return parents[watch[1]]
    if what == "starter":
        return next(pid for pid, parent, words in found if "local_srun" in words and parent == parents[watch[1]])
    return next(pid for pid, _, words in found if "relay_program.py" in words and "local_srun" not in words)


def stop_in(run: Run, plan: Plan, *names: str, when: Callable[[], bool]) -> float:
    """Run the chain, and send SIGSTOP to these processes; return the seconds from then to the end of the chain."""
    stopped: list[float] = []

    def act() -> None:
        wait_for(when, words="a process to stop")
        stopped.append(time.monotonic())
        for name in names:
            os.kill(process_of(run, name), signal.SIGSTOP)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    run_chain(run, plan)
    thread.join(60)
    assert stopped, logs(run)
    return time.monotonic() - stopped[0]


CASES = {
    "watch, and the ranks hang": (("watch", "rank"), 1000, "hang"),
    "watch, and the ranks end": (("watch",), 40, "done"),
    "starter, and the ranks hang": (("starter", "rank"), 1000, "hang"),
    "starter, and the ranks end": (("starter",), 40, "done"),
    "batch script, and the ranks end": (("batch script",), 40, "done"),
    "parent of the watch, and the ranks end": (("parent of the watch",), 40, "done"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_process_that_stands_still_holds_no_node_to_the_time_limit(make_run: MakeRun, case: str) -> None:
    names, steps, cause = CASES[case]
    run, plan = make_run(f"--steps={steps}", "--step-seconds=0.3", total_steps=steps, **LIMITS)
    taken = stop_in(run, plan, *names, when=run.attempt(1).metrics.exists)
    assert [end.cause for end in ends(run)][:1] == [cause], logs(run)
    assert taken < ENDED_WITHIN
    assert stop_reason(run) is not None
    assert LocalScheduler(run).jobs(plan) == []
