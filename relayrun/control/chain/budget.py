"""The budget of a chain: node hours, GPU hours and a deadline, and what the attempts of the run have used of it.

A job ends with the budget at the latest: its ranks save and leave before, as before a time limit, and the chain stops.
Used time comes from the runs' own records. Evaluations in jobs of their own, and jobs in which no attempt began, are
not counted. The runs of a sweep or of stages share the budget: all of them use it, and one that runs beside others ends
when it is used up at the pace of all.
"""

from __future__ import annotations

import functools
import math
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from relayrun.control.job_log import logged
from relayrun.control.rundir.campaign import CampaignMember, own_campaign
from relayrun.control.rundir.checkpoint_records import started_attempts_backwards
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.time_limit import NO_TRAINING_SHARE, start_seconds
from relayrun.errors import RunDirError

SHARED_SETTINGS = ("max_node_hours", "max_gpu_hours", "deadline")
"""Settings of `chain` that hold for all runs of a campaign together."""
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
    left: float = math.inf
    """Node hours that the limits in hours leave; infinity without one."""
    campaign: str = ""
    """The directory of the campaign whose runs share the budget; empty: the run has it for itself."""

    def cap(self, end: float | None, why: str) -> tuple[float | None, str]:
        """Return the end of a job and what ends it, as `Scheduler.job_end` does: at the latest that of the budget."""
        if self.time < (math.inf if end is None else end):
            return self.time, f"the budget is over: {self.words}"
        return end, why


def budget_end(run: Run, plan: Plan, *, nodes: int, start: float, before: int | None = None) -> BudgetEnd:
    """Return when a job with so many nodes, which starts or started at `start`, has used the rest of the budget.
    `before`: number of its own attempt; None if it has none yet."""
    ends = [BudgetEnd(time=math.inf, setting="", words="")]
    limits, folder, others = _shared_limits(run, plan)
    counted = {name: most for name, most in limits.items() if most is not None and _per_node(name, plan)}
    used = used_node_seconds(run, plan, until=start, before=before) if counted else 0.0
    now = max(start, time.time()) if others else start
    beside = [entry for member in others if counted for entry in _use_of(member, now)]
    for name, most in counted.items():
        each = _per_node(name, plan)
        spent = (used + (now - start) * nodes) * each + sum(s * _per_node(name, other) for other, s, _ in beside)
        pace = nodes * each + sum(n * _per_node(name, other) for other, _, n in beside)
        left = most - spent / SECONDS_PER_HOUR
        words = f"{spent / SECONDS_PER_HOUR:,.2f} of chain.{name} {most:g} are used"
        words += f" by all runs of {Path(folder).name} together" if folder else ""
        end = now + left * SECONDS_PER_HOUR / pace
        ends.append(BudgetEnd(time=end, setting=name, words=words, left=left / each, campaign=folder))
    if limits["deadline"] is not None:
        deadline, words = datetime.fromisoformat(limits["deadline"]), f"chain.deadline is {limits['deadline']}"
        ends.append(BudgetEnd(time=deadline.timestamp(), setting="deadline", words=words, campaign=folder))
    return replace(min(ends, key=lambda end: end.time), left=min(end.left for end in ends))


def _per_node(setting: str, plan: Plan) -> int:
    """Return how much of a limit in hours a node uses in an hour; 0 for a deadline."""
    return {"max_node_hours": 1, "max_gpu_hours": plan.gpus_per_node}.get(setting, 0)


def _shared_limits(run: Run, plan: Plan) -> tuple[dict[str, Any], str, list[CampaignMember]]:
    """Return the limits that hold for a run, the campaign that shares them, and its other runs."""
    limits = {name: getattr(plan.chain, name) for name in SHARED_SETTINGS}
    found = own_campaign(run, owner=plan.owner)
    if found is None:
        return limits, "", []
    folder, whole, own = found
    return limits | whole.budget, str(folder), [member for member in whole.members if member != own]


_same_run = functools.lru_cache(maxsize=512)(Run)
"""A run as one object, whose attempts read each record once: a watch looks at the runs beside its own every minute."""


def _use_of(member: CampaignMember, now: float) -> Iterator[tuple[Plan, float, int]]:
    """Yield the plan of another run that has begun, the node seconds that it has used, and the nodes that it has."""
    run = _same_run(Path(member.run_dir))
    with logged(f"what {member.name} has used of the budget is not known", RunDirError, OSError, TypeError, ValueError):
        if run.newest_begun() is not None:
            plan = Plan.load(run)
            spans = list(_spans(run, plan, now, None, 0.0))
            yield plan, sum(seconds * nodes for seconds, nodes, _ in spans), sum(held for *_, held in spans)


def used_node_seconds(run: Run, plan: Plan, *, until: float, before: int | None = None, since: float = 0.0) -> float:
    """Return the seconds of all nodes that the run's attempts have had after `since`. An end that is not recorded
    counts as the next job's start or, for the newest attempt, as `until`. `before`: only attempts with a smaller number
    count."""
    return sum(seconds * nodes for seconds, nodes, _ in _spans(run, plan, until, before, since))


def _spans(run: Run, plan: Plan, until: float, before: int | None, since: float) -> Iterator[tuple[float, int, int]]:
    """Yield seconds and nodes of each attempt, newest first, and the nodes that it still has."""
    now = until
    for number, begin in started_attempts_backwards(run):
        if before is not None and number >= before:
            continue
        attempt = run.attempt(number)
        start = begin.start_time if begin.job_start_time is None else begin.job_start_time
        end, limit = attempt.read_end(), attempt.job_end_time(begin)
        over = min([until, *([] if end is None else [end.end_time]), *([] if limit is None else [limit])])
        if over < since:
            break
        nodes = int(begin.options.get("nodes", plan.nodes_of_job))
        yield max(0.0, over - max(start, since)), nodes, nodes if end is None and over == now else 0
        until = start if begin.previous_job_end is None else begin.previous_job_end


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
    words = ["resume", str(run.path)] if not end.campaign else ["sweep", "resume", end.campaign]
    command = shlex.join(["relayrun", *words, "--set", f"chain.{end.setting}="])
    rest = f"{max(0.0, left):.0f} s are left, and a job needs {needed:.0f} s"
    return f"the budget is over: {end.words}; {rest}; to go on: {command}..."
