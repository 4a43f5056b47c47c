"""What is known of a run's jobs and attempts: the run directory's records, closed against the scheduler's times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relayrun.control import decisions
from relayrun.control.chain import failure_reason
from relayrun.control.chain.excluded_nodes import read_node_failures
from relayrun.control.rundir import restarts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.evaluations import EvaluationPolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptOutcome, AttemptStart, CheckpointCommit, Hang, StartTimes
from relayrun.control.rundir.restarts import FailedRestart, iteration_resets
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.job_history import Allocation, allocations
from relayrun.errors import RunDirError
from relayrun.files import read_lines

CLOCK_TOLERANCE_SECONDS = 5.0
"""Seconds by which clocks of nodes and of the scheduler may differ: an attempt lies in its allocation all the same."""


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """What an attempt's records say. Times are seconds since 1970."""

    attempt: Attempt
    begin: AttemptStart
    started: StartTimes | None
    end: AttemptEnd | None
    outcome: AttemptOutcome | None
    hang: Hang | None
    failure_time: float | None
    """When the first rank that could say so failed. None here, too, where rank 0 left on purpose, or nothing moved."""
    last_sign: float
    """The newest sign of life that is no line of the metrics; when it began, where rank 0 left on purpose."""
    commits: Sequence[CheckpointCommit]
    limit: float
    """The last iteration that counts: what lies beyond it was computed again, or lost."""
    went_back: Sequence[int]
    """Iterations of the checkpoints that training went back to inside the attempt, oldest first."""
    blamed: Sequence[str]
    """Nodes that got a strike for its end."""
    rounds: Sequence[FailedRestart] = ()
    """Rounds of its ranks that failed, oldest first."""
    hangs: Mapping[int, Hang] = field(default_factory=dict)
    """What was written down of those that stood still, by round."""

    @property
    def first_start(self) -> StartTimes | None:
        """How far the start of its first round was; None where that failed, and `started` is a later one's."""
        failed = self.started is not None and bool(self.rounds) and self.rounds[0].time < self.started.loaded
        return None if failed else self.started

    @property
    def end_seen(self) -> bool:
        """Whether its own job wrote down how it ended."""
        return self.end is not None and self.end.exit_code != decisions.UNKNOWN_EXIT_CODE


@dataclass(frozen=True, kw_only=True)
class NodeAllocation:
    """One time that a job of the run had nodes, and the attempt that began in it. Times are seconds since 1970."""

    job_id: str
    nodes: int
    submit: float | None
    eligible: float | None
    start: float
    end: float
    ended: bool
    """False: it has its nodes still, and `end` is the newest that is known of it."""
    end_known: bool
    """False: nobody who saw the end has said when it was."""
    source: str
    facts: AttemptFacts | None
    """None: no attempt began in it."""
    state: str = ""
    """The scheduler's word for the job, where no attempt began in it."""
    spare_nodes: int = 0
    """How many of its nodes did not train at first."""
    resized: Sequence[tuple[float, int]] = ()
    """When Slurm took nodes from the job, and how many it had from then on, oldest first."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a run: its stays on nodes, oldest first."""

    run: Run
    plan: Plan
    stays: Sequence[NodeAllocation]
    evaluated_outside: bool
    """Whether evaluations have jobs of their own, whose nodes are not in these accounts."""


def read_run_facts(run: Run, *, now: float | None = None) -> RunFacts:
    """Read the records of a run and ask its scheduler. Raises RunDirError where no attempt has begun."""
    plan = Plan.load(run)
    found = _begun_attempts(run)
    if not found:
        hint = f"relayrun status {run.path} says what it waits for"
        raise RunDirError("no attempt of this run has begun", where=run.path, hint=hint)
    job_ids = list(dict.fromkeys(each.begin.job_id for each in found))
    known = allocations(plan, run, since=_first_submit(run, found) - 3600, job_ids=job_ids)
    return RunFacts(
        run=run,
        plan=plan,
        stays=join_allocations(found, known, plan=plan, now=time.time() if now is None else now),
        evaluated_outside=EvaluationPolicy.read(run.evaluation_policy) is not None,
    )


def _first_submit(run: Run, found: Sequence[AttemptFacts]) -> float:
    """When the run was first submitted; jobs may have had nodes since, long before the first attempt began.

    A copied directory has newer files than its first attempt.
    """
    times = [each.begin.job_start_time or each.begin.start_time for each in found]
    with contextlib.suppress(OSError):
        times += [run.config_revision(number).stat().st_mtime for number in run.revisions()[:1]]
    return min(times)


def join_allocations(
    found: Sequence[AttemptFacts], known: Sequence[Allocation], *, plan: Plan, now: float
) -> list[NodeAllocation]:
    """Join attempts with the scheduler's allocations; where it has forgotten one, say what the chain knows itself.

    They do not overlap: one job of a chain runs at a time.
    """
    result = []
    taken: set[int] = set()
    for number, each in enumerate(found):
        following = found[number + 1].begin if number + 1 < len(found) else None
        at = _allocation_of(each, known, taken)
        if at is not None:
            taken.add(at)
        result.append(_node_allocation(each, None if at is None else known[at], following, plan=plan, now=now))
    result += [
        NodeAllocation(
            job_id=entry.job_id,
            nodes=entry.nodes,
            submit=entry.submit,
            eligible=entry.eligible,
            start=entry.start,
            end=now if entry.end is None else entry.end,
            ended=entry.end is not None,
            end_known=True,
            source=entry.source,
            facts=None,
            state=entry.state,
            resized=entry.resized,
        )
        for at, entry in enumerate(known)
        if at not in taken
    ]
    return sorted(result, key=lambda stay: stay.start)


def _node_allocation(
    each: AttemptFacts, entry: Allocation | None, following: AttemptStart | None, *, plan: Plan, now: float
) -> NodeAllocation:
    begin = each.begin
    start = begin.job_start_time if entry is None else entry.start
    end = None if entry is None else entry.end
    if end is None and following is not None and following.job_id != begin.job_id:
        end = following.previous_job_end
    ended, end_known = end is not None or following is not None, end is not None
    if end is None and following is not None:  # it had gone by then
        after = [following.job_start_time, following.script_time, following.start_time]
        end = next(value for value in after if value is not None)
        if each.end is not None and each.end_seen:  # behind that the batch script has nothing left to do
            end, end_known = min(end, each.end.end_time), True
    if end is None and each.end is not None:
        end, ended, end_known = each.end.end_time, True, each.end_seen
    if end is None:
        limit = float("inf") if begin.job_end_time is None else begin.job_end_time
        end = min(now, limit)
    asked = int(begin.options.get("nodes", plan.nodes_of_job))
    nodes = asked if entry is None else entry.nodes
    if plan.outlives_nodes:  # without accounting Slurm tells of the nodes that such a job has left
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
        spare_nodes=max(0, nodes - plan.training_nodes(nodes)),
        resized=() if entry is None else entry.resized,
    )


def _allocation_of(each: AttemptFacts, known: Sequence[Allocation], taken: set[int]) -> int | None:
    """The place of the allocation in which an attempt began; a job that was queued again has several."""
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


def _begun_attempts(run: Run) -> list[AttemptFacts]:
    """The attempts that have begun, oldest first."""
    strikes = read_node_failures(run)
    attempts = [run.attempt(number) for number in run.attempt_numbers()]
    begun = [(attempt, begin) for attempt in attempts if (begin := attempt.read_begin()) is not None]
    limit = float("inf")
    found: list[AttemptFacts] = []
    for attempt, begin in reversed(begun):
        end = attempt.read_end()
        if not found and end is not None:  # nobody went on from what it had not saved
            limit = end.durable_iteration
        blamed = [strike.node for strike in strikes if strike.attempt == attempt.number]
        found.append(_attempt_facts(attempt, begin, end, limit=limit, blamed=blamed))
        limit = min(limit, begin.base_iteration)
    return found[::-1]


def _attempt_facts(
    attempt: Attempt, begin: AttemptStart, end: AttemptEnd | None, *, limit: float, blamed: list[str]
) -> AttemptFacts:
    commits = attempt.read_commits()
    outcome, hang = AttemptOutcome.read(attempt.outcome), Hang.read(attempt.hang)
    failure_time, signs = None, [begin.start_time]
    if outcome is None and hang is None:  # of the others nobody asks, and there may be a file for each node and rank
        failure_time = min((failure.time for failure in failure_reason.read_failures(attempt)), default=None)
        signs += [beat.time for beat in attempt.read_heartbeats()]
        signs += [commit.time for commit in commits]
    failed = restarts.read_failed_restarts(attempt)
    hangs = {
        each.round: Hang.read(restarts.failed_restart_folder(attempt.failures, each.round) / attempt.hang.name)
        for each in failed
    }
    return AttemptFacts(
        attempt=attempt,
        begin=begin,
        started=StartTimes.read(attempt.started),
        end=end,
        outcome=outcome,
        hang=hang,
        failure_time=failure_time,
        last_sign=max(signs),
        commits=commits,
        limit=limit,
        went_back=iteration_resets(
            attempt.metrics, [int(entry["base_iteration"]) for entry in read_lines(attempt.rollbacks)]
        ),
        blamed=blamed,
        rounds=failed,
        hangs={number: found for number, found in hangs.items() if found is not None},
    )
