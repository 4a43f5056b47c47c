"""The budget of a chain: node hours, GPU hours and a deadline, and what the attempts of the run have used of it.

A job ends with the budget at the latest: its ranks save and leave before, as before a time limit, and the chain stops.
Used time comes from the run's own records. Evaluations in jobs of their own, and jobs in which no attempt began, are
not counted.
"""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import dataclass
from datetime import datetime

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.time_limit import NO_TRAINING_SHARE, start_seconds

SECONDS_PER_HOUR = 3600.0
USEFUL_SECONDS = 60.0
"""Seconds of training for which a job is worth its start; less for a short time limit."""


@dataclass(frozen=True, kw_only=True)
class BudgetEnd:
    """The end of the budget for one job."""

    time: float
    """Seconds since 1970; infinity without a budget."""
    setting: str
    """The setting of `chain` that ends it; empty without a budget."""
    words: str
    """The setting with its value and, for hours, the part that is used."""

    def cap(self, end: float | None, why: str) -> tuple[float | None, str]:
        """Return the end of a job and what ends it, as `Scheduler.job_end` does: at the latest that of the budget."""
        if self.time < (math.inf if end is None else end):
            return self.time, f"the budget is over: {self.words}"
        return end, why


def budget_end(run: Run, plan: Plan, *, nodes: int, start: float, before: int | None = None) -> BudgetEnd:
    """Return when a job with so many nodes, which starts or started at `start`, has used the rest of the budget.
    `before`: number of its own attempt; None if it has none yet."""
    ends = [BudgetEnd(time=math.inf, setting="", words="")]
    per_node = {"max_node_hours": 1, "max_gpu_hours": plan.gpus_per_node}
    limits = {name: most for name in per_node if (most := getattr(plan.chain, name)) is not None and per_node[name]}
    used = used_node_seconds(run, plan, until=start, before=before) if limits else 0.0
    for name, most in limits.items():
        left = most * SECONDS_PER_HOUR / per_node[name] - used
        words = f"{used * per_node[name] / SECONDS_PER_HOUR:,.2f} of chain.{name} {most:g} are used"
        ends.append(BudgetEnd(time=start + left / nodes, setting=name, words=words))
    if plan.chain.deadline is not None:
        deadline, words = datetime.fromisoformat(plan.chain.deadline), f"chain.deadline is {plan.chain.deadline}"
        ends.append(BudgetEnd(time=deadline.timestamp(), setting="deadline", words=words))
    return min(ends, key=lambda end: end.time)


def used_node_seconds(run: Run, plan: Plan, *, until: float, before: int | None = None) -> float:
    """Return the seconds of all nodes that the run's attempts have had. An end that is not recorded counts as the next
    job's start or, for the newest attempt, as `until`. `before`: only attempts with a smaller number count."""
    used = 0.0
    for number in reversed(run.attempt_numbers()):
        attempt = run.attempt(number)
        begin = attempt.read_begin()
        if begin is None or (before is not None and number >= before):
            continue
        start = begin.start_time if begin.job_start_time is None else begin.job_start_time
        end, limit = attempt.read_end(), attempt.job_end_time(begin)
        over = [until, *([] if end is None else [end.end_time]), *([] if limit is None else [limit])]
        used += max(0.0, min(over) - start) * int(begin.options.get("nodes", plan.nodes_of_job))
        until = start if begin.previous_job_end is None else begin.previous_job_end
    return used


def why_over(run: Run, plan: Plan, end: BudgetEnd, grace_period: float) -> str:
    """Return why no further job may begin, with a command; empty if enough is left before the `end` of the budget for a
    start, the grace period and some training."""
    if not end.setting:
        return ""
    needed = max(start_seconds(run), default=0.0) + grace_period
    needed += min(USEFUL_SECONDS, NO_TRAINING_SHARE * plan.time_limit)
    left = end.time - time.time()
    if left > needed:
        return ""
    command = shlex.join(["relayrun", "resume", str(run.path), "--set", f"chain.{end.setting}="])
    rest = f"{max(0.0, left):.0f} s are left, and a job needs {needed:.0f} s"
    return f"the budget is over: {end.words}; {rest}; to go on: {command}..."
