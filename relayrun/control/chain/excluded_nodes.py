"""Nodes that the chain excludes, and the number of nodes of the next job; `scheduler.error_lines` says who failed.

After two failures within a day a node is excluded, up to 5% of the nodes or one node; a node that fails its health
check is excluded at once. If too few other nodes are up, an excluded node is used again, and the next job may start
with fewer nodes if it has spare ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from relayrun.control.job_log import log_line, logged
from relayrun.control.rundir import restarts
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import MinimumNodes, Scheduler, UsableNodes
from relayrun.errors import SchedulerError
from relayrun.files import read_json_lines

FAILURES_TO_EXCLUDE = 2
FAILURE_EXPIRE_SECONDS = 24 * 3600.0
EXCLUDED_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class NodeFailureRecord(Record):
    """A line of nodes.jsonl."""

    node: str
    attempt: int
    reason: str
    time: float
    sick: bool = False
    """The node failed its health check, so that ranks cannot train there: it counts as FAILURES_TO_EXCLUDE failures."""


def record_node_failures(run: Run, attempt: int, blame: dict[str, str], *, now: float, sick: bool = False) -> None:
    """Record failures of nodes, once per attempt and node: an end that was killed is written again."""
    known = {entry.node for entry in read_node_failures(run) if entry.attempt == attempt}
    for node, reason in blame.items():
        if node not in known:
            entry = NodeFailureRecord(node=node, attempt=attempt, reason=reason[:200], time=now, sick=sick)
            entry.append(run.node_failures)


def worst_nodes(failures: Iterable[NodeFailureRecord], *, nodes: int, now: float | None = None) -> list[str]:
    """Return the nodes that the next jobs exclude, worst first; `nodes` is the number of nodes of a job."""
    now = time.time() if now is None else now
    counts: dict[str, list[float]] = {}
    for entry in failures:
        if now - entry.time < FAILURE_EXPIRE_SECONDS:
            counts.setdefault(entry.node, []).extend([entry.time] * (FAILURES_TO_EXCLUDE if entry.sick else 1))
    bad = [node for node, times in counts.items() if len(times) >= FAILURES_TO_EXCLUDE]
    bad.sort(key=lambda node: (-len(counts[node]), -max(counts[node]), node))
    return bad[: max(1, int(nodes * EXCLUDED_SHARE))]


def read_node_failures(run: Run) -> list[NodeFailureRecord]:
    return [NodeFailureRecord.of(entry) for entry in read_json_lines(run.node_failures)]


def next_job_options(
    run: Run, plan: Plan, scheduler: Scheduler, options: Mapping[str, str], *, tried: Sequence[str] = ()
) -> dict[str, str]:
    """Return a job's options with the excluded nodes and the number of nodes of the next job. Raises SchedulerError.
    `tried`: nodes on which `begin` has just failed."""
    failures = read_node_failures(run)
    found = _without_reduced_nodes(plan, options)
    if scheduler.nodes is None or not (failures or tried or plan.outlives_nodes):
        return found
    by_hand = _expanded(scheduler.nodes, options.get("exclude"))
    by_hand -= {each.node for each in failures}  # excluded by us, and failures expire
    by_hand |= _expanded(scheduler.nodes, plan.sbatch_options.get("exclude"))
    bad: list[str] = []
    if by_hand or failures or tried:
        known = scheduler.nodes.all_nodes()  # sbatch refuses unknown nodes
        by_hand &= known
        bad = [
            node
            for node in dict.fromkeys([*tried, *worst_nodes(failures, nodes=plan.nodes)])
            if node in known - by_hand
        ]
        asked, found = found, _with_exclude(by_hand | set(bad), found)
    with logged("which nodes are up is not known", SchedulerError):  # the job must be queued all the same
        if bad:
            replaceable = _replaceable_nodes(run, plan, scheduler.nodes, asked, given=by_hand, bad=bad)
            found = _with_exclude(by_hand | replaceable, asked)
        if (count := _startable_node_count(run, plan, scheduler.nodes, found)) not in (None, plan.nodes_of_job):
            found["nodes"] = f"{count}-{plan.nodes_of_job}"
    return found


def update_pending_job_nodes(run: Run, plan: Plan, scheduler: Scheduler, job_id: str) -> bool:
    """Exclude nodes that are bad now from a queued job, and let it start with the nodes that are up; return whether the
    job was changed. A node that a person may have excluded stays excluded. Raises SchedulerError."""
    control, failures = scheduler.nodes, read_node_failures(run)
    if control is None or not (failures or plan.outlives_nodes):  # nothing to ask Slurm for
        return False
    job = scheduler.query(job_id)
    if job is None:
        return False
    changed = False
    options = _without_reduced_nodes(plan, job.options)
    if failures:
        before = _expanded(control, options.get("exclude"))
        ours = before & {each.node for each in failures} - _expanded(control, plan.sbatch_options.get("exclude"))
        known, worst = control.all_nodes(), worst_nodes(failures, nodes=plan.nodes)
        bad = [node for node in worst if node in ours or node in known - before] + sorted(ours - set(worst))
        given = before - ours
        after = given | _replaceable_nodes(run, plan, control, options, given=given, bad=bad)
        if after != before:
            control.exclude(job_id, sorted(after))
            log_line(f"job {job_id} leaves out {', '.join(sorted(after)) or 'no node'}; see {run.node_failures}")
            options, changed = _with_exclude(after, options), True
    least, _, most = job.options.get("nodes", "1").partition("-")
    count = _startable_node_count(run, plan, control, options)
    if count is not None and (count := min(count, int(most or least))) != int(least):
        control.allow_fewer(job_id, _minimum(plan, count, wanted=int(most or least)))
        changed = True
    return changed


def requeue_node_count(run: Run, plan: Plan, scheduler: Scheduler, job_id: str) -> MinimumNodes | None:
    """Return the size with which the running job may start after a requeue; None: as before. Raises SchedulerError."""
    if scheduler.nodes is None or not plan.outlives_nodes:
        return None
    job = scheduler.query(job_id)
    options = None if job is None else _without_reduced_nodes(plan, job.options)
    count = None if options is None else _startable_node_count(run, plan, scheduler.nodes, options)
    # also if all are up: the last start may have had fewer
    return None if count is None else _minimum(plan, count, wanted=plan.nodes_of_job)


def would_wait_for_nodes(run: Run, minimum: MinimumNodes) -> bool:
    """Return whether the requeued job would wait for all nodes: Slurm 22.05 no longer changes a job that lost some."""
    return minimum.nodes < minimum.wanted and bool(_lost_nodes(run))


def _minimum(plan: Plan, count: int, *, wanted: int) -> MinimumNodes:
    return MinimumNodes(nodes=count, wanted=wanted, tasks=count * plan.ntasks_per_node)


def _startable_node_count(run: Run, plan: Plan, control: UsableNodes, options: Mapping[str, str]) -> int | None:
    """Return the largest number of nodes with which a job that survives the loss of nodes can start now. None if a
    person has chosen the number (`nodes` in `options`), or if no number can start."""
    if not plan.outlives_nodes or "nodes" in options:
        return None
    without = [*filter(None, [options.get("exclude")]), *sorted(_lost_nodes(run))]
    asked = {**options, "exclude": ",".join(without)} if without else options
    for count in plan.node_counts:
        if control.enough_up(plan, run.job_script, {**asked, "nodes": str(count)}):
            if (wanted := plan.nodes_of_job) > count:
                log_line(f"the next job starts with {count} nodes or more: those that are up are not {wanted}")
            return count
    return None


def _expanded(control: UsableNodes, nodes: str | None) -> set[str]:
    return set(control.expand(nodes)) if nodes else set()


def _lost_nodes(run: Run) -> set[str]:
    """Return the nodes that the newest attempt has lost: Slurm may notice minutes later."""
    newest = run.newest_begun()
    failed = [] if newest is None else restarts.read_failed_restarts(newest)
    return {node for each in failed for node in each.lost}


def _without_reduced_nodes(plan: Plan, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options without a number of nodes below the plan's, which comes from a loss."""
    ours = plan.outlives_nodes and int(options.get("nodes", "1").partition("-")[0]) <= plan.nodes_of_job
    return {name: value for name, value in options.items() if not (ours and name == "nodes")}


def _replaceable_nodes(
    run: Run, plan: Plan, control: UsableNodes, options: Mapping[str, str], *, given: set[str], bad: Sequence[str]
) -> set[str]:
    """The bad nodes that can be excluded while enough healthy nodes remain, worst first."""
    needed = {"nodes": str(plan.nodes)} if plan.outlives_nodes and "nodes" not in options else {}
    gone, count = given | _lost_nodes(run) if bad else given, len(bad)
    while count:
        asked = _with_exclude(gone | set(bad[:count]), options) | needed
        if control.enough_up(plan, run.job_script, asked):
            break
        count //= 2
    if kept := ", ".join(bad[count:]):
        log_line(f"without {kept} this job has too few nodes that are up; so it may run there; see {run.node_failures}")
    return set(bad[:count])


def _with_exclude(excluded: set[str], options: Mapping[str, str]) -> dict[str, str]:
    others = {name: value for name, value in options.items() if name != "exclude"}
    return others | ({"exclude": ",".join(sorted(excluded))} if excluded else {})
