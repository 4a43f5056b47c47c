"""Bad nodes: who is blamed for a failed attempt, and who is left out of the next jobs.

A node gets a strike when srun, or a rank's own last words, name it as the one that failed first. A rank that was
killed leaves no words; what its neighbours say of a closed connection is no evidence. After two strikes
within a day a node is excluded, up to 5% of the nodes or one. An error that all ranks had is the program's or
the data's, and blames nobody. A node that was sick by its own look, so that ranks cannot train there
(`rundir.node_health`), is excluded at its first strike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from relayrun.control.rundir.records import RankFailure, Record
from relayrun.control.rundir.run import Run
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
    the same way, where several nodes had the same error, where the cause lies in no node (`cause_of_no_node`), and
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
