"""Starts the process that sends notices, beside the supervisor and never in its way.

The process is one of `cluster.python`, where apprise may be installed; where that does not start, one of the batch
script's own Python, which knows mail, webhooks and commands. Whatever becomes of it, notices stay until they are told.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

from relayrun.chain.log import log
from relayrun.chain.notices import note
from relayrun.chain.render import search_path
from relayrun.rundir import notices
from relayrun.rundir.notices import NoticePolicy
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.scheduler.base import user_python_path

END_SECONDS = 10.0
"""For so long at most the end of a job waits until its notices are sent; the next command sends what is left."""
LEAVE_SECONDS = 1.0
"""From SIGTERM to SIGKILL for the process that sends: it says what it was at."""
LOOK_SECONDS = 60.0
"""Between two looks of a job for what is to be told."""


class Messenger:
    """Writes the notices of a chain and has them sent. No error of it reaches its user."""

    def __init__(self, run: Run, plan: Plan, *, at_work: bool = True) -> None:
        self._run = run
        self._plan = plan
        self._at_work = at_work
        self._process: subprocess.Popen[bytes] | None = None
        self._next_look = 0.0
        self._complaints: list[str] = []

    def look(self) -> None:
        """Write what is to be told, and have it sent, once a minute."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            self.attend()

    def attend(self) -> None:
        """Write what is to be told, and have it sent."""
        try:
            self._attend()
        except Exception as error:  # nobody's message is worth a chain
            self._complain([f"{type(error).__name__}: {error}"])

    def _attend(self) -> None:
        policy = notices.read_policy(self._run)
        if policy is None:
            return
        now = time.time()
        self._complain(note(self._run, self._plan, policy, now=now, at_work=self._at_work))
        if self._process is not None and self._process.poll() is None:
            return
        waiting = notices.pending(self._run)
        if not waiting or notices.is_being_sent(self._run):
            return
        messages = notices.due(policy.every_target(), waiting, notices.last_told(self._run, waiting, now=now), now=now)
        if any(not notices.try_later(message, waiting, now=now) for message in messages):
            self._process = self._start(policy)

    def _start(self, policy: NoticePolicy) -> subprocess.Popen[bytes]:
        """Start the process; in a container's place the host's Python does it."""
        environment = {
            **os.environ,
            **self._plan.environment,  # a proxy, say
            "PYTHONPATH": ":".join([*search_path(self._plan), *user_python_path(os.environ)]),
            "PYTHONSAFEPATH": "1",
        }
        arguments = [*policy.program[1:], str(self._run.path), "--job"]
        try:
            return _process([policy.program[0], *arguments], environment)
        except OSError:
            return _process([self._plan.host_python, *arguments], environment)

    def finish(self, seconds: float = 0.0) -> None:
        """Wait so long for the process that sends, then end it."""
        process = self._process
        if process is None:
            return
        try:
            for number, patience in ((None, seconds), (signal.SIGTERM, LEAVE_SECONDS), (signal.SIGKILL, None)):
                if number is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
                    return
        except Exception as error:
            self._complain([f"{type(error).__name__}: {error}"])

    def _complain(self, complaints: list[str]) -> None:
        for words in complaints:
            if words not in self._complaints:
                log(f"notices: left for later: {words}")
        self._complaints = complaints


def tell(run: Run, plan: Plan, *, at_work: bool = True) -> None:
    """Write what is to be told where a job ends, and have it sent, for a few seconds. No error comes out of it.

    `at_work`: it is a job of the chain, and no evaluation beside it.
    """
    messenger = Messenger(run, plan, at_work=at_work)
    messenger.attend()
    messenger.finish(END_SECONDS)


def _process(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
