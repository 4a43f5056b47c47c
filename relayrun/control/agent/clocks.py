"""By how much the clocks of the nodes differ, over the connections of their agents.

    coordinator → agent    clock {sent}
    agent → coordinator    clock {sent, here}

A node's clock read `here` at some moment between `sent` and the answer's arrival. So its offset is known up to half of
the time that the answer took, and of several questions the one that was answered fastest counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Mapping

from relayrun.control.agent.lines import Message, MessageSocket

CLOCK_QUESTIONS = 5
"""So many are asked at a time."""


class ClockOffsets:
    """The offsets of the nodes' clocks against this one, by node number."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[float, float]] = {}
        """Half of the time that the fastest answer took, and the offset by it."""

    def ask(self, links: Mapping[int, MessageSocket], nodes: Collection[int]) -> None:
        """Ask these nodes anew; what was known of them is forgotten."""
        for node in nodes:
            self._found.pop(node, None)
            for _ in range(CLOCK_QUESTIONS):
                links[node].send("clock", sent=time.time())

    def hear(self, node: int, answer: Message) -> None:
        """Take an answer that has just come."""
        sent, here, now = float(answer["sent"]), float(answer["here"]), time.time()
        half = max(0.0, now - sent) / 2
        self._found[node] = min(self._found.get(node, (float("inf"), 0.0)), (half, here - sent - half))

    def offsets(self) -> dict[int, tuple[float, float]]:
        """Offset of each node against the median of all, and how uncertain it is; seconds. Empty below two nodes."""
        if len(self._found) < 2:
            return {}
        middle = statistics.median(offset for _, offset in self._found.values())
        return {node: (offset - middle, half) for node, (half, offset) in self._found.items()}
