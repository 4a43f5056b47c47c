"""How often the state is copied to memory: as asked, or as often as 2 % of the steps' time allow.

    cost = seconds that training waits for a copy / (k · seconds of a step) < 2 %

The smallest k for which that holds is taken, but none that is shorter than the neighbour's copy takes beside the steps,
for which the next one would wait. What is measured is the most of all ranks, so that all take the same k. The state
does not depend on it: a copy changes nothing, and a round from an earlier copy computes the same again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, floor
from statistics import median

SHARE = 0.02
"""What copies may cost of the steps' time."""
FIRST = 2
"""Copies that are not measured: each is the first one in its slot, whose memory is new."""
NEWEST = 9
"""Copies whose median counts."""
SLACK = 0.75
"""A shorter interval is taken only below this part of the present one: measurements vary."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds at the median of the newest copies and steps, on the slowest rank."""

    copy: float
    """Training waits for one so long."""
    neighbour: float
    """One is on its way to the next node so long, beside the steps; 0 where there is none."""
    step: float

    @property
    def interval(self) -> int:
        """The smallest number of steps between copies that costs less than SHARE of their time, and waits for none."""
        return max(1, 1 + floor(self.copy / (SHARE * self.step)), ceil(self.neighbour / self.step))

    def cost(self, interval: int) -> float:
        """What a copy every `interval` steps costs, as a part of the steps' time."""
        return self.copy / (interval * self.step)


class CopyInterval:
    """When the next copy is due; the same on all ranks.

    Args:
        asked: steps between copies; None: they are chosen.
        at: the iteration from which training starts, of which there is a copy, or the checkpoint.
        known: the interval that an earlier round of this attempt had chosen.
    """

    def __init__(self, asked: int | None, *, at: int, known: int | None = None) -> None:
        self._chosen = asked is None
        self.steps = asked or known or 1
        self._last = at
        self._copies: deque[float] = deque(maxlen=NEWEST)
        self._neighbours: deque[float] = deque(maxlen=NEWEST)
        self._unmeasured = FIRST

    def due(self, iteration: int) -> bool:
        """Whether the state of this iteration is to be copied."""
        self._last = min(self._last, iteration)  # training may have gone back
        if iteration == self._last:
            return False
        return iteration - self._last >= self.steps if self._chosen else iteration % self.steps == 0

    def copied(self, iteration: int, *, copy: float, neighbour: float, step: float) -> Measured | None:
        """A copy was made, at these seconds (those of a step at the median); return why the interval is now another.

        None where it stays what it was. `neighbour`: of the copy before this one.
        """
        self._last = iteration
        if not self._chosen or step <= 0:
            return None
        if self._unmeasured:
            self._unmeasured -= 1
            return None
        self._copies.append(copy)
        self._neighbours.append(neighbour)
        measured = Measured(copy=median(self._copies), neighbour=median(self._neighbours), step=step)
        wanted = measured.interval
        if len(self._copies) > 1 and SLACK * self.steps < wanted <= self.steps:
            return None
        self.steps = wanted
        return measured
