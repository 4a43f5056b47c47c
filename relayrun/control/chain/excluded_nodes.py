"""Nodes that the chain excludes: which node is to blame for a failed attempt, and which nodes the next job gets.

srun's lines or a rank's own last words name the node that failed first. After two failures within a day a node is
excluded, up to 5% of the nodes or one node; a node that fails its health check is excluded at once. An error that all
ranks share blames no node. If too few other nodes are up, an excluded node is used again, and the next job may start
with fewer nodes if it has spare or elastic ones.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from relayrun.control.job_log import log_line
from relayrun.control.rundir import restarts
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import RankFailure, Record
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


TASK_END = re.compile(r"^(?:.*\s)?srun: error: (\S+): tasks? ([\d,\-\[\]]+): (.+)$")
_NODE_FAILURE = re.compile(r"^(?:.*[ \t])?(?:(?:srun|slurmstepd\S*): .*[Nn]|error: N)ode failure on (\S+)", re.M)
_LAUNCH_FAILURE = re.compile(r"^(?:.*[ \t])?srun: error: Task launch for \S+ failed on node (\S+): (.+)$", re.M)
_TERMINATING = re.compile(r"^(?:.*\s)?(?:srun: .*\bTerminating Step|error: \*\*\* (?:STEP|JOB) )")
"""Here and above a line may begin with any text: slurmstepd adds a time, its name, or a label."""
_SECONDARY = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|broken pipe|remote process exited|ncclRemoteError|watchdog"
    r"|collective operation timeout|timeout caused pair closure|Dist(?:Network|Store)Error|socket timeout"
    r"|wait timeout|terminated|SIGTERM|^KeyboardInterrupt|^SystemExit|ChildFailedError|CalledProcessError",
    re.I,
)
_NOT_NODE_RELATED = re.compile(
    r"EADDRINUSE|address already in use|\bport \S+ is already in use|another process is utilizing it|gai ?error"
    r"|name or service not known|failure in name resolution|no address associated with|could not resolve host"
    r"|python\S*: (?:can't open file .*\[Errno 20?\]|can't find '__main__'|(?:Error while finding .*)?No module named)"
    r"|(?:^|[\s/])(?:ba|da|z|k)?sh: (?:\d+: cannot open .+: |(?!line )[^:]+: )No such file",
    re.I,
)
"""A port that another program holds, a name that does not resolve, a script that does not exist."""
_HARDWARE_ERROR = re.compile(r"CUDA error|uncorrectable|\bXid\b|Input/output error|Stale file handle", re.I)
"""Words of a sick node: beside them no other line in a log is the cause."""
_LAST_WORDS = re.compile(
    r"^(?:\s*(?:\[[^\]]*\](?:<\w+>)?:?|\d+:))*\s*"
    r"(?:[\w.]*(?:Error|Exception|gaierror)(?::| \()|The (?:IPv4|server socket) "
    r"|(?:.*/)?(?:python[\d.]*|(?:ba|da|z|k)?sh|curl|wget|ssh): )"
)
"""After rank labels: the last line of a traceback, torch's message about a socket, an interpreter's about its script.
"""


@dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """One line of srun about the end of tasks."""

    nodes: list[str]
    tasks: set[int]
    what: str
    """In srun's words: `Killed`, `Exited with exit code 1`, ..."""
    ended: bool
    """The step was already ending, so that a signal may be srun's own."""

    @property
    def signalled(self) -> bool:
        return not self.what.startswith("Exited")


def is_secondary_error(error: str) -> bool:
    """True if a rank's last words only report that another rank is gone, or that it was told to end."""
    return _SECONDARY.search(error) is not None and not is_not_node_related(error)


def is_not_node_related(words: str) -> bool:
    """True if the words of a failure name a cause that lies in no node."""
    return _NOT_NODE_RELATED.search(words) is not None


def cause_outside_nodes(log: str, first: TaskEnd | RankFailure | None) -> str:
    """Return the words of a cause that lies in no node; empty if the cause is another. `first`: the first failure. A
    rank's record counts; without one the last words in the log, unless a task was ended by a signal of its own."""
    if isinstance(first, RankFailure):
        return first.error if is_not_node_related(first.error) else ""
    if (first is not None and first.signalled and not first.ended) or _HARDWARE_ERROR.search(log):
        return ""
    said = [line.strip() for line in log.splitlines() if _LAST_WORDS.match(line) and not is_secondary_error(line)]
    return said[-1] if said and is_not_node_related(said[-1]) else ""


def task_ends(log: str) -> list[TaskEnd]:
    """Return srun's lines about the ends of tasks in a job's standard error, in their order."""
    found, ended = [], False
    for line in log.splitlines():
        ended = ended or _TERMINATING.match(line) is not None
        if task := TASK_END.match(line):
            nodes, tasks = expand_nodelist(task[1]), set(map(int, expand_nodelist(task[2])))
            found.append(TaskEnd(nodes=nodes, tasks=tasks, what=task[3].strip(), ended=ended))
    return found


def expand_nodelist(text: str) -> list[str]:
    """Expand a compressed list: `n[1-3],m` is n1, n2, n3, m, and `0-2` is 0, 1, 2. Other text stays as it is."""
    found = []
    for name, ranges in re.findall(r"([^,\[\]]*)(?:\[([^\]]*)\])?,?", text.rstrip(":.")):
        if not ranges and re.fullmatch(r"\d+-\d+", name):
            name, ranges = "", name
        for part in ranges.split(",") if ranges else [""]:
            first, dash, last = part.partition("-")
            if dash and first.isdecimal() and last.isdecimal():
                found += [f"{name}{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
            elif name or part:
                found.append(name + part)
    return found


def first_failure(log: str, failures: Sequence[RankFailure]) -> TaskEnd | RankFailure | None:
    """Return the end of the task that failed first by itself: its rank's record or, without one, srun's line.

    srun ends the other tasks, and their ranks see a connection closed: neither is evidence. So srun's order counts,
    except for tasks with secondary words: srun may report a peer first. None if no task can be named.
    """
    ends = task_ends(log)
    primary = sorted((entry for entry in failures if not is_secondary_error(entry.error)), key=lambda entry: entry.time)
    for end in ends:
        if end.ended or end.what.startswith("Terminated"):
            continue
        said = [failure for failure in failures if failure.rank in end.tasks]
        if any(failure in primary for failure in said):
            return primary[0]
        if not said:
            return end
    return primary[0] if primary else _killed_by_itself(ends)


def _killed_by_itself(ends: Sequence[TaskEnd]) -> TaskEnd | None:
    """Return the killed task if only its peers left words and no other task was terminated or killed before. A task
    that ignores srun's SIGTERM is killed too, KillWait later: then the two cases cannot be told apart."""
    killed = []
    for end in ends:
        if end.what.startswith("Terminated"):
            break
        if end.ended and end.signalled:
            killed.append(end)
    return killed[0] if len(killed) == 1 else None


def blamed_nodes(log: str, failures: Sequence[RankFailure], *, ntasks: int) -> dict[str, str]:
    """Return the nodes to blame for a failed attempt, with the reason in words. `log`: standard error of its job.

    A node failure that Slurm reports always counts. Otherwise the node is blamed whose task failed first by itself
    (`first_failure`) or could not be started. No node is blamed if all tasks ended in the same way, if several nodes
    had the same error, if the cause lies in no node (`cause_outside_nodes`), or if no task can be named.
    """
    if lost := [node for nodes in _NODE_FAILURE.findall(log) for node in expand_nodelist(nodes.strip(":,."))]:
        return dict.fromkeys(lost, "node failure")
    unstarted = {node: what for nodes, what in _LAUNCH_FAILURE.findall(log) for node in expand_nodelist(nodes)}
    if unstarted:
        return unstarted if len(unstarted) == 1 else {}
    if len(failures) >= ntasks > 1 and len({failure.error for failure in failures}) == 1:
        return {}
    first = first_failure(log, failures)
    if cause_outside_nodes(log, first):
        return {}
    if isinstance(first, RankFailure):
        primary = [failure for failure in failures if not is_secondary_error(failure.error)]
        alike = {failure.node for failure in primary if failure.error == first.error}
        several = {failure.node for failure in primary} if not task_ends(log) else alike  # the nodes' clocks may differ
        return {first.node: first.error} if len(alike | several) == 1 else {}
    if first is None or len(first.nodes) != 1 or _all_tasks_alike(log, first, ntasks):
        return {}
    return {first.nodes[0]: first.what}


def _all_tasks_alike(log: str, first: TaskEnd, ntasks: int) -> bool:
    alike = [end for end in task_ends(log) if end.what == first.what and not (end.ended and end.signalled)]
    return len({task for end in alike for task in end.tasks}) >= ntasks > 1


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
    try:
        if bad:
            replaceable = _replaceable_nodes(run, plan, scheduler.nodes, asked, given=by_hand, bad=bad)
            found = _with_exclude(by_hand | replaceable, asked)
        if (count := _startable_node_count(run, plan, scheduler.nodes, found)) not in (None, plan.nodes_of_job):
            found["nodes"] = f"{count}-{plan.nodes_of_job}"
    except SchedulerError as error:  # the job must be queued all the same
        log_line(f"which nodes are up is not known: {error.message}")
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
