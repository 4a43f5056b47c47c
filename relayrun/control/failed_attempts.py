"""How many attempts of a run failed in a row."""

from __future__ import annotations

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run


def count_failed_attempts(run: Run, plan: Plan, *, last: int | None = None) -> int:
    """Attempts in a row, up to `last`, that ended without durable progress since the last explicit submit.

    `last`: the number of an attempt; None: the newest. One that has no end yet counts too.
    """
    count = 0
    for number in reversed(run.attempt_numbers()):
        if last is not None and number > last:
            continue
        if number <= plan.submitted_after_attempt:
            break
        attempt = run.attempt(number)
        if attempt.read_begin() is None:
            continue
        record = attempt.read_end()
        if record is not None and record.progress:
            break
        count += 1
    return count
