"""Submit, await, read and stop runs from a program, as the commands do.

    from relayrun.api import submit

    run = submit("configs/runs/demo.yaml", {"training.steps": 40})
    if run.wait() != "done":
        print(run.status().why)

Settings are checked as by `relayrun submit`, and errors are `relayrun.errors.RelayrunError`. A handle may be made in
any process and on any node that sees the run directory; it keeps no state.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from relayrun.cli.run.stop import ask
from relayrun.config.compose import resolve
from relayrun.config.sections.batch_systems import batch_system
from relayrun.control.rundir.find_runs import find_run
from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler.factory import local_scheduler
from relayrun.errors import SchedulerError
from relayrun.submit.submission import submit_run
from relayrun.watch import unsent_notices
from relayrun.watch.status import queue
from relayrun.watch.status.run_status import RunStatus, read_run_status
from relayrun.watch.status.summary import UNFINISHED_STATES, RunState

__all__ = ["RunHandle", "submit"]


class RunHandle:
    """A run: its directory, or its project/name below logs/runs of the project. Raises RunDirError if it is none."""

    path: Path
    """The run directory."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._run = find_run(os.fspath(run))
        self.path = self._run.path

    def status(self) -> RunStatus:
        """Return what `relayrun status RUN` shows."""
        return read_run_status(self._run, queue.query_queue(self._run), now=time.time())

    def wait(self, *, seconds: float = math.inf, every: float = 30.0) -> RunState:
        """Wait until the chain has ended or is blocked, at most `seconds`; return its state. The scheduler is asked
        `every` so many seconds. Jobs of the local scheduler run inside this call, whatever `seconds` is."""
        until = time.monotonic() + seconds
        if batch_system(Plan.load(self._run).scheduler).one_machine:
            with contextlib.suppress(SchedulerError):  # another process runs them
                local_scheduler(self._run).run_queue(lambda _: None)
        while (state := self.status().state) in UNFINISHED_STATES and (left := until - time.monotonic()) > 0:
            time.sleep(min(every, left))
        return state

    def stop(self) -> str:
        """Write a checkpoint and end the chain, as `relayrun stop RUN`; return a sentence about the effect."""
        return ask(self._run, "stop")


def submit(
    config: str | os.PathLike[str],
    changes: Mapping[str, object] | None = None,
    *,
    resume: bool = False,
    accept_data_change: bool = False,
) -> RunHandle:
    """Submit a run config, with `changes` of its settings by their dotted names; the others are as `relayrun submit`'s.

    Nobody is asked: `chain.max_node_hours` limits what it can use. Raises RelayrunError if the check refuses it; then
    nothing is queued.
    """
    given = resolve.read_settings(Path(config), [f"{name}={json.dumps(to)}" for name, to in (changes or {}).items()])
    settings = resolve.validate_settings(given)
    run = submit_run(settings, resume=resume, accept_data_change=accept_data_change, given=given).run
    unsent_notices.send_in_background(run)
    return RunHandle(run.path)
