"""Lines of other programs about the end of tasks, and the one table of the words that they use for a cause.

No field says whether a node is to blame: srun, torch, the shell and Python report a failure in words alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TASK_END = re.compile(r"^(?:.*\s)?srun: error: (\S+): tasks? ([\d,\-\[\]]+): (.+)$")
NODE_FAILURE = re.compile(r"^(?:.*[ \t])?(?:(?:srun|slurmstepd\S*): .*[Nn]|error: N)ode failure on (\S+)", re.M)
LAUNCH_FAILURE = re.compile(r"^(?:.*[ \t])?srun: error: Task launch for \S+ failed on node (\S+): (.+)$", re.M)
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
HARDWARE_ERROR = re.compile(r"CUDA error|uncorrectable|\bXid\b|Input/output error|Stale file handle", re.I)
"""Words of a sick node: beside them no other line in a log is the cause."""
LAST_WORDS = re.compile(
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
