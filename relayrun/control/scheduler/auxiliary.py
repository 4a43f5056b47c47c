"""Jobs of the local scheduler that are no part of the chain: one at a time, while the chain's jobs run."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace

from relayrun.control.scheduler.local_queue import LocalJob, LocalQueue, signal_group

AUXILIARY_POLL_SECONDS = 1.0
"""Between two looks for jobs that run beside the chain."""
AUXILIARY_KILL_WAIT = 5.0
"""Seconds from SIGTERM to SIGKILL for them; the chain's job is not looked after meanwhile."""


class AuxiliaryJobs:
    """Runs the jobs that are no part of the chain, one at a time, while its owner waits for others."""

    def __init__(self, queue: LocalQueue, on_event: Callable[[str], None]) -> None:
        self._queue = queue
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
            self._next_look = time.monotonic() + AUXILIARY_POLL_SECONDS
            waiting = [job for job in self._queue.every_job() if job.auxiliary and job.state == "PENDING"]
            if waiting:
                self._running = self._queue.start_job(waiting[0])
                with contextlib.suppress(OSError), self._queue.locked():  # whoever looks on sees it waiting
                    self._queue.write_job(self._running[0])
                self._on_event(f"job {waiting[0].id} started ({waiting[0].name})")
            return
        job, process = self._running
        if process.poll() is not None:
            self._record("COMPLETED" if process.returncode == 0 else "FAILED")
        elif time.time() >= (job.end_time or 0.0):
            self._stop("TIMEOUT")
        elif self._queue.read_job(job.id).cancel_requested:
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
            process.wait(AUXILIARY_KILL_WAIT)
        signal_group(process, signal.SIGKILL)
        process.wait()
        self._record(state)

    def _record(self, state: str) -> None:
        assert self._running is not None
        job, process = self._running
        self._running = None
        self._next_look = 0.0
        with self._queue.locked():
            ended = replace(job, state=state, exit_code=process.returncode, end_time=time.time())
            self._queue.write_job(ended)
        self._on_event(f"job {job.id} ended: {state} ({job.name})")
