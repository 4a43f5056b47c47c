"""Tells the agent of this node, if there is one, what this rank does now, and for how long it may stand still there.

| section | stands still too long after |
|---|---|
| forward, optimizer | ten steps at their 99th percentile, at least STEP_SECONDS |
| data, triggers, report, evaluation | the same, at least OTHER_SECONDS |
| save | ten saves at their 95th percentile, at least OTHER_SECONDS |
| hooks (a user's own) | `chain.hang_timeout` |
| start (loading after a rewind) | never: the supervisor looks after it |

Before STEPS steps are measured it is `chain.hang_timeout`, which is also the most that the two least numbers may be.
An evaluation and a long step come further with each micro-batch. Standard library only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relayrun.control.agent.sections import ActivityPage
from relayrun.train.reporting.timings import Timings

log = logging.getLogger(__name__)

SHORTEST_STEP_LIMIT = 60.0
SHORTEST_OTHER_LIMIT = 120.0
LIMIT_FACTOR = 10
MEASURED_STEPS = 20
"""Steps that must be measured; the limits follow after so many more."""
STEP_SECTIONS = ("forward", "optimizer")


class SectionReporter:
    """This rank's sections; nothing is written where no agent has a folder for them."""

    def __init__(self, folder: Path | None, rank: int, *, timings: Timings, hang_timeout: float) -> None:
        self._page: ActivityPage | None = None
        self._timings, self._hang_timeout = timings, hang_timeout
        self._measured_at = 0
        self._limits: dict[str, float] = {}
        self._now = "start"
        self._iteration = 0
        if folder is not None:
            try:
                self._page = ActivityPage(folder, rank)
            except OSError as error:  # the supervisor looks for hangs, too
                log.warning("the agent does not learn where this rank stands: %s", error)

    def enter(self, section: str, iteration: int | None = None) -> None:
        """This rank is now in this section, with so many iterations behind it (None: as before)."""
        self._now = section
        if iteration is not None:
            self._iteration = iteration
        if self._page is not None:
            self._page.enter(section, self._iteration, self.limit(section))

    def touch(self) -> None:
        """This rank came further within its section."""
        if self._page is not None:
            self._page.touch()

    @contextmanager
    def within(self, section: str) -> Iterator[None]:
        """Inside it is this section, and then again the one before."""
        before = self._now
        self.enter(section)
        try:
            yield
        finally:
            self.enter(before)

    def limit(self, section: str) -> float:
        """Seconds without coming further after which a rank hangs in this section."""
        if self._timings.steps_done - self._measured_at >= MEASURED_STEPS:
            self._measured_at = self._timings.steps_done
            self._limits.clear()
        if section not in self._limits:
            self._limits[section] = self._limit(section)
        return self._limits[section]

    def _limit(self, section: str) -> float:
        usual = self._timings.save_p95 if section == "save" else self._timings.step_p99
        if section == "start":  # the supervisor looks after it (chain.start_timeout)
            return math.inf
        if section == "hooks" or not self._measured_at or usual is None:
            return self._hang_timeout
        least = SHORTEST_STEP_LIMIT if section in STEP_SECTIONS else SHORTEST_OTHER_LIMIT
        return max(min(least, self._hang_timeout), LIMIT_FACTOR * usual)
