"""Megatron's timers without synchronization: times are taken on the device, and read after it has been waited for.

megatron-core starts and stops timers by name if its configs have a function `timers`. Its own timers wait for the
device at each start and stop, and with barriers for all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

LEVELS = 2
"""Highest level of detail."""


class Timer:
    """Time between starts and stops under one name."""

    def __init__(self, marks: DeviceTimestamps, *, enabled: bool) -> None:
        self._marks, self._enabled = marks, enabled
        self._begun: Timestamp | None = None
        self._pairs: list[tuple[Timestamp, Timestamp]] = []
        self._milliseconds = 0.0

    def start(self, barrier: bool = False) -> None:
        """Start; `barrier` has no effect."""
        if self._enabled:
            self._begun = self._marks.now()

    def stop(self, barrier: bool = False) -> None:
        """Stop; without a start nothing happens."""
        if self._begun is not None:
            self._pairs.append((self._begun, self._marks.now()))
            self._begun = None

    def collect(self) -> None:
        """Add the measured pairs; the device must have passed them."""
        for pair in self._pairs:
            self._milliseconds += self._marks.between(*pair)
        self._pairs.clear()

    def take(self) -> float:
        """Return the milliseconds since the last call, of pairs that the device has passed."""
        self.collect()
        taken, self._milliseconds = self._milliseconds, 0.0
        return taken


Timestamp = float | torch.cuda.Event


class DeviceTimestamps:
    """Timestamps: reused events in a GPU stream, or seconds of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._unused: list[torch.cuda.Event] = []

    def now(self) -> Timestamp:
        """Return the time at which the device reaches this point."""
        if not self._on_gpu:
            return time.perf_counter()
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: Timestamp, second: Timestamp) -> float:
        """Return milliseconds between two timestamps. Both may be reused afterwards."""
        if isinstance(first, float):
            assert isinstance(second, float)
            return 1e3 * (second - first)
        assert not isinstance(second, float)
        milliseconds: float = first.elapsed_time(second)
        self._unused += (first, second)
        return milliseconds


class Timers:
    """Function `timers` of megatron-core's configs."""

    def __init__(self, level: int, device: torch.device) -> None:
        """`level`: `tracking.timing_log_level`."""
        self.level = level
        self._marks = DeviceTimestamps(device)
        self._timers: dict[str, Timer] = {}
        self._iterations = 0

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer of this name; the first call sets its level, by default the most detailed."""
        if name not in self._timers:
            shown = (LEVELS if log_level is None else log_level) <= self.level
            self._timers[name] = Timer(self._marks, enabled=shown)
        return self._timers[name]

    def collect(self) -> None:
        """Add up an iteration; call it after the device has been waited for."""
        self._iterations += 1
        for timer in self._timers.values():
            timer.collect()

    def take(self) -> dict[str, float]:
        """Return milliseconds per iteration since the last call, by name of each timer that ran."""
        iterations, self._iterations = max(1, self._iterations), 0
        return {name: taken / iterations for name, timer in self._timers.items() if (taken := timer.take())}


def range_over_ranks(found: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the minimum and maximum by name over what `take` returned on the ranks that have the name."""
    names = sorted({name for each in found for name in each})
    values = {name: [each[name] for each in found if name in each] for name in names}
    return {name: {"min": min(each), "max": max(each)} for name, each in values.items()}
