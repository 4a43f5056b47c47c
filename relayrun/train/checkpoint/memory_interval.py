"""How often the state is copied to memory: as asked, or as often as 2 % of the steps' time allow.

    cost = (seconds that training waits for a copy + by which steps beside it are longer) / (k · seconds of a step)

The smallest k for which that is below 2 % is taken, but none below 2, nor below twice the time of the neighbour's copy:
else the next one would wait for it, or no step be left to compare with that is not beside one. What is measured is the
most of all ranks, so that all take the same k. The state does not depend on it: a copy changes nothing, and a round
from an earlier copy computes the same again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, floor
from statistics import median

COPY_TIME_SHARE = 0.02
"""What copies may cost of the steps' time."""
SHORTEST_INTERVAL = 2
"""Steps between copies: the one that follows a copy is beside it, and another one is to compare with."""
FIRST_INTERVAL = 2
"""Copies that are not measured: each is the first one in its slot, whose memory is new."""
NEWEST_COPIES = 9
"""Copies whose median counts."""
USUAL_STEPS = 99
"""Steps without a copy beside them whose median counts."""
INTERVAL_SLACK = 0.75
"""A shorter interval is taken only below this part of the present one: measurements vary."""


@dataclass(frozen=True, kw_only=True)
class CopyTimes:
    """Seconds at the median of the newest copies and steps, on the slowest rank."""

    copy: float
    """Training waits for one so long."""
    beside: float
    """Steps beside the way of one take so much longer, all of them together."""
    neighbour: float
    """One is on its way to the next node so long, beside the steps; 0 where there is none."""
    step: float

    @property
    def interval(self) -> int:
        """The smallest number of steps between copies that costs less than SHARE of their time, and waits for none."""
        each = 1 + floor((self.copy + self.beside) / (COPY_TIME_SHARE * self.step))
        return max(SHORTEST_INTERVAL, each, ceil(2 * self.neighbour / self.step))

    def cost(self, interval: int) -> float:
        """What a copy every `interval` steps costs, as a part of the steps' time."""
        return (self.copy + self.beside) / (interval * self.step)


class StepSlowdown:
    """By how much a copy makes the steps longer that run while it is on its way to the next node.

    It takes processors, memory and network from them. So does the first step after a copy that goes nowhere: the caches
    hold what was copied. Steps are compared with those of a batch of the same size.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=USUAL_STEPS)
        self._beside: list[float] = []
        self._under_way = False
        self._samples = 0

    def copied(self) -> None:
        """A copy was made; the next step runs beside it."""
        self._beside.clear()
        self._under_way = True

    def stepped(self, seconds: float, *, samples: int, under_way: bool) -> None:
        """A step over so many samples took so long.

        `under_way`: the copy still is on its way, so that the next step is beside it.
        """
        if samples != self._samples:
            self._samples = samples
            self._usual.clear()
            self._beside.clear()
        (self._beside if self._under_way else self._usual).append(seconds)
        self._under_way = under_way

    @property
    def longer(self) -> float:
        """Seconds, of all steps beside the last copy; below 0 where they were shorter, 0 where nobody knows."""
        return sum(self._beside) - len(self._beside) * median(self._usual) if self._usual else 0.0


class CopyInterval:
    """When the next copy is due; the same on all ranks.

    Args:
        asked: steps between copies; None: they are chosen.
        at: the iteration from which training starts, of which there is a copy, or the checkpoint.
        known: the interval that an earlier round of this attempt had chosen.
    """

    def __init__(self, asked: int | None, *, at: int, known: int | None = None) -> None:
        self._chosen = asked is None
        self.steps = asked or max(SHORTEST_INTERVAL, known or SHORTEST_INTERVAL)
        self._last = at
        self._copies: deque[float] = deque(maxlen=NEWEST_COPIES)
        self._beside: deque[float] = deque(maxlen=NEWEST_COPIES)
        self._neighbours: deque[float] = deque(maxlen=NEWEST_COPIES)
        self._unmeasured = FIRST_INTERVAL

    def due(self, iteration: int) -> bool:
        """Whether the state of this iteration is to be copied."""
        self._last = min(self._last, iteration)  # training may have gone back
        if iteration == self._last:
            return False
        return iteration - self._last >= self.steps if self._chosen else iteration % self.steps == 0

    def copied(self, iteration: int, *, copy: float, beside: float, neighbour: float, step: float) -> CopyTimes | None:
        """A copy was made, at these seconds (those of a step at the median); return why the interval is now another.

        None where it stays what it was. `beside`, `neighbour`: of the copy before this one.
        """
        self._last = iteration
        if not self._chosen or step <= 0:
            return None
        if self._unmeasured:
            self._unmeasured -= 1
            return None
        for seen, seconds in ((self._copies, copy), (self._beside, beside), (self._neighbours, neighbour)):
            seen.append(seconds)
        measured = CopyTimes(
            copy=median(self._copies),
            beside=max(0.0, median(self._beside)),
            neighbour=median(self._neighbours),
            step=step,
        )
        wanted = measured.interval
        if len(self._copies) > 1 and INTERVAL_SLACK * self.steps < wanted <= self.steps:
            return None
        self.steps = wanted
        return measured
