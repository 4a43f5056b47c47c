"""The nodes of the next job: which it leaves out because they failed, and with how few it may start.

A job that leaves out nodes which nobody can replace, or asks for more than are up, waits until somebody mends some; as
its reason Slurm 22.05 gives `BadConstraints`, `ReqNodeNotAvail` or nothing at all. So a node that failed is used again
where there are too few others, and spare nodes are done without.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from relayrun.control.chain import nodes
from relayrun.control.chain.nodes import NodeFailureRecord
from relayrun.control.log import log_line
from relayrun.control.rundir import rounds
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import MinimumNodes, NodeControl, Scheduler
from relayrun.errors import SchedulerError


def next_job_options(
    run: Run, plan: Plan, scheduler: Scheduler, options: Mapping[str, str], *, tried: Sequence[str] = ()
) -> dict[str, str]:
    """A job's options for the next one, with the nodes that it leaves out and their number.

    `tried`: nodes where `begin` has just failed. Raises SchedulerError.
    """
    strikes = nodes.read_node_failures(run)
    found = _without_reduced_nodes(plan, options)
    if scheduler.nodes is None or not (strikes or tried or plan.outlives_nodes):
        return found
    wished = plan.sbatch_options.get("exclude")
    by_hand = set(scheduler.nodes.expand(options["exclude"])) if "exclude" in options else set()
    by_hand -= {strike.node for strike in strikes}  # put there by us, and strikes expire
    by_hand |= set(scheduler.nodes.expand(wished)) if wished else set()
    bad: list[str] = []
    if by_hand or strikes or tried:
        known = scheduler.nodes.known()  # an unknown one would make sbatch fail
        by_hand &= known
        bad = [node for node in dict.fromkeys([*tried, *_bad_nodes(plan, strikes)]) if node in known - by_hand]
        asked, found = found, _with_exclude(by_hand | set(bad), found)
    try:
        if bad:
            replaceable = _replaceable_nodes(run, plan, scheduler.nodes, asked, given=by_hand, bad=bad)
            found = _with_exclude(by_hand | replaceable, asked)
        if (count := _startable_node_count(run, plan, scheduler.nodes, found)) not in (None, plan.nodes_of_job):
            found["nodes"] = f"{count}-{plan.nodes_of_job}"
    except SchedulerError as error:  # the job must be queued all the same
        log_line(f"which nodes are up is not known: {error.message}")
    return found


def update_pending_job_nodes(run: Run, plan: Plan, scheduler: Scheduler, job_id: str) -> None:
    """Let a queued job leave out the nodes that are bad now, too, and start with those that are up.

    A node that it leaves out stays so, which may be a person's wish; but for one with strikes that is needed now.
    Raises SchedulerError.
    """
    control, strikes = scheduler.nodes, nodes.read_node_failures(run)
    if control is None or not (strikes or plan.outlives_nodes):  # nothing to ask Slurm for
        return
    job = scheduler.query(job_id)
    if job is None:
        return
    options = _without_reduced_nodes(plan, job.options)
    if strikes:
        before = set(control.expand(options["exclude"])) if "exclude" in options else set()
        wished = plan.sbatch_options.get("exclude")
        ours = before & {strike.node for strike in strikes} - set(control.expand(wished) if wished else ())
        known, worst = control.known(), _bad_nodes(plan, strikes)
        bad = [node for node in worst if node in ours or node in known - before] + sorted(ours - set(worst))
        given = before - ours
        after = given | _replaceable_nodes(run, plan, control, options, given=given, bad=bad)
        if after != before:
            control.exclude(job_id, sorted(after))
            log_line(f"job {job_id} leaves out {', '.join(sorted(after)) or 'no node'}; see {run.strikes}")
            options = _with_exclude(after, options)
    least, _, most = job.options.get("nodes", "1").partition("-")
    count = _startable_node_count(run, plan, control, options)
    if count is not None and (count := min(count, int(most or least))) != int(least):
        control.do_with(job_id, _fewest(plan, count, of=int(most or least)))


def requeue_node_count(run: Run, plan: Plan, scheduler: Scheduler, job_id: str) -> MinimumNodes | None:
    """With how many nodes the running job may start when it is queued again; None: with as many as before.

    Raises SchedulerError.
    """
    if scheduler.nodes is None or not plan.outlives_nodes:
        return None
    job = scheduler.query(job_id)
    if (
        job is None
        or (count := _startable_node_count(run, plan, scheduler.nodes, _without_reduced_nodes(plan, job.options)))
        is None
    ):
        return None
    return _fewest(plan, count, of=plan.nodes_of_job)  # all of them, too: the last time it may have been fewer


def would_wait_for_nodes(run: Run, few: MinimumNodes) -> bool:
    """Whether the running job, queued again, would wait for nodes that are not up.

    It would ask for all of them, since it has lost some: Slurm 22.05 changes nothing of such a job any more.
    """
    return few.nodes < few.of and bool(_lost_nodes(run))


def _fewest(plan: Plan, count: int, *, of: int) -> MinimumNodes:
    return MinimumNodes(nodes=count, of=of, tasks=count * plan.ntasks_per_node)


def _startable_node_count(run: Run, plan: Plan, control: NodeControl, options: Mapping[str, str]) -> int | None:
    """With how many nodes, of those that are up, a job can start that outlives the loss of some; all, where it can.

    None where a person has chosen how many, or it would have to wait all the same. `options`: the job's, without
    `nodes` where the plan says how many.
    """
    if not plan.outlives_nodes or "nodes" in options:
        return None
    without = [*filter(None, [options.get("exclude")]), *sorted(_lost_nodes(run))]
    asked = {**options, "exclude": ",".join(without)} if without else options
    for count in plan.node_counts:
        if control.suffice(plan, run.job_script, {**asked, "nodes": str(count)}):
            if count < plan.nodes_of_job:
                log_line(
                    f"the next job starts with {count} nodes or more: those that are up are not {plan.nodes_of_job}"
                )
            return count
    return None


def _lost_nodes(run: Run) -> set[str]:
    """Nodes that the newest attempt has lost: Slurm may notice minutes later."""
    newest = run.newest_begun()
    return set() if newest is None else {node for failed in rounds.read_failed_restarts(newest) for node in failed.lost}


def _without_reduced_nodes(plan: Plan, options: Mapping[str, str]) -> dict[str, str]:
    """The options without a number of nodes below the plan's, so that the script's own holds.

    It comes from a loss. Slurm also counts those that are left of a job that ends.
    """
    ours = plan.outlives_nodes and int(options.get("nodes", "1").partition("-")[0]) <= plan.nodes_of_job
    return {name: value for name, value in options.items() if not (ours and name == "nodes")}


def _bad_nodes(plan: Plan, strikes: Sequence[NodeFailureRecord]) -> list[str]:
    """Nodes that the next job should leave out, the worst first."""
    return nodes.worst_nodes(strikes, nodes=plan.nodes, now=time.time())


def _replaceable_nodes(
    run: Run, plan: Plan, control: NodeControl, options: Mapping[str, str], *, given: set[str], bad: Sequence[str]
) -> set[str]:
    """Those of the bad nodes, the worst first, beyond which and those given there are enough others that are up."""
    needed = {"nodes": str(plan.nodes)} if plan.outlives_nodes and "nodes" not in options else {}
    gone, count = given | _lost_nodes(run) if bad else given, len(bad)
    while count and not control.suffice(plan, run.job_script, _with_exclude(gone | set(bad[:count]), options) | needed):
        count //= 2
    if kept := bad[count:]:
        log_line(
            f"without {', '.join(kept)} this job has too few nodes that are up; so it may run there; see {run.strikes}"
        )
    return set(bad[:count])


def _with_exclude(excluded: set[str], options: Mapping[str, str]) -> dict[str, str]:
    others = {name: value for name, value in options.items() if name != "exclude"}
    return others | ({"exclude": ",".join(sorted(excluded))} if excluded else {})
