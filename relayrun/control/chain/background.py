"""Background processes of the supervisor: the sender of notices, the copier and the hasher of checkpoints.

They run beside the ranks with low priority, may be killed at any point, and the next one continues. A process that does
not start, or fails, never fails the chain.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import IO

from relayrun.control.chain.job_script import python_path
from relayrun.control.job_log import log_line, logged
from relayrun.control.notify import notices
from relayrun.control.notify.events import write_due_notices
from relayrun.control.notify.notices import NoticePolicy
from relayrun.control.rundir import mirror
from relayrun.control.rundir.mirror import MirrorPolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import user_python_path
from relayrun.control.trainers.registry import trainer_of
from relayrun.errors import RelayrunError

TERMINATE_SECONDS = 1.0
"""Seconds from SIGTERM to SIGKILL: the process logs what it did, and may be killed at any point."""
COPY_AGAIN_SECONDS = 900.0
"""Interval between two passes without a new checkpoint: a copy that failed may work now."""
LAST_HASH_SECONDS = 300.0
"""Maximum seconds for which the end of a job waits until its last checkpoint is hashed."""
END_SECONDS = 60.0
"""Seconds before the end of a job that are left for the decision about the chain."""
NOTICES_END_SECONDS = 10.0
"""Maximum seconds for which the end of a job waits until its notices are sent; the next command sends the rest."""
NOTICES_LOOK_SECONDS = 60.0
"""Interval between two looks of a job for due notices."""


NICE = ("nice", "-n", "19")


class PassAfterSave:
    """Starts a process after each save of a run, one at a time. `start` returns None if the run needs no pass."""

    def __init__(self, start: Callable[[Run, Plan], subprocess.Popen[bytes] | None], run: Run, plan: Plan) -> None:
        self._start = partial(start, run, plan)
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: int | None = None
        """The value of `saved` at the last pass."""
        self._next = 0.0

    def look(self, saved: int) -> None:
        """Start a pass if one is due. `saved` changes with each save. Raises OSError, RelayrunError."""
        if self._process is not None and self._process.poll() is None:
            return
        if saved == self._seen and time.monotonic() < self._next:
            return
        self._seen, self._next = saved, time.monotonic() + COPY_AGAIN_SECONDS
        self._process = self._start()

    def finish(self, seconds: float = 0.0) -> None:
        """Wait so many seconds for the current pass, then end it, because the job ends."""
        if self._process is not None:
            end_process_group(self._process, patience=seconds)


def copy_checkpoints(run: Run, plan: Plan) -> subprocess.Popen[bytes] | None:
    """Start to copy the checkpoints of a run whose config asks for a mirror."""
    policy = MirrorPolicy.read_trusted(run.path, mirror.MIRROR_POLICY_NAME)
    if policy is None:
        return None
    with open(run.mirror / "log", "ab") as log:
        return _start_process([*NICE, *policy.program, str(run.path)], plan, log)


def hash_checkpoints(run: Run, plan: Plan) -> subprocess.Popen[bytes] | None:
    """Start to hash the checkpoints of a run whose program writes no hashes; see `trainers.checkpoint_hashes`."""
    if not trainer_of(plan, run).lacks_hashes or (newest := run.newest_begun()) is None:
        return None
    where = ["hash", f"--run-dir={run.path}", f"--attempt={newest.number}"]
    return _start_process([*NICE, *plan.host_command("relayrun.control.chain"), *where], plan, sys.stderr.fileno())


def hash_last_checkpoint(run: Run, plan: Plan, *, job_end: float | None) -> None:
    """Hash the checkpoint with which an attempt has left, while the job has time. The next attempt begins with it."""
    seconds = min(LAST_HASH_SECONDS, (job_end or math.inf) - time.time() - END_SECONDS)
    if seconds > 0:
        hasher = PassAfterSave(hash_checkpoints, run, plan)
        with logged("the last checkpoint is not hashed", OSError, RelayrunError):
            hasher.look(0)
            hasher.finish(seconds)


class NoticeSender:
    """Writes the notices of a chain and starts their sender. Its methods raise no errors."""

    def __init__(self, run: Run, plan: Plan, *, at_work: bool = True) -> None:
        self._run = run
        self._plan = plan
        self._at_work = at_work
        self._process: subprocess.Popen[bytes] | None = None
        self._next_look = 0.0
        self._complaints: list[str] = []

    def look(self) -> None:
        """Write due notices and have them sent, once a minute."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + NOTICES_LOOK_SECONDS
            self.attend()

    def attend(self) -> None:
        """Write due notices and have them sent."""
        try:
            self._attend()
        except Exception as error:  # no notice may fail the chain
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
        """Start the sender; if its Python lives in a container, use the host's Python."""
        arguments = [*policy.program[1:], str(self._run.path), "--job"]
        try:
            return _start_process([policy.program[0], *arguments], self._plan)
        except OSError:
            return _start_process([self._plan.host_python, *arguments], self._plan)

    def finish(self, seconds: float = 0.0) -> None:
        """Wait so many seconds for the sender, then end it."""
        if self._process is None:
            return
        try:
            end_process_group(self._process, patience=seconds)
        except Exception as error:
            self._complain([f"{type(error).__name__}: {error}"])

    def _complain(self, complaints: list[str]) -> None:
        for words in complaints:
            if words not in self._complaints:
                log_line(f"notices: left for later: {words}")
        self._complaints = complaints


def send_notices(run: Run, plan: Plan, *, at_work: bool = True) -> None:
    """Write and send the notices due at a job's end, for some seconds. `at_work`: it is a job of the chain."""
    sender = NoticeSender(run, plan, at_work=at_work)
    sender.attend()
    sender.finish(NOTICES_END_SECONDS)


def _start_process(
    command: list[str], plan: Plan, output: int | IO[bytes] = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a process that leads a session, in which it finds relayrun and the site's variables, such as a proxy."""
    path = ":".join([*python_path(plan), *user_python_path(os.environ)])
    return subprocess.Popen(
        command,
        env={**os.environ, **plan.environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def end_process_group(process: subprocess.Popen[bytes], *, patience: float = 0.0) -> None:
    """Wait `patience` seconds for a process that leads a session, then end the session."""
    for number, seconds in ((0, patience), (signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
