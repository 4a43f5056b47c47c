"""Whether another user has taken a run over from the one whose job begins.

A singleton holds among the jobs of one user, so a job of the former owner may begin while the new one submits. The job
writes begin.json and then reads the plan; `relayrun.submit.check.owner.claim_run` writes the plan and then looks for begin.json.
At least one of both sees the other. Then the attempt goes on: the submit puts the plan back, and the job waits for it.
"""

from __future__ import annotations

import time

from relayrun.control import signs
from relayrun.control.log import log_line
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import user_name

TAKE_OVER_SECONDS = 10.0
"""How long the submit has to put the plan back."""


def is_taken_over(plan: Plan, job_id: str) -> bool:
    """Whether the plan is another user's; then the log of the job says whose."""
    if plan.owner is None or not signs.is_owned_by_another_user(plan):
        return False
    log_line(f"this run has been taken over by {user_name(plan.owner)}; job {job_id} leaves it alone")
    return True


def is_taken_over_meanwhile(run: Run, job_id: str) -> bool:
    """Whether another user has taken the run over while this job began, and stays its owner."""
    plan = Plan.load(run)
    if signs.is_owned_by_another_user(plan):
        log_line("another user is about to take this run over; a submit that finds this attempt puts the plan back")
    deadline = time.monotonic() + TAKE_OVER_SECONDS
    while signs.is_owned_by_another_user(plan) and time.monotonic() < deadline:
        time.sleep(0.5)
        plan = Plan.load(run)
    return is_taken_over(plan, job_id)
