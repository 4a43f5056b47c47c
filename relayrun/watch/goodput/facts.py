"""The jobs and attempts of a run: records of the run directory, completed with the scheduler's times."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relayrun.control import decisions
from relayrun.control.chain.excluded_nodes import read_node_failures
from relayrun.control.rundir import restarts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.evaluations import EvaluationPolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptOutcome, AttemptStart, CheckpointCommit, Hang, StartTimes
from relayrun.control.rundir.restarts import FailedRestart, iteration_resets
from relayrun.control.rundir.run import Run, is_stopped
from relayrun.control.scheduler.base import Allocation
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import RunDirError
from relayrun.files import read_json_lines

CLOCK_TOLERANCE_SECONDS = 5.0
"""Largest difference between the clocks of nodes and scheduler when an attempt is matched to its allocation."""


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """Records of an attempt. Times are seconds since 1970."""

    attempt: Attempt
    begin: AttemptStart
    started: StartTimes | None
    end: AttemptEnd | None
    outcome: AttemptOutcome | None
    hang: Hang | None
    failure_time: float | None
    """First recorded failure of a rank. Also None if rank 0 exited on purpose or the ranks hung."""
    last_sign: float
    """The newest sign of life outside the metrics; the begin if rank 0 exited on purpose."""
    commits: Sequence[CheckpointCommit]
    limit: float
    """The last iteration that counts; later ones were computed again or lost."""
    rollbacks: Sequence[int]
    """Checkpoint iterations of the rollbacks inside the attempt, oldest first."""
    blamed: Sequence[str]
    """Nodes to which its end is attributed."""
    failed_restarts: Sequence[FailedRestart] = ()
    """Failures of its ranks, oldest first."""
    hangs: Mapping[int, Hang] = field(default_factory=dict)
    """Records of hung ranks, by restart number."""

    @property
    def first_start(self) -> StartTimes | None:
        """Start times of the first ranks; None if they failed to start, and `started` belongs to a restart."""
        failed, started = self.failed_restarts, self.started
        return None if started is not None and failed and failed[0].time < started.loaded else started

    @property
    def end_seen(self) -> bool:
        """True if its own job recorded its end."""
        return self.end is not None and self.end.exit_code != decisions.UNKNOWN_EXIT_CODE


@dataclass(frozen=True, kw_only=True)
class NodeAllocation(Allocation):
    """One allocation of a job of the run, and the attempt in it."""

    end: float
    ended: bool
    """False: it still has its nodes, and `end` is its newest known time."""
    end_known: bool
    """False: the time of its end was not recorded."""
    facts: AttemptFacts | None
    """None if no attempt began in it."""
    spare_nodes: int = 0
    """Number of nodes that did not train at first."""

    @property
    def cause(self) -> str:
        """Cause of the attempt's end, in one word."""
        if self.facts is None:
            return "no attempt" if self.ended else "running"
        if self.facts.end is not None:
            return self.facts.end.cause
        if not self.ended:
            return "running"
        return "cancelled" if self.state == "CANCELLED" else "unknown"

    @property
    def reason(self) -> str:
        """Reason of the attempt's end, or why no attempt began; empty if unknown."""
        if self.facts is not None and self.facts.end is not None:
            return self.facts.end.reason
        if not self.ended:
            return "" if self.facts else "the job has its nodes, and no attempt has begun in it yet"
        if self.facts is None:
            return f"the job was {self.state or 'gone'} before an attempt began in it, as {self.source} says"
        return f"the job was {self.state}, as {self.source} says; it recorded no end" if self.state else ""


@dataclass(frozen=True, kw_only=True)
class RunAllocations:
    """Allocations of a run, oldest first."""

    run: Run
    plan: Plan
    allocations: Sequence[NodeAllocation]
    evaluated_outside: bool
    """True if evaluations have jobs of their own, whose nodes are not in these accounts."""


def read_run_facts(
    run: Run, plan: Plan | None = None, *, now: float | None = None, ask: bool = True, first: int = 0
) -> RunAllocations:
    """Read the records of a run from attempt `first` on and, if `ask`, query its scheduler. `plan`: the run's plan, if
    already read. Raises RunDirError if no attempt has begun."""
    plan = plan or Plan.load(run)
    found = _begun_attempts(run, first)
    if not found:
        hint = f"relayrun status {run.path} says what it waits for"
        raise RunDirError("no attempt of this run has begun", where=run.path, hint=hint)
    job_ids = list(dict.fromkeys(each.begin.job_id for each in found))
    known: Sequence[Allocation] = ()
    if ask:
        history = scheduler_for_plan(plan, run).history
        known = history.allocations(plan, since=_first_submit(run, found) - 3600, job_ids=job_ids)
    return RunAllocations(
        run=run,
        plan=plan,
        allocations=join_allocations(
            found, known, plan=plan, now=time.time() if now is None else now, stopped=is_stopped(run)
        ),
        evaluated_outside=EvaluationPolicy.read(run.evaluation_policy) is not None,
    )


def _first_submit(run: Run, found: Sequence[AttemptFacts]) -> float:
    """Time of the first submit: jobs may have had nodes before the first attempt. Copied files are newer than that."""
    times = [each.begin.job_start_time or each.begin.start_time for each in found]
    with contextlib.suppress(OSError):
        times += [run.config_revision(number).stat().st_mtime for number in run.revisions()[:1]]
    return min(times)


def join_allocations(
    found: Sequence[AttemptFacts], known: Sequence[Allocation], *, plan: Plan, now: float, stopped: bool = False
) -> list[NodeAllocation]:
    """Join attempts with the scheduler's allocations; the chain's own records replace forgotten ones. Allocations do
    not overlap: one job of a chain runs at a time. `stopped`: the chain has ended."""
    result = []
    taken: set[int] = set()
    for number, each in enumerate(found):
        following = found[number + 1].begin if number + 1 < len(found) else None
        at = _allocation_of(each, known, taken)
        if at is not None:
            taken.add(at)
        entry = None if at is None else known[at]
        result.append(_node_allocation(each, entry, following, plan=plan, now=now, stopped=stopped))
    result += [
        NodeAllocation(
            **(vars(entry) | {"end": now if entry.end is None else entry.end}),
            ended=entry.end is not None,
            end_known=True,
            facts=None,
        )
        for at, entry in enumerate(known)
        if at not in taken
    ]
    return sorted(result, key=lambda allocation: allocation.start)


def _node_allocation(
    each: AttemptFacts,
    entry: Allocation | None,
    following: AttemptStart | None,
    *,
    plan: Plan,
    now: float,
    stopped: bool,
) -> NodeAllocation:
    begin = each.begin
    start = begin.job_start_time if entry is None else entry.start
    end = None if entry is None else entry.end
    if end is None and following is not None and following.job_id != begin.job_id:
        end = following.previous_job_end
    ended, end_known = end is not None or following is not None, end is not None
    if end is None and following is not None:  # ended before the next attempt
        after = [following.job_start_time, following.script_time, following.start_time]
        end = next(value for value in after if value is not None)
        if each.end is not None and each.end_seen:  # the batch script ends right after it
            end, end_known = min(end, each.end.end_time), True
    if end is None and each.end is not None:
        end, ended, end_known = each.end.end_time, True, each.end_seen
    if end is None and entry is None and stopped:  # nobody knows its end
        end, ended = each.last_sign, True
    if end is None:
        limit = float("inf") if begin.job_end_time is None else begin.job_end_time
        end = min(now, limit)
    asked = int(begin.options.get("nodes", plan.nodes_of_job))
    nodes = asked if entry is None else entry.nodes
    if plan.outlives_nodes:  # without accounting Slurm reports only the nodes that are left
        nodes = max(nodes, asked)
    return NodeAllocation(
        job_id=begin.job_id,
        nodes=nodes,
        submit=begin.job_submit_time if entry is None or entry.submit is None else entry.submit,
        eligible=begin.job_eligible_time if entry is None or entry.eligible is None else entry.eligible,
        start=begin.start_time if start is None else start,
        end=end,
        ended=ended,
        end_known=end_known,
        source="the chain" if entry is None else entry.source,
        facts=each,
        state="" if entry is None else entry.state,
        spare_nodes=max(0, nodes - plan.training_nodes(nodes)),
        resized=() if entry is None else entry.resized,
    )


def _allocation_of(each: AttemptFacts, known: Sequence[Allocation], taken: set[int]) -> int | None:
    """Index of the allocation in which an attempt began; a requeued job has several."""
    began = each.begin.start_time
    own = [
        at
        for at, entry in enumerate(known)
        if entry.job_id == each.begin.job_id
        and at not in taken
        and (entry.end is None or began <= entry.end + CLOCK_TOLERANCE_SECONDS)
    ]
    before = [at for at in own if known[at].start <= began]
    if before:
        return before[-1]
    return next((at for at in own if known[at].start - CLOCK_TOLERANCE_SECONDS <= began), None)


def _begun_attempts(run: Run, first: int) -> list[AttemptFacts]:
    strikes = read_node_failures(run)
    attempts = [run.attempt(number) for number in run.attempt_numbers() if number >= first]
    begun = [(attempt, begin) for attempt in attempts if (begin := attempt.read_begin()) is not None]
    limit = float("inf")
    found: list[AttemptFacts] = []
    for attempt, begin in reversed(begun):
        end = attempt.read_end()
        if not found and end is not None:  # no attempt continued from unsaved iterations
            limit = end.durable_iteration
        blamed = [strike.node for strike in strikes if strike.attempt == attempt.number]
        found.append(_attempt_facts(attempt, begin, end, limit=limit, blamed=blamed))
        limit = min(limit, begin.base_iteration)
    return found[::-1]


def _attempt_facts(
    attempt: Attempt, begin: AttemptStart, end: AttemptEnd | None, *, limit: float, blamed: list[str]
) -> AttemptFacts:
    there = {*os.listdir(attempt.folder)}  # an old attempt has few files, and none is opened in vain
    commits = attempt.read_commits() if "commits.jsonl" in there else []
    outcome = AttemptOutcome.read(attempt.outcome) if "outcome.json" in there else None
    hang = Hang.read(attempt.hang) if "hang.json" in there else None
    failure_time, signs = None, [begin.start_time, *(commit.time for commit in commits)]
    if there & {"failures", "heartbeat"} and outcome is None and hang is None:  # there may be a file per rank
        from relayrun.control.chain import failure_reason  # every trainer: slow to import

        failure_time = min((failure.time for failure in failure_reason.read_failures(attempt)), default=None)
        signs += [beat.time for beat in attempt.read_heartbeats()]
    failed = restarts.read_failed_restarts(attempt) if "restarts.jsonl" in there else []
    hangs = {
        each.restart: Hang.read(restarts.failed_restart_folder(attempt.failures, each.restart) / attempt.hang.name)
        for each in failed
    }
    rolled = read_json_lines(attempt.rollbacks) if "rollbacks.jsonl" in there else []
    bases = [int(entry["base_iteration"]) for entry in rolled]
    return AttemptFacts(
        attempt=attempt,
        begin=begin,
        started=StartTimes.read(attempt.started) if "started.json" in there else None,
        end=end,
        outcome=outcome,
        hang=hang,
        failure_time=failure_time,
        last_sign=begin.start_time if outcome is not None or hang is not None else max(signs),
        commits=commits,
        limit=limit,
        rollbacks=iteration_resets(attempt.metrics, bases) if "metrics.jsonl" in there else bases,
        blamed=blamed,
        failed_restarts=failed,
        hangs={number: found for number, found in hangs.items() if found is not None},
    )
