"""The node to blame for a failed attempt, from lines of srun and the last words of ranks.

A node is blamed for a cause that is a node's by the table of failures. An error that all ranks share blames no node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from relayrun.config.sections.chain import FailureSignature
from relayrun.control.diagnosis import Statement, first_cause
from relayrun.control.failure_signatures import OF_ANOTHER, OF_NODE, UNLISTED, classify, is_secondary_error
from relayrun.control.rundir.records import RankFailure

TASK_END = re.compile(r"^(?:.*\s)?srun: error: (\S+): tasks? ([\d,\-\[\]]+): (.+)$")
_NODE_FAILURE = re.compile(r"^(?:.*[ \t])?(?:(?:srun|slurmstepd\S*): .*[Nn]|error: N)ode failure on (\S+)", re.M)
_LAUNCH_FAILURE = re.compile(r"^(?:.*[ \t])?srun: error: Task launch for \S+ failed on node (\S+): (.+)$", re.M)
_TERMINATING = re.compile(r"^(?:.*\s)?(?:srun: .*\bTerminating Step|error: \*\*\* (?:STEP|JOB) )")
"""Here and above a line may begin with any text: slurmstepd adds a time, its name, or a label."""
NOT_STARTED_ENDS = ("exit code 126", "exit code 127")
"""Ends of tasks whose program a shell may not execute, or does not find."""


@dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """One line of srun about the end of tasks."""

    nodes: list[str]
    tasks: set[int]
    what: str
    """In srun's words: `Killed`, `Exited with exit code 1`, ..."""
    ended: bool
    """The step was already ending, so that a signal may be srun's own."""
    line: str

    @property
    def signalled(self) -> bool:
        return not self.what.startswith("Exited")


def task_ends(log: str) -> list[TaskEnd]:
    """Return srun's lines about the ends of tasks in a job's standard error, in their order."""
    found, ended = [], False
    for line in log.splitlines():
        ended = ended or _TERMINATING.match(line) is not None
        if task := TASK_END.match(line):
            nodes, tasks = expand_nodelist(task[1]), set(map(int, expand_nodelist(task[2])))
            found.append(TaskEnd(nodes=nodes, tasks=tasks, what=task[3].strip(), ended=ended, line=line))
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
    that ignores srun's SIGTERM is killed too, KillWait later: then the two cases cannot be told apart. A single line
    is that of a step that somebody ended."""
    before = takewhile(lambda end: not end.what.startswith("Terminated"), ends)
    killed = [end for end in before if end.ended and end.signalled]
    return killed[0] if len(killed) == 1 and len(ends) > 1 else None


def blamed_nodes(
    log: str,
    failures: Sequence[RankFailure],
    *,
    ntasks: int,
    said: Statement | None = None,
    more: Sequence[FailureSignature] = (),
) -> dict[str, str]:
    """Return the nodes to blame for a failed attempt, with the reason in words. `log`: standard error of its job.

    A node failure that Slurm reports always counts. Otherwise the node is blamed whose task failed first by itself
    (`first_failure`) or could not be started, if the cause is a node's. No node is blamed if all tasks ended in the
    same way, if several nodes had the same error, or if no task can be named. The words of a defect may name the node.

    Args:
        said: the first cause by the logs; None: by `log`.
        more: entries of the site and the run for the table of failures.
    """
    if lost := [node for nodes in _NODE_FAILURE.findall(log) for node in expand_nodelist(nodes.strip(":,."))]:
        return dict.fromkeys(lost, "node failure")
    unstarted = {node: what for nodes, what in _LAUNCH_FAILURE.findall(log) for node in expand_nodelist(nodes)}
    if unstarted:
        return unstarted if len(unstarted) == 1 else {}
    said = said or first_cause(log, more)
    if said is not None and said.cause == "node":
        nodes_of_job = {node for end in task_ends(log) for node in end.nodes}
        named = [node for node in nodes_of_job if re.search(rf"(?<![\w-]){re.escape(node)}(?![\w-])", said.words)]
        if len(named) == 1 or said.name in OF_ANOTHER:
            return dict.fromkeys(sorted(named), said.words)
    if len(failures) >= ntasks > 1 and len({failure.error for failure in failures}) == 1:
        return {}
    first = first_failure(log, failures)
    if isinstance(first, RankFailure):
        known = classify(first.error, more)
        if known is None or (known.cause != "node" and known.name not in OF_NODE):
            return {}
        primary = [failure for failure in failures if not is_secondary_error(failure.error)]
        alike = {failure.node for failure in primary if failure.error == first.error}
        several = {failure.node for failure in primary} if not task_ends(log) else alike  # the nodes' clocks may differ
        return {first.node: first.error} if len(alike | several) == 1 else {}
    if first is None or len(first.nodes) != 1:
        return {}
    alike_ends = [end for end in task_ends(log) if end.what == first.what and not (end.ended and end.signalled)]
    if len({task for end in alike_ends for task in end.tasks}) >= ntasks > 1:
        return {}
    return {first.nodes[0]: first.what} if _is_node_cause(first, said, more) else {}


def _is_node_cause(first: TaskEnd, said: Statement | None, more: Sequence[FailureSignature]) -> bool:
    """Return whether a task's end is its node's fault: by a signal of its own, by its words, or, without any, because
    only this node could not start the program."""
    if said is not None and (first.ended or not first.signalled):
        return said.cause == "node" or said.name in OF_NODE
    known = classify(first.what, more)
    sent = known is None or (known.cause in ("node", "unknown") and known.name not in ("abort", *UNLISTED))
    return first.what.endswith(NOT_STARTED_ENDS) or (first.signalled and sent)
