"""Beside the ranks: keeps the merged metrics up to date, ends an attempt that stands still, queues a late successor.

An attempt stands still when no node's heartbeat has changed for `hang_timeout` seconds, or ten times what a
step (while saving: a save) usually takes, if that is longer. Time is this process's own clock, from the last
change it saw, so that clocks of nodes need not agree. Before it is ended, every rank is asked for its Python
stacks; who does not answer is named.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from relayrun.chain import evaluations, evidence
from relayrun.chain.log import log
from relayrun.errors import RelayrunError, SchedulerError
from relayrun.rundir.attempt import Attempt
from relayrun.rundir.plan import Plan
from relayrun.rundir.records import Hang, Heartbeat
from relayrun.rundir.run import Run
from relayrun.rundir.views import Views
from relayrun.scheduler.base import Scheduler
from relayrun.scheduler.choose import for_plan

POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""How long ranks have to write their stacks."""
RETRY_SECONDS = 60.0
USUAL = 10
"""A step that takes this many times the usual one hangs."""


def stall_limit(beats: Sequence[Heartbeat], *, hang_timeout: float, start_timeout: float) -> float:
    """Seconds without a change after which an attempt with these heartbeats stands still."""
    if not beats or all(beat.phase == "start" for beat in beats):
        return max(start_timeout, hang_timeout)
    usual = [beat.save_p95 if beat.phase == "save" else beat.step_p95 for beat in beats]
    return max([hang_timeout, *(USUAL * seconds for seconds in usual if seconds is not None)])


class Watch:
    """The supervisor's part beside one attempt."""

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.plan = Plan.load(run)
        self.attempt = run.attempt(number)
        self.begin = self.attempt.read_begin()
        self.scheduler: Scheduler = for_plan(self.plan, run)
        self._views = Views(run)
        self._complaint = ""
        """What was last said about the views."""
        self._seen: list[Heartbeat] = []
        self._changed = time.monotonic()
        self._next_try = time.monotonic() + RETRY_SECONDS
        self._commits = 0
        """Bytes of commits.jsonl when evaluations were last looked after."""
        self._next_look = 0.0

    def loop(self) -> None:
        """Until SIGTERM, or until the batch script has gone."""
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        leaving, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told)  # a sleep would go on after the signal, and the end of the job with it
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # a mask is handed down, and the job waits for it
        parent = os.getppid()
        guarded = not (self.plan.mode == "requeue" and self.plan.auto_requeue)
        while os.getppid() == parent:
            self._follow()
            if not self.attempt.hang.exists():
                self._look_for_hang()
            if not guarded and self._seen:  # the ranks have their step, so it cannot be in their way
                self._guard(parent)
                guarded = True
            self._retry_successor()
            self._evaluate()
            if select.select([leaving], [], [], POLL_SECONDS)[0]:
                break
        self._follow(leaving=True)

    def _follow(self, *, leaving: bool = False) -> None:
        """Append what is new and whole in the attempt's metrics to the merged view; what fails is tried again."""
        try:
            self._views.update(attempt=self.attempt.number)
            if leaving:
                self._views.note()
            self._complaint = ""
        except (OSError, RelayrunError) as error:
            if str(error) != self._complaint:
                log(f"the merged views are left for later: {error}")
            self._complaint = str(error)

    def _look_for_hang(self) -> None:
        beats = read_heartbeats(self.attempt)
        if beats != self._seen:
            self._seen, self._changed = beats, time.monotonic()
            return
        still = time.monotonic() - self._changed
        limit = stall_limit(beats, hang_timeout=self.plan.hang_timeout, start_timeout=self.plan.start_timeout)
        if still > limit and not self.attempt.outcome.exists():
            self._end_hang(beats, still)

    def _end_hang(self, beats: Sequence[Heartbeat], seconds: float) -> None:
        job_id = self.scheduler.current_job_id()
        stacks = self.run.stacks(self.attempt.number)
        self.scheduler.signal_ranks(job_id, signal.SIGUSR1)
        time.sleep(ANSWER_SECONDS)
        silent = sorted(set(range(self._ranks())) - evidence.answered(stacks))
        hang = Hang(
            iteration=max((beat.iteration for beat in beats), default=0),
            phase=beats[0].phase if beats else "start",
            seconds=seconds,
            silent=silent,
            time=time.time(),
        )
        hang.write(self.attempt.hang)
        log(f"{hang.words}; Python stacks in {stacks}; ending the ranks")
        self.scheduler.signal_ranks(job_id, signal.SIGKILL)

    def _guard(self, batch_pid: int) -> None:
        root = Path(self.plan.package_root)
        command = [
            "env",
            f"PYTHONPATH={root}",
            "bash",
            str(root / "launchers/lib/rank.sh"),
            self.plan.host_python,
            "-m",
            "relayrun.chain",
            "guard",
            f"--run-dir={self.run.path}",
            f"--attempt={self.attempt.number}",
            f"--batch-pid={batch_pid}",
        ]
        try:
            self.scheduler.guard(self.scheduler.current_job_id(), command, log=self.attempt.guard_log)
        except SchedulerError as error:
            log(f"nothing queues this job again if its batch script is killed: {error.message}")

    def _ranks(self) -> int:
        nodes = int(self.begin.options.get("nodes", self.plan.nodes)) if self.begin else self.plan.nodes
        return nodes * self.plan.ntasks_per_node

    def _evaluate(self) -> None:
        """Submit the evaluation of a new checkpoint; look after the others now and then."""
        size = evidence.size(str(self.attempt.commits))
        if size == self._commits and time.monotonic() < self._next_look:
            return
        self._commits, self._next_look = size, time.monotonic() + RETRY_SECONDS
        evaluations.attend(self.run, self.plan, for_plan(self.plan, self.run, patience=0))

    def _retry_successor(self) -> None:
        """Queue the successor that could not be queued when the attempt began."""
        if not self.attempt.retry_successor.exists() or time.monotonic() < self._next_try:
            return
        self._next_try = time.monotonic() + RETRY_SECONDS
        try:
            successor = self.scheduler.submit(
                self.plan, self.run.job_script, options=self.begin.options if self.begin else {}
            )
        except SchedulerError as error:
            log(f"still no successor: {error.message}")
            return
        self.attempt.retry_successor.unlink()
        log(f"queued job {successor} behind this one")


def read_heartbeats(attempt: Attempt) -> list[Heartbeat]:
    """The newest sign of life of every node, by name."""
    found = [Heartbeat.read(path) for path in sorted(attempt.heartbeats.glob("*.json"))]
    return [beat for beat in found if beat is not None]
