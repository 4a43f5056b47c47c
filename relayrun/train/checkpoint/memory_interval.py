"""Interval of the copies in memory: as configured, or from the measured cost of a copy. Standard library only.

    cost = (seconds that training waits for a copy + added seconds of steps beside it) / (k · seconds of a step)

The interval k in steps is the smallest value with a cost below 2 %, at least 2, and at least twice the time of the
neighbour's copy: else the next copy would wait for it, or every step would run beside a copy and none would be left for
comparison. Measurements are the maximum over ranks, so all ranks choose the same k. The state does not depend on k: a
copy changes nothing, and a restart from an earlier copy computes the same again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, floor
from statistics import median

COPY_TIME_SHARE = 0.02
"""Largest cost of copies as a fraction of the steps' time."""
SHORTEST_INTERVAL = 2
"""Steps between copies: one step runs beside the copy, and another is for comparison."""
FIRST_INTERVAL = 2
"""Unmeasured copies: each is the first in its slot, whose memory is new."""
NEWEST_COPIES = 9
"""Copies whose median counts."""
USUAL_STEPS = 99
"""Steps without a copy beside them whose median counts."""
INTERVAL_SLACK = 0.75
"""A shorter interval must be below this fraction of the present one, since measurements vary."""


@dataclass(frozen=True, kw_only=True)
class MedianCopyAndStepTime:
    """Median seconds of the newest copies and steps, on the slowest rank."""

    copy: float
    """Wait of training for a copy."""
    beside: float
    """Added time of all steps beside one copy."""
    neighbour: float
    """Transfer to the next node, beside the steps; 0 without a next node."""
    step: float

    @property
    def interval(self) -> int:
        """Least steps between copies with a cost below COPY_TIME_SHARE and without a wait for the previous copy."""
        each = 1 + floor((self.copy + self.beside) / (COPY_TIME_SHARE * self.step))
        return max(SHORTEST_INTERVAL, each, ceil(2 * self.neighbour / self.step))

    def cost(self, interval: int) -> float:
        """Return the cost of a copy every `interval` steps, as a fraction of the steps' time."""
        return (self.copy + self.beside) / (interval * self.step)


class StepSlowdown:
    """Measures by how much a copy lengthens the steps that run during its transfer to the next node.

    The transfer takes processors, memory and network. Without a transfer the first step is slower, too: the caches hold
    the copy. Steps are compared with steps of an equal batch size.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=USUAL_STEPS)
        self._beside: list[float] = []
        self._under_way = False
        self._samples = 0

    def record_copy(self) -> None:
        """Record a copy; the next step runs beside it."""
        self._beside.clear()
        self._under_way = True

    def record_step(self, seconds: float, *, samples: int, under_way: bool) -> None:
        """Record the seconds of a step over `samples` samples.

        `under_way`: the transfer still runs, so the next step is beside it, too.
        """
        if samples != self._samples:
            self._samples = samples
            self._usual.clear()
            self._beside.clear()
        (self._beside if self._under_way else self._usual).append(seconds)
        self._under_way = under_way

    @property
    def added_seconds(self) -> float:
        """Added seconds of all steps beside the last copy; negative if they were shorter, 0 if unknown."""
        return sum(self._beside) - len(self._beside) * median(self._usual) if self._usual else 0.0


class MemoryCopySchedule:
    """Decides when the next copy is due; equal on all ranks.

    Args:
        asked: steps between copies; None: chosen from measurements.
        at: the iteration from which training starts, which has a copy or a checkpoint.
        known: the interval that an earlier restart of this attempt had chosen.
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
        """True if the state of this iteration is to be copied."""
        self._last = min(self._last, iteration)  # after a rollback
        if iteration == self._last:
            return False
        return iteration - self._last >= self.steps if self._chosen else iteration % self.steps == 0

    def record_copy(
        self, iteration: int, *, copy: float, beside: float, neighbour: float, step: float
    ) -> MedianCopyAndStepTime | None:
        """Record the seconds of a copy and of a median step; return the measurements if the interval changes, else
        None.

        `beside`, `neighbour`: of the previous copy.
        """
        self._last = iteration
        if not self._chosen or step <= 0:
            return None
        if self._unmeasured:
            self._unmeasured -= 1
            return None
        for seen, seconds in ((self._copies, copy), (self._beside, beside), (self._neighbours, neighbour)):
            seen.append(seconds)
        measured = MedianCopyAndStepTime(
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
