"""Notices that a job could not send: a command of the run's owner has them sent, and status says what is left.

Every command passes here, so nothing is imported that sends.
"""

from __future__ import annotations

import os
import sys
import time

from relayrun import places
from relayrun.control.notify import notices
from relayrun.control.notify.notices import NoticePolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, is_owned_by_this_user
from relayrun.errors import RelayrunError


def send_in_background(run: Run) -> None:
    """Have a process of its own send what is due of a run, where this user owns it. No error comes out of it."""
    try:
        policy = notices.read_trusted_notice_policy(run)
        if (
            policy is None
            or not is_owned_by_this_user(run)
            or (plan := Plan.load(run)).owner not in (None, os.geteuid())
        ):
            return
        from relayrun.control.notify.events import write_due_notices  # not paid for by a look at runs that tell nobody

        write_due_notices(run, plan, policy, now=time.time(), at_work=False)
        start_sender(run, policy)
    except Exception:  # whatever it is, the command was about something else, and status says what is not sent
        return


def start_sender(run: Run, policy: NoticePolicy, *, again_and_again: bool = False) -> None:
    """Start a process that sends what is due of a run, where it is time to; see `notices.is_time_to_send`."""
    if notices.is_time_to_send(run, policy, now=time.time(), again_and_again=again_and_again):
        _start(run, *(["--job"] if again_and_again else []))


def _start(run: Run, *options: str) -> None:
    """Start the process that sends; it outlives this one, which does not wait for it."""
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "relayrun.watch.send_notices", str(run.path), *options],
        os.environ | {"PYTHONPATH": str(places.CODE_ROOT), "PYTHONSAFEPATH": "1"},
        file_actions=nowhere,
        setsid=True,
    )


def count_unsent(run: Run, *, now: float) -> tuple[int, str]:
    """How many notices somebody should have been told of by now, and why that was not so, in words."""
    try:
        policy = notices.read_notice_policy(run)
        if policy is None:
            return 0, ""
        waiting = notices.pending_notices(run)
        messages = notices.due_messages(
            policy.every_target(), waiting, notices.last_sent_times(run, waiting, now=now), now=now
        )
    except (RelayrunError, OSError, TypeError, ValueError) as error:  # it must not hide where the run stands
        return 0, f"unknown: {getattr(error, 'message', error)} ({notices.notice_policy_path(run)})"
    late = {name for message in messages for name in message.settles}
    book = {notice.id: delivery for notice, delivery in waiting}
    reasons = {
        f"{message.target.name}: {reason}"
        for message in messages
        if (reason := book[message.notice.id].reason(message.target.name))
    }
    return len(late), "; ".join(sorted(reasons)) or ("nobody has tried yet" if late else "")
