"""Starts the process that sends notices, beside the supervisor and never in its way.

The process is one of `cluster.python`, where apprise may be installed; where that does not start, one of the batch
script's own Python, which knows mail, webhooks and commands. Whatever becomes of it, notices stay until they are told.
"""

from __future__ import annotations

import subprocess
import time

from relayrun.control.chain import background
from relayrun.control.log import log_line
from relayrun.control.notify import notices
from relayrun.control.notify.events import write_due_notices
from relayrun.control.notify.notices import NoticePolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run

NOTICES_END_SECONDS = 10.0
"""For so long at most the end of a job waits until its notices are sent; the next command sends what is left."""
NOTICES_LOOK_SECONDS = 60.0
"""Between two looks of a job for what is to be told."""


class NoticeSender:
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
            self._next_look = time.monotonic() + NOTICES_LOOK_SECONDS
            self.attend()

    def attend(self) -> None:
        """Write what is to be told, and have it sent."""
        try:
            self._attend()
        except Exception as error:  # nobody's message is worth a chain
            self._complain([f"{type(error).__name__}: {error}"])

    def _attend(self) -> None:
        policy = notices.read_trusted_notice_policy(self._run)
        if policy is None:
            return
        now = time.time()
        self._complain(write_due_notices(self._run, self._plan, policy, now=now, at_work=self._at_work))
        if self._process is not None and self._process.poll() is None:
            return
        if notices.is_time_to_send(self._run, policy, now=now, again_and_again=True):
            self._process = self._start(policy)

    def _start(self, policy: NoticePolicy) -> subprocess.Popen[bytes]:
        """Start the process; in a container's place the host's Python does it."""
        environment = background.background_environment(self._plan)
        arguments = [*policy.program[1:], str(self._run.path), "--job"]
        try:
            return _start_sender([policy.program[0], *arguments], environment)
        except OSError:
            return _start_sender([self._plan.host_python, *arguments], environment)

    def finish(self, seconds: float = 0.0) -> None:
        """Wait so long for the process that sends, then end it."""
        if self._process is None:
            return
        try:
            background.end_process_group(self._process, patience=seconds)
        except Exception as error:
            self._complain([f"{type(error).__name__}: {error}"])

    def _complain(self, complaints: list[str]) -> None:
        for words in complaints:
            if words not in self._complaints:
                log_line(f"notices: left for later: {words}")
        self._complaints = complaints


def send_notices(run: Run, plan: Plan, *, at_work: bool = True) -> None:
    """Write what is to be told where a job ends, and have it sent, for a few seconds. No error comes out of it.

    `at_work`: it is a job of the chain, and no evaluation beside it.
    """
    messenger = NoticeSender(run, plan, at_work=at_work)
    messenger.attend()
    messenger.finish(NOTICES_END_SECONDS)


def _start_sender(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
