"""Books the time of the nodes of a stay into parts, with a cursor that goes from its start to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from relayrun.control.rundir.rounds import FailedRestart
from relayrun.watch.goodput.facts import NodeAllocation
from relayrun.watch.goodput.parts import WHOLE_ALLOCATION_PARTS

MICROSECONDS_PER_SECOND = 1_000_000
"""Microseconds."""

BookedPartSink = Callable[[str, int, int, int], None]
"""Is told of a part, its microseconds of all nodes, and between which two times (microseconds since 1970) they lie."""


def to_microseconds(seconds: float) -> int:
    """Seconds as whole microseconds."""
    return round(seconds * MICROSECONDS_PER_SECOND)


@dataclass(kw_only=True)
class RestartTime:
    """What the nodes of a stay did in one round of its ranks; see `Booked`."""

    parts: dict[str, int] = field(default_factory=dict)
    iterations: int = 0
    """Steps that count."""
    redone_iterations: int = 0


class Ledger:
    """The cursor, and what has been booked up to it, for all nodes of a stay.

    Of its nodes some train, some are spare, and some are given up: these have been lost, and the job goes on without
    them. Slurm takes a lost one from the job when it has noticed the loss too, and books it no more from then on.
    """

    def __init__(self, stay: NodeAllocation, sink: BookedPartSink | None = None) -> None:
        self.start = self.cursor = to_microseconds(stay.start)
        self.end = max(self.start, to_microseconds(stay.end))
        self.rounds = [RestartTime()]
        self.stepped = 0
        """Microseconds in which steps were computed that count."""
        self.resized = [to_microseconds(time) for time, _ in stay.resized]
        """When the job had another number of nodes, rising."""
        self._nodes = stay.nodes
        self._left = [nodes for _, nodes in stay.resized]
        self._training, self._spare = stay.nodes - stay.spare_nodes, stay.spare_nodes
        self._sink = sink

    @property
    def training(self) -> int:
        """How many nodes train; fewer than the round began with, where Slurm has noticed a loss first."""
        return min(self._training, self._nodes)

    def next_round(self, failed: FailedRestart) -> None:
        """What follows is of the next round, without the nodes that were lost."""
        self.rounds.append(RestartTime())
        alive = max(0, self._training + self._spare - len(failed.lost))
        self._training = min(failed.nodes or self._training, alive)
        self._spare = alive - self._training

    def until(self, part: str, time: int) -> None:
        """All up to this time is this part; nothing where that lies behind the cursor."""
        time = min(time, self.end)
        if time > self.cursor:
            self.mixed({part: time - self.cursor}, time)

    def mixed(self, amounts: Mapping[str, int], time: int) -> None:
        """All up to this time, which is not behind the end, is these parts; they sum to it."""
        rest = dict(amounts)
        while self.resized and self.resized[0] < time:  # in which order the parts came is not known
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
        """The same, where the number of nodes does not change meanwhile."""
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
            parts = self.rounds[-1].parts
            parts[part] = parts.get(part, 0) + amount
            if self._sink is not None:
                self._sink(part, amount, self.cursor, time)
