"""Who is told of a run, what happens to it, and what was noted and sent."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from relayrun.control.notify import notices
from relayrun.control.notify.events import write_due_notices
from relayrun.control.notify.notices import NoticePolicy, NoticeTarget
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd
from relayrun.control.rundir.run import Run
from relayrun.watch import send_notices
from tests.history import began


def tell(run: Run, *urls: str, events: tuple[str, ...] = notices.NOTICE_EVENTS, **changes: Any) -> NoticePolicy:
    """Who is told of a run from now on."""
    values: dict[str, Any] = {
        "run": "tests/history",
        "cluster": "local",
        "since": 5.0,
        "targets": [vars(NoticeTarget(name=f"t{n}", url=url, events=list(events))) for n, url in enumerate(urls)],
        "failed_attempts": 2,
        "no_progress": 1e9,
        "disk_checkpoints": 2,
        "program": [sys.executable, "-m", "relayrun.watch.send_notices"],
    }
    policy = NoticePolicy(**(values | changes))
    notices.write_notice_policy(run, policy)
    return policy


def noted(run: Run, *, now: float | None = None) -> dict[str, str]:
    """Notices that follow from the records now: reason by id."""
    policy = NoticePolicy.read(run.notice_policy)
    assert policy is not None
    assert write_due_notices(run, Plan.load(run), policy, now=now or time.time(), at_work=True) == []
    return {entry.id: entry.reason for entry, _ in notices.pending_notices(run)}


def end(run: Run, number: int, cause: str, *, progress: bool = False, action: str = "retry", when: float = 1e9) -> None:
    if not run.attempt(number).begin.exists():
        began(run, number, base=300)
    AttemptEnd(
        attempt=number,
        cause=cause,
        reason=f"{cause}, it says",
        exit_code=1,
        durable_iteration=300,
        progress=progress,
        end_time=when,
        action=action,
        chain_end="failed" if action == "stop" else None,
    ).write(run.attempt(number).end)


def sent(run: Run, **environment: str) -> list[str]:
    """Send what is due; what could not be sent."""
    return send_notices.send_due_notices(run, job=False, environment=environment)


def states(run: Run) -> dict[str, list[str]]:
    """By notice, what became of it at each target."""
    found = {}
    for path in sorted([*run.notices.glob("*.told"), *run.notices.glob("*.tried")]):
        targets = json.loads(path.read_text())["targets"]
        found[path.name] = [targets[name]["state"] for name in sorted(targets)]
    return found
