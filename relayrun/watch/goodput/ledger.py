"""The parts of node time, and the ledger that books the time of one allocation into them.

`PARTS` names every part, its group, and its category in Google's ml-goodput-measurement. `Ledger` holds a cursor that
moves from the start of the allocation to its end; each microsecond is booked once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from relayrun.control.rundir.restarts import FailedRestart
from relayrun.watch.goodput.facts import NodeAllocation

PartGroup = Literal["productive", "overhead", "start", "lost", "end", "unknown"]


@dataclass(frozen=True, kw_only=True)
class NodeTimePart:
    """A named part of node time."""

    name: str
    group: PartGroup
    words: str
    """Activity of the nodes, for people."""
    google: str
    """The `BadputType` of ml-goodput-measurement; empty if the time is productive there."""


PARTS: tuple[NodeTimePart, ...] = (
    NodeTimePart(
        name="step",
        group="productive",
        words="forward, backward and update of steps whose result counts",
        google="",
    ),
    NodeTimePart(
        name="data",
        group="overhead",
        words="steps that count waited for their data",
        google="DATA_LOADING_SYNC",
    ),
    NodeTimePart(
        name="save",
        group="overhead",
        words="training stood still for a save",
        google="UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    ),
    NodeTimePart(
        name="evaluation", group="overhead", words="evaluations inside training", google="CUSTOM_BADPUT_EVENTS"
    ),
    NodeTimePart(
        name="between",
        group="overhead",
        words="between steps: looks for triggers, metrics, hooks",
        google="OTHER",
    ),
    NodeTimePart(
        name="spare",
        group="overhead",
        words="spare nodes waited to take the place of a lost one",
        google="OTHER",
    ),
    NodeTimePart(
        name="prolog",
        group="start",
        words="from the allocation to the first lines of the batch script",
        google="TPU_INITIALIZATION",
    ),
    NodeTimePart(
        name="supervisor",
        group="start",
        words="the supervisor looked where to go on from",
        google="TPU_INITIALIZATION",
    ),
    NodeTimePart(
        name="launch",
        group="start",
        words="modules, job.setup, container and task starter, until rank 0's program ran",
        google="TPU_INITIALIZATION",
    ),
    NodeTimePart(name="import", group="start", words="imports of the program", google="TRAINING_PREP"),
    NodeTimePart(
        name="init",
        group="start",
        words="the ranks met, data were checked, model and optimizer were made",
        google="TRAINING_PREP",
    ),
    NodeTimePart(
        name="load",
        group="start",
        words="the checkpoint was loaded",
        google="UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    ),
    NodeTimePart(
        name="compile",
        group="start",
        words="what an attempt's first step took beyond the median of the next ones",
        google="PROGRAM_STARTUP",
    ),
    NodeTimePart(
        name="redone",
        group="lost",
        words="steps whose result was lost, and computed again",
        google="WASTED_PROGRESS_FROM_DISRUPTION",
    ),
    NodeTimePart(
        name="failed start",
        group="lost",
        words="starts that did not come to their first step",
        google="INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    ),
    NodeTimePart(
        name="hang",
        group="lost",
        words="nothing moved, until that was noticed",
        google="INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    ),
    NodeTimePart(
        name="recovery",
        group="lost",
        words="from a failure to the end of the ranks, or back to a checkpoint",
        google="INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    ),
    NodeTimePart(
        name="given up",
        group="lost",
        words="nodes that were lost, and whose job went on without them",
        google="INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    ),
    NodeTimePart(
        name="no attempt",
        group="lost",
        words="jobs that had nodes and began no attempt",
        google="INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    ),
    NodeTimePart(
        name="end",
        group="end",
        words="from the ranks' last word to the end of the allocation",
        google="OTHER",
    ),
    NodeTimePart(name="unknown", group="unknown", words="nobody knows", google="OTHER"),
)
"""In display order."""

PART_NAMES: tuple[str, ...] = tuple(part.name for part in PARTS)
START_PARTS: frozenset[str] = frozenset(part.name for part in PARTS if part.group == "start")
LOST_PARTS: frozenset[str] = frozenset(part.name for part in PARTS if part.group == "lost")
WHOLE_ALLOCATION_PARTS: frozenset[str] = frozenset(
    {"prolog", "supervisor", "launch", "import", "no attempt", "end", "unknown"}
)
"""Parts that spare nodes share with all others; in other parts spare nodes wait."""


MICROSECONDS_PER_SECOND = 1_000_000

BookedPartSink = Callable[[str, int, int, int], None]
"""Called with a part, its microseconds of all nodes, and the times (microseconds since 1970) between which they lie."""


def to_microseconds(seconds: float) -> int:
    """Convert seconds to whole microseconds."""
    return round(seconds * MICROSECONDS_PER_SECOND)


@dataclass(kw_only=True)
class RestartTime:
    """Node time of an allocation between two starts of its ranks."""

    parts: dict[str, int] = field(default_factory=dict)
    iterations: int = 0
    """Steps that count."""
    redone_iterations: int = 0


class Ledger:
    """A cursor, and the time booked up to it, for all nodes of an allocation.

    Some of the nodes train, some are spare, some are given up: they were lost, and the job continues without them. When
    Slurm notices a loss, it removes the node from the job, and its time is no longer booked.
    """

    def __init__(self, allocation: NodeAllocation, sink: BookedPartSink | None = None) -> None:
        self.start = self.cursor = to_microseconds(allocation.start)
        self.end = max(self.start, to_microseconds(allocation.end))
        self.restarts = [RestartTime()]
        self.stepped = 0
        """Microseconds in which steps that count were computed."""
        self.resized = [to_microseconds(time) for time, _ in allocation.resized]
        """Times at which the number of nodes changed, increasing."""
        self._nodes = allocation.nodes
        self._left = [nodes for _, nodes in allocation.resized]
        self._training, self._spare = allocation.nodes - allocation.spare_nodes, allocation.spare_nodes
        self._sink = sink

    @property
    def training(self) -> int:
        """Number of training nodes; below the number at the last restart if Slurm noticed a loss first."""
        return min(self._training, self._nodes)

    def next_restart(self, failed: FailedRestart) -> None:
        """Book the following time for the next start of the ranks, without the lost nodes."""
        self.restarts.append(RestartTime())
        alive = max(0, self._training + self._spare - len(failed.lost))
        self._training = min(failed.nodes or self._training, alive)
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
                self._put(part, amount * self._nodes, time)
            else:
                self._put(part, amount * training, time)
                idle += amount
        self.stepped += amounts.get("step", 0)
        self._put("spare", idle * spare, time)
        self._put("given up", idle * (self._nodes - training - spare), time)
        self.cursor = time

    def _put(self, part: str, amount: int, time: int) -> None:
        if amount:
            parts = self.restarts[-1].parts
            parts[part] = parts.get(part, 0) + amount
            if self._sink is not None:
                self._sink(part, amount, self.cursor, time)
