"""Processes that a supervisor starts beside the ranks and never in their way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from relayrun.control.chain.job_script import python_path
from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler.base import user_python_path

TERMINATE_SECONDS = 1.0
"""From SIGTERM to SIGKILL: such a process says what it was at, and may be killed at any point."""


def background_environment(plan: Plan) -> dict[str, str]:
    """The environment of such a process, in which it finds relayrun and what a site's jobs are given: a proxy, say."""
    return {
        **os.environ,
        **plan.environment,
        "PYTHONPATH": ":".join([*python_path(plan), *user_python_path(os.environ)]),
        "PYTHONSAFEPATH": "1",
    }


def end_process_group(process: subprocess.Popen[bytes], *, patience: float = 0.0) -> None:
    """Wait `patience` seconds for a process that leads a session, then end it and what it started."""
    steps: tuple[tuple[signal.Signals | None, float | None], ...] = (
        (None, patience),
        (signal.SIGTERM, TERMINATE_SECONDS),
        (signal.SIGKILL, None),
    )
    for number, seconds in steps:
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
