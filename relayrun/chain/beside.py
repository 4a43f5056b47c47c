"""Jobs of the local scheduler that are no part of the chain: one at a time, while the chain's jobs run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports this module
    from relayrun.chain.local import LocalJob, LocalScheduler

LOOK_SECONDS = 1.0
"""Between two looks for jobs that run beside the chain."""
KILL_WAIT = 5.0
"""Seconds from SIGTERM to SIGKILL for them; the chain's job is not looked after meanwhile."""


class Beside:
    """Runs the jobs that are no part of the chain, one at a time, while its owner waits for others."""

    def __init__(self, scheduler: LocalScheduler, on_event: Callable[[str], None]) -> None:
        self._scheduler = scheduler
        self._on_event = on_event
        self._running: tuple[LocalJob, subprocess.Popen[bytes]] | None = None
        self._next_look = 0.0

    @property
    def busy(self) -> bool:
        return self._running is not None

    def poll(self) -> None:
        """Start what waits, end what is over its limit or cancelled, record what has ended."""
        if self._running is None:
            if time.monotonic() < self._next_look:
                return
            self._next_look = time.monotonic() + LOOK_SECONDS
            waiting = [job for job in self._scheduler.every_job() if job.beside and job.state == "PENDING"]
            if waiting:
                self._running = self._scheduler.start_job(waiting[0])
                self._on_event(f"job {waiting[0].id} started ({waiting[0].name})")
            return
        job, process = self._running
        if process.poll() is not None:
            self._record("COMPLETED" if process.returncode == 0 else "FAILED")
        elif time.time() >= (job.end_time or 0.0):
            self._stop("TIMEOUT")
        elif self._scheduler.read_job(job.id).cancel_requested:
            self._stop("CANCELLED")

    def end(self) -> None:
        """End the one that runs."""
        if self._running is not None:
            self._stop("CANCELLED")

    def _stop(self, state: str) -> None:
        assert self._running is not None
        _, process = self._running
        signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_WAIT)
        signal_group(process, signal.SIGKILL)
        process.wait()
        self._record(state)

    def _record(self, state: str) -> None:
        assert self._running is not None
        job, process = self._running
        self._running = None
        self._next_look = 0.0
        with self._scheduler.locked():
            ended = replace(job, state=state, exit_code=process.returncode, end_time=time.time())
            self._scheduler.write_job(ended)
        self._on_event(f"job {job.id} ended: {state} ({job.name})")


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """To the batch script and all it started; they share its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
