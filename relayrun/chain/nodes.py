"""Bad nodes: who is blamed for a failed attempt, and who is left out of the next jobs.

A node gets a strike when srun, or a rank's own last words, name it as the one that failed. After two strikes
within a day it is excluded, up to 5% of the nodes or one. An error that all ranks had is the program's or
the data's, and blames nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from relayrun.files import append_line, read_lines
from relayrun.rundir.records import Failure, Record
from relayrun.rundir.run import Run

STRIKES = 2
EXPIRE_SECONDS = 24 * 3600.0
SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Strike(Record):
    """A line of nodes.jsonl."""

    node: str
    attempt: int
    reason: str
    time: float


_TASK = re.compile(r"^srun: error: (\S+): tasks? ([\d,\-\[\]]+): (.+)$", re.M)
_NODE = re.compile(r"[Nn]ode failure on (\S+)")


def blamed(log: str, failures: Sequence[Failure], *, ntasks: int) -> dict[str, str]:
    """Nodes to blame for a failed attempt, with the reason in words.

    `log` is the standard error of its job. A node failure that Slurm reports always counts. Otherwise it is
    the node of the first rank that failed by itself: srun ends the others, so what comes later is no
    evidence. Where every rank had the same error, and where nobody can be named, nobody is blamed.
    """
    found = {node.strip("[]:,."): "node failure" for node in _NODE.findall(log)}
    if found:
        return found
    if len(failures) >= ntasks > 1 and len({failure.error for failure in failures}) == 1:
        return {}
    by_itself = [(node, what) for node, _tasks, what in _TASK.findall(log) if "Terminated" not in what]
    if by_itself:
        node, what = by_itself[0]
        nodes = {other for other, _ in by_itself}
        own = sorted(failures, key=lambda failure: failure.time)
        if len(nodes) == 1 or not own:
            return {node: what}
        return {own[0].node: own[0].error}
    if failures and len({failure.node for failure in failures}) == 1:
        return {failures[0].node: failures[0].error}
    return {}


def strike(run: Run, attempt: int, blame: dict[str, str], *, now: float) -> None:
    """Record strikes."""
    for node, reason in blame.items():
        append_line(run.strikes, asdict(Strike(node=node, attempt=attempt, reason=reason[:200], time=now)))


def excluded(strikes: Iterable[Strike], *, nodes: int, now: float) -> list[str]:
    """Nodes that the next jobs leave out, the worst first; `nodes` is how many a job has."""
    counts: dict[str, list[float]] = {}
    for entry in strikes:
        if now - entry.time < EXPIRE_SECONDS:
            counts.setdefault(entry.node, []).append(entry.time)
    bad = [node for node, times in counts.items() if len(times) >= STRIKES]
    bad.sort(key=lambda node: (-len(counts[node]), -max(counts[node]), node))
    return bad[: max(1, int(nodes * SHARE))]


def read_strikes(run: Run) -> list[Strike]:
    return [Strike.of(entry) for entry in read_lines(run.strikes)]
