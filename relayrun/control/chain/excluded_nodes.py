"""Nodes that the chain excludes: which node is to blame for a failed attempt, and which nodes the next job gets.

srun's lines or a rank's own last words name the node that failed first. After two failures within a day a node is
excluded, up to 5% of the nodes or one node; a node that fails its health check is excluded at once. An error that
all ranks share blames no node. If too few other nodes are up, an excluded node is used again, and the next job may
start with fewer nodes if it has spare or elastic ones.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from relayrun.control.job_log import log_line
from relayrun.control.rundir import restarts
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import RankFailure, Record
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import MinimumNodes, NodeControl, Scheduler
from relayrun.errors import SchedulerError
from relayrun.files import append_line, read_lines

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
    """The node itself was looked at, and ranks cannot train there: it counts as many."""


_TASK_END = re.compile(r"^(?:.*\s)?srun: error: (\S+): tasks? ([\d,\-\[\]]+): (.+)$")
_NODE_FAILURE = re.compile(r"^(?:.*[ \t])?(?:(?:srun|slurmstepd\S*): .*[Nn]|error: N)ode failure on (\S+)", re.M)
_LAUNCH_FAILURE = re.compile(r"^(?:.*[ \t])?srun: error: Task launch for \S+ failed on node (\S+): (.+)$", re.M)
_TERMINATING = re.compile(r"^(?:.*\s)?(?:srun: .*\bTerminating Step|error: \*\*\* (?:STEP|JOB) )")
"""Here and above a line may begin with anything: slurmstepd puts a time there, its name, or a label."""
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
"""A port that another program holds, a name that does not resolve, a script that is not there."""
_HARDWARE_ERROR = re.compile(r"CUDA error|uncorrectable|\bXid\b|Input/output error|Stale file handle", re.I)
"""Words of a sick node: beside them nothing else in a log is the cause."""
_LAST_WORDS = re.compile(
    r"^(?:\s*(?:\[[^\]]*\](?:<\w+>)?:?|\d+:))*\s*"
    r"(?:[\w.]*(?:Error|Exception|gaierror)(?::| \()|The (?:IPv4|server socket) "
    r"|(?:.*/)?(?:python[\d.]*|(?:ba|da|z|k)?sh|curl|wget|ssh): )"
)
"""The last line of a traceback, torch's words on a socket, an interpreter's on its script; behind labels of ranks."""


@dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """What one line of srun says of the end of tasks."""

    nodes: list[str]
    tasks: set[int]
    what: str
    """In srun's words: `Killed`, `Exited with exit code 1`, ..."""
    ended: bool
    """Whether srun was ending the step already, so that a signal may be its own."""

    @property
    def signalled(self) -> bool:
        return not self.what.startswith("Exited")


def is_secondary_error(error: str) -> bool:
    """Whether a rank's last words only say that another one is gone, or that it was told to end."""
    return _SECONDARY.search(error) is not None and not is_not_node_related(error)


def is_not_node_related(words: str) -> bool:
    """Whether an attempt failed for something that lies in no node, by the words of its cause."""
    return _NOT_NODE_RELATED.search(words) is not None


def cause_outside_nodes(log: str, first: TaskEnd | RankFailure | None) -> str:
    """The words of such a cause; empty where there is another one. `first`: who failed first.

    What a rank put on record counts; else the last words in the log, unless a task was ended by a signal of its own.
    """
    if isinstance(first, RankFailure):
        return first.error if is_not_node_related(first.error) else ""
    if (first is not None and first.signalled and not first.ended) or _HARDWARE_ERROR.search(log):
        return ""
    said = [line.strip() for line in log.splitlines() if _LAST_WORDS.match(line) and not is_secondary_error(line)]
    return said[-1] if said and is_not_node_related(said[-1]) else ""


def task_ends(log: str) -> list[TaskEnd]:
    """What srun said of the ends of tasks in a job's standard error, in its order."""
    found, ended = [], False
    for line in log.splitlines():
        ended = ended or _TERMINATING.match(line) is not None
        if task := _TASK_END.match(line):
            found.append(
                TaskEnd(
                    nodes=expand_nodelist(task[1]),
                    tasks=set(map(int, expand_nodelist(task[2]))),
                    what=task[3].strip(),
                    ended=ended,
                )
            )
    return found


def without_task_ends(log: str) -> str:
    """A job's standard error without what srun said of the ends of tasks."""
    return "\n".join(line for line in log.splitlines() if not _TASK_END.match(line))


def expand_nodelist(text: str) -> list[str]:
    """Write out a compressed list: `n[1-3],m` is n1, n2, n3, m, and `0-2` is 0, 1, 2. Other text stays as it is."""
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
    """The end of the task that failed first by itself: its rank's words or, where it left none, srun's line.

    srun ends the other tasks, and theirs see a connection closed: neither is evidence. So srun's order counts, but
    for tasks whose words are secondary, since a neighbour's end may be reported before the news of the one that it
    noticed. None where nobody can be named.
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
    if primary:
        return primary[0]
    return _killed_by_itself(ends)


def _killed_by_itself(ends: Sequence[TaskEnd]) -> TaskEnd | None:
    """The one that was killed when only its neighbours had been heard.

    Who does not end at srun's SIGTERM is killed too, but KillWait later: when others have been terminated by then,
    or when it is not the only one, nothing tells the two apart.
    """
    killed = []
    for end in ends:
        if end.what.startswith("Terminated"):
            break
        if end.ended and end.signalled:
            killed.append(end)
    return killed[0] if len(killed) == 1 else None


def blamed_nodes(log: str, failures: Sequence[RankFailure], *, ntasks: int) -> dict[str, str]:
    """Nodes to blame for a failed attempt, with the reason in words.

    `log` is the standard error of its job. A node failure that Slurm reports always counts. Otherwise it is the
    node of the first task that failed by itself (`first_failure`), or could not be started. Where every task ended in
    the same way, where several nodes had the same error, where the cause lies in no node (`cause_outside_nodes`), and
    where nobody can be named, nobody is blamed.
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
        several = {failure.node for failure in primary} if not task_ends(log) else alike  # their clocks may differ
        return {first.node: first.error} if len(alike | several) == 1 else {}
    if first is None or len(first.nodes) != 1 or _all_tasks_alike(log, first, ntasks):
        return {}
    return {first.nodes[0]: first.what}


def _all_tasks_alike(log: str, first: TaskEnd, ntasks: int) -> bool:
    """Whether every task of the step ended by itself as the first one did."""
    alike = [end for end in task_ends(log) if end.what == first.what and not (end.ended and end.signalled)]
    return len({task for end in alike for task in end.tasks}) >= ntasks > 1


def record_node_failures(run: Run, attempt: int, blame: dict[str, str], *, now: float, sick: bool = False) -> None:
    """Record strikes, each once: an end that was killed is written again."""
    known = {entry.node for entry in read_node_failures(run) if entry.attempt == attempt}
    for node, reason in blame.items():
        if node in known:
            continue
        entry = NodeFailureRecord(node=node, attempt=attempt, reason=reason[:200], time=now, sick=sick)
        append_line(run.strikes, asdict(entry))


def worst_nodes(strikes: Iterable[NodeFailureRecord], *, nodes: int, now: float) -> list[str]:
    """Nodes that the next jobs leave out, the worst first; `nodes` is how many a job has."""
    counts: dict[str, list[float]] = {}
    for entry in strikes:
        if now - entry.time < FAILURE_EXPIRE_SECONDS:
            counts.setdefault(entry.node, []).extend([entry.time] * (FAILURES_TO_EXCLUDE if entry.sick else 1))
    bad = [node for node, times in counts.items() if len(times) >= FAILURES_TO_EXCLUDE]
    bad.sort(key=lambda node: (-len(counts[node]), -max(counts[node]), node))
    return bad[: max(1, int(nodes * EXCLUDED_SHARE))]


def read_node_failures(run: Run) -> list[NodeFailureRecord]:
    return [NodeFailureRecord.of(entry) for entry in read_lines(run.strikes)]


def next_job_options(
    run: Run, plan: Plan, scheduler: Scheduler, options: Mapping[str, str], *, tried: Sequence[str] = ()
) -> dict[str, str]:
    """A job's options for the next one, with the nodes that it leaves out and their number.

    `tried`: nodes where `begin` has just failed. Raises SchedulerError.
    """
    strikes = read_node_failures(run)
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
    control, strikes = scheduler.nodes, read_node_failures(run)
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
    return (
        set() if newest is None else {node for failed in restarts.read_failed_restarts(newest) for node in failed.lost}
    )


def _without_reduced_nodes(plan: Plan, options: Mapping[str, str]) -> dict[str, str]:
    """The options without a number of nodes below the plan's, so that the script's own holds.

    It comes from a loss. Slurm also counts those that are left of a job that ends.
    """
    ours = plan.outlives_nodes and int(options.get("nodes", "1").partition("-")[0]) <= plan.nodes_of_job
    return {name: value for name, value in options.items() if not (ours and name == "nodes")}


def _bad_nodes(plan: Plan, strikes: Sequence[NodeFailureRecord]) -> list[str]:
    """Nodes that the next job should leave out, the worst first."""
    return worst_nodes(strikes, nodes=plan.nodes, now=time.time())


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
