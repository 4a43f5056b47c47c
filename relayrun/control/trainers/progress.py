"""How the lines of a user's program tell of its iterations: text that a pattern finds, or JSON.

    Step 12/100 | loss 2.31            pattern: Step (?P<iteration>\\d+)/\\d+ \\| loss (?P<loss>\\S+)
    {"step": 12, "loss": 2.31}         a file of JSON lines

A pattern is a person's own, and a line may be anything. So neither may hold up who looks at them: a pattern that takes
long on a line is interrupted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from relayrun.control.trainers.base import ObservedStep

log = logging.getLogger(__name__)

ITERATION_KEYS = ("iteration", "step", "global_step")
"""What programs call the iteration in a line of JSON; the first that is there counts."""

LINE_SECONDS = 0.25
"""Processor time that a pattern may take on one line."""
LOOK_SECONDS = 1.0
"""Seconds for all lines of one look; those behind are passed over."""


class LogPattern:
    """Finds the steps in lines of a log. A line on which the pattern takes long is passed over, which is said once."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._complained = False

    def steps(self, lines: Iterable[str]) -> Iterator[ObservedStep]:
        """The steps that these lines tell of."""
        spent = 0.0
        for line in lines:
            if spent > LOOK_SECONDS:
                continue
            begun = time.thread_time()
            try:
                with _time_limited(LINE_SECONDS):
                    found = self._pattern.search(line)
            except _PatternTooSlow:
                found = None
                spent += time.thread_time() - begun
                self._complain(line)
            if found is not None and (step := _make_step(found.groupdict())) is not None:
                yield step

    def _complain(self, line: str) -> None:
        if not self._complained:
            log.warning(
                "the pattern of progress, %r, takes too long on a line of the log, and passes over such lines: %.100r; "
                "make it simpler: a + or * within a group that is repeated is what takes long",
                self._pattern.pattern,
                line,
            )
        self._complained = True


def json_step(line: str) -> ObservedStep | None:
    """The step that a line of JSON tells of; None where it tells of none.

    Its numbers are metrics, those of its object `metrics` where it has one; what is no number is left out.
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    iteration = next((entry[name] for name in ITERATION_KEYS if name in entry), None)
    metrics = entry["metrics"] if isinstance(entry.get("metrics"), dict) else entry
    return _make_step({**metrics, "iteration": iteration})


def _make_step(values: Mapping[str, Any]) -> ObservedStep | None:
    numbers = {name: number for name, value in values.items() if (number := _finite_number(value)) is not None}
    iteration = numbers.pop("iteration", None)
    if iteration is None or iteration < 0:
        return None
    for name in ITERATION_KEYS:
        numbers.pop(name, None)
    seconds, samples = numbers.pop("step_seconds", None), numbers.pop("consumed_samples", None)
    return ObservedStep(
        iteration=int(iteration),
        seconds=seconds,
        consumed_samples=None if samples is None else int(samples),
        metrics=numbers,
    )


def _finite_number(value: object) -> float | None:
    """A finite number, or text that is one; JSON has no others."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


class _PatternTooSlow(Exception):
    pass


@contextlib.contextmanager
def _time_limited(seconds: float) -> Iterator[None]:
    """Raise _TooSlow inside after so much processor time of this process.

    A search looks for signals now and then, and nothing else ends one. In another thread than the main one, where
    Python hears no signals, nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise _PatternTooSlow

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
