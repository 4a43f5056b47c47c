"""Unsent notices of a run: commands that change a run of this user send them, and `relayrun status` counts them.

Every command imports this module, so it does not import the code that sends.
"""

from __future__ import annotations

import os
import sys
import time

from relayrun import places
from relayrun.control.notify import notices
from relayrun.control.notify.notices import NoticePolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError


def send_in_background(run: Run) -> None:
    """Start a process that sends the run's due notices, if this user owns the run. Raises nothing."""
    try:
        policy = notices.read_trusted_notice_policy(run)
        if policy is None or (plan := Plan.load_trusted(run)).owner != os.geteuid():
            return
        from relayrun.control.notify.events import write_due_notices  # slow import

        write_due_notices(run, plan, policy, now=time.time(), at_work=False)
        start_sender(run, policy)
    except Exception:  # the command had another purpose; status shows unsent notices
        return


def start_sender(run: Run, policy: NoticePolicy, *, again_and_again: bool = False) -> None:
    """Start a process that sends the run's due notices, if `notices.is_time_to_send`."""
    if notices.is_time_to_send(run, policy, now=time.time(), again_and_again=again_and_again):
        _start(run, *["--job"] * again_and_again)


def _start(run: Run, *options: str) -> None:
    """Start a detached process that outlives this one."""
    command = [sys.executable, "-m", "relayrun.watch.send_notices", str(run.path), *options]
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    own = os.environ | {"PYTHONPATH": str(places.CODE_ROOT), "PYTHONSAFEPATH": "1"}
    os.posix_spawn(sys.executable, command, own, file_actions=nowhere, setsid=True)


def count_unsent(run: Run, *, now: float) -> tuple[int, str]:
    """Return the number of overdue notices and the reasons why they were not sent."""
    try:
        policy = NoticePolicy.read(run.notice_policy)
        if policy is None:
            return 0, ""
        waiting = notices.pending_notices(run)
        sent = notices.last_sent_times(run, waiting, now=now)
        messages = notices.due_messages(policy.every_target(), waiting, sent, now=now)
    except (RelayrunError, OSError, TypeError, ValueError) as error:  # must not hide the run's status
        return 0, f"unknown: {getattr(error, 'message', error)} ({run.notice_policy})"
    late = {name for message in messages for name in message.settles}
    book = {notice.id: delivery for notice, delivery in waiting}
    told = [(message.target.name, book[message.notice.id].reason(message.target.name)) for message in messages]
    reasons = {f"{name}: {reason}" for name, reason in told if reason}
    return len(late), "; ".join(sorted(reasons)) or ("nobody has tried yet" if late else "")
