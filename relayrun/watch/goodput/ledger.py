"""The parts of node time, and the ledger that books the time of one allocation into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from relayrun.control.rundir.restarts import FailedRestart
from relayrun.watch.goodput.facts import NodeAllocation

PartGroup = Literal["productive", "overhead", "start", "lost", "end", "unknown"]
WHOLE_ALLOCATION_PARTS: frozenset[str] = frozenset(
    {"prolog", "supervisor", "launch", "import", "no attempt", "end", "unknown"}
)
"""Parts that spare nodes share with all others; in other parts spare nodes wait."""
MICROSECONDS_PER_SECOND = 1_000_000


class NodeTimePart(NamedTuple):
    """A named part of node time."""

    name: str
    group: PartGroup
    words: str
    """Activity of the nodes, for people."""


PARTS: tuple[NodeTimePart, ...] = (
    NodeTimePart("step", "productive", "forward, backward and update of steps whose result counts"),
    NodeTimePart("data", "overhead", "steps that count waited for their data"),
    NodeTimePart("save", "overhead", "training stood still for a save"),
    NodeTimePart("evaluation", "overhead", "evaluations inside training"),
    NodeTimePart("between", "overhead", "between steps: looks for triggers, metrics, hooks"),
    NodeTimePart("spare", "overhead", "spare nodes waited to take the place of a lost one"),
    NodeTimePart("prolog", "start", "from the allocation to the first lines of the batch script"),
    NodeTimePart("supervisor", "start", "the supervisor looked where to go on from"),
    NodeTimePart("launch", "start", "modules, job.setup, container and task starter, until rank 0's program ran"),
    NodeTimePart("import", "start", "imports of the program"),
    NodeTimePart("init", "start", "the ranks met, data were checked, model and optimizer were made"),
    NodeTimePart("load", "start", "the checkpoint was loaded"),
    NodeTimePart("compile", "start", "what an attempt's first step took beyond the median of the next ones"),
    NodeTimePart("redone", "lost", "steps whose result was lost, and computed again"),
    NodeTimePart("failed start", "lost", "starts that did not come to their first step"),
    NodeTimePart("hang", "lost", "nothing moved, until that was noticed"),
    NodeTimePart("recovery", "lost", "from a failure to the end of the ranks, or back to a checkpoint"),
    NodeTimePart("given up", "lost", "nodes that were lost, and whose job went on without them"),
    NodeTimePart("no attempt", "lost", "jobs that had nodes and began no attempt"),
    NodeTimePart("end", "end", "from the ranks' last word to the end of the allocation"),
    NodeTimePart("unknown", "unknown", "nobody knows"),
)
"""In display order."""

PART_NAMES: tuple[str, ...] = tuple(part.name for part in PARTS)
START_PARTS: frozenset[str] = frozenset(part.name for part in PARTS if part.group == "start")
LOST_PARTS: frozenset[str] = frozenset(part.name for part in PARTS if part.group == "lost")


def to_microseconds(seconds: float) -> int:
    return round(seconds * MICROSECONDS_PER_SECOND)


class Ledger:
    """A cursor, and the time booked up to it, for all nodes of an allocation.

    Some of the nodes train, some are spare, some are given up: they were lost, and the job continues without them. When
    Slurm notices a loss, it removes the node from the job, and its time is no longer booked.
    """

    def __init__(self, allocation: NodeAllocation) -> None:
        self.start = self.cursor = to_microseconds(allocation.start)
        self.end = max(self.start, to_microseconds(allocation.end))
        self.parts: dict[str, int] = {}
        """Microseconds of all nodes by part."""
        self.stepped = 0
        """Microseconds in which steps that count were computed."""
        self.resized = [to_microseconds(time) for time, _ in allocation.resized]
        """Times at which the number of nodes changed, increasing."""
        self._nodes = allocation.nodes
        self._left = [nodes for _, nodes in allocation.resized]
        self._training, self._spare = allocation.nodes - allocation.spare_nodes, allocation.spare_nodes

    @property
    def training(self) -> int:
        """Number of training nodes; below the number at the last restart if Slurm noticed a loss first."""
        return min(self._training, self._nodes)

    def next_restart(self, failed: FailedRestart) -> None:
        """Book the following time without the nodes that this failure lost."""
        alive = max(0, self._training + self._spare - len(failed.lost))
        self._training = min(self._training, alive)
        self._spare = alive - self._training

    def book_until(self, part: str, time: int) -> None:
        """Book all time up to `time` as one part; nothing if `time` is before the cursor."""
        time = min(time, self.end)
        if time > self.cursor:
            self.book_parts({part: time - self.cursor}, time)

    def book_parts(self, amounts: Mapping[str, int], time: int) -> None:
        """Book all time up to `time`, which is not after the end, as parts that sum to it."""
        rest = dict(amounts)
        while self.resized and self.resized[0] < time:  # the order of the parts is unknown
            at = max(self.cursor, self.resized.pop(0))
            first, left = {}, at - self.cursor
            for part, amount in rest.items():
                first[part] = min(amount, left)
                left -= first[part]
                rest[part] -= first[part]
            self._add(first, at)
            self._nodes = self._left.pop(0)
        self._add(rest, time)

    def _add(self, amounts: Mapping[str, int], time: int) -> None:
        """Book parts during which the number of nodes is constant."""
        training = self.training
        spare = min(self._spare, self._nodes - training)
        idle = 0
        for part, amount in amounts.items():
            if part in WHOLE_ALLOCATION_PARTS:
                self._put(part, amount * self._nodes)
            else:
                self._put(part, amount * training)
                idle += amount
        self.stepped += amounts.get("step", 0)
        self._put("spare", idle * spare)
        self._put("given up", idle * (self._nodes - training - spare))
        self.cursor = time

    def _put(self, part: str, amount: int) -> None:
        if amount:
            self.parts[part] = self.parts.get(part, 0) + amount
