"""What is on record of the health of nodes. Standard library only.

    attempts/0007/node_health.jsonl   what was found on a node, a line each, and what was done about it
    node_health.jsonl                 what was measured on each node: the run's own history

The coordinator of the agents writes both; without agents the first rank of each node writes what it finds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Literal, Self

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run
from relayrun.files import append_line, read_lines, read_lines_backwards

HealthMode = Literal["off", "warn", "exclude"]
HealthAction = Literal["warned", "left out", "ended"]
HISTORY_LINES = 1000
"""The newest lines of the history that count."""


@dataclass(frozen=True, kw_only=True)
class HealthPlan(Record):
    """`node_health` in plan.json: what is looked for, and its limits. Sizes are in bytes."""

    mode: HealthMode = "off"
    memory: float | None = None
    """Free memory that a node must have; None: what the ranks of a node have taken before."""
    shm: float = 0.0
    tmp: float = 0.0
    clock_seconds: float = 1.0
    open_files: int = 0
    slower: float = 1.5
    """How many times the run's median a measurement may take."""
    command: list[str] = field(default_factory=list)
    """A site's own check of a node; exit status 0: it is well."""
    command_seconds: float = 30.0
    gpus: int = 0
    """GPUs of each node."""
    gpu_program: list[str] = field(default_factory=list)
    """Prints what NVIDIA's library says of the GPUs; see `training.node_gpus`."""
    probe_program: list[str] = field(default_factory=list)
    """Measures a node where no server forks its ranks; see `training.node_probe`."""

    @classmethod
    def looked_for(cls, entry: Mapping[str, Any]) -> Self | None:
        """Return `node_health` of a plan; None where nothing is looked for."""
        found = cls.of(entry)
        return None if found.mode == "off" else found


@dataclass(frozen=True, kw_only=True)
class HealthFinding(Record):
    """Something that is wrong with a node, with its figure and the limit that it is beyond."""

    node: str
    check: str
    """`memory`, `shm`, `tmp`, `run_dir`, `open_files`, `clock`, `gpus`, `gpu_ecc`, `gpu_rows`, `gpu_slowed`, `gpu_xid`,
    `command`, `matmul`, `exchange`, `result` or `answer`."""
    value: float
    limit: float
    words: str
    """What it is, with both figures."""
    hard: bool
    """The ranks cannot train there, or what they compute cannot be trusted."""
    action: HealthAction = "warned"
    reason: str = ""
    """Why a node that is sick was not left out."""
    round: int = 0
    """The round that was over when it was found; 0: before the first one."""
    time: float = 0.0

    def done(self, action: HealthAction, reason: str = "") -> Self:
        """The same, with what was done about it."""
        return replace(self, action=action, reason=reason)

    @property
    def told(self) -> str:
        """One line for people."""
        what = {"warned": "goes on", "left out": "left out", "ended": "ends the attempt"}[self.action]
        return f"{self.node}: {self.words}; {what}" + (f", {self.reason}" if self.reason else "")


def record_finding(attempt: Attempt, finding: HealthFinding) -> None:
    """Put on record what was found, and what was done about it."""
    append_line(attempt.node_health, asdict(finding))


def read_findings(attempt: Attempt) -> list[HealthFinding]:
    """What was found in this attempt, oldest first."""
    return [HealthFinding.of(line) for line in read_lines(attempt.node_health)]


def why_health_ended_attempt(attempt: Attempt) -> str:
    """Why an attempt ended by the health of its nodes, in words; empty where it did not."""
    return "; ".join(f"{found.node}: {found.words}" for found in read_findings(attempt) if found.action == "ended")


def sick_nodes(attempt: Attempt) -> dict[str, str]:
    """Nodes of this attempt on which ranks cannot train, with the reason, as far as something was done about them."""
    return {found.node: found.words for found in read_findings(attempt) if found.hard and found.action != "warned"}


def record_measurement(run: Run, *, attempt: int, time: float, node: str, on: str = "", **values: float) -> None:
    """Add to the run's history. `on`: the device and what else makes measurements comparable."""
    append_line(run.node_health, {"attempt": attempt, "time": time, "node": node, "on": on, **values}, durable=False)


class NodeHistory:
    """What was measured on the run's nodes, the newest lines."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self._lines = list(lines)

    @classmethod
    def of(cls, run: Run) -> Self:
        """Read that of a run."""
        return cls(line for _, line in islice(read_lines_backwards(run.node_health), HISTORY_LINES))

    def median(self, name: str, *, on: str = "") -> float | None:
        """The median of what was measured under this name on such a device; None where nothing was."""
        found = [float(line[name]) for line in self._lines if name in line and line.get("on", "") == on]
        return statistics.median(found) if found else None
