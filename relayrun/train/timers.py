"""Megatron's timers without a wait: times are taken on the device, and read when it has been waited for anyway.

megatron-core starts and stops them by name wherever it does something worth a name, if its configs have a function
`timers`. Its own wait for the device at each start and stop, and with barriers for all other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

LEVELS = 2
"""The highest level of detail."""


class Timer:
    """The time between starts and stops of one name."""

    def __init__(self, marks: DeviceTimestamps) -> None:
        self._marks = marks
        self._begun: Timestamp | None = None
        self._pairs: list[tuple[Timestamp, Timestamp]] = []
        self.milliseconds = 0.0
        """Collected since the last `Timers.take`."""

    def start(self, barrier: bool = False) -> None:
        """Begin; `barrier`, which would let the ranks wait for each other, has no effect."""
        self._begun = self._marks.now()

    def stop(self, barrier: bool = False) -> None:
        """End what `start` began."""
        if self._begun is not None:
            self._pairs.append((self._begun, self._marks.now()))
            self._begun = None

    def collect(self) -> None:
        """Add up the pairs; the device must have passed them."""
        for pair in self._pairs:
            self.milliseconds += self._marks.between(*pair)
        self._pairs.clear()


class _Nothing(Timer):
    """Takes no time: for names above the level asked for."""

    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass


Timestamp = float | torch.cuda.Event


class DeviceTimestamps:
    """Points in time: events in the stream of a GPU, which are used again, or seconds of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._unused: list[torch.cuda.Event] = []

    def now(self) -> Timestamp:
        """When the device comes to this point."""
        if not self._on_gpu:
            return time.perf_counter()
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: Timestamp, second: Timestamp) -> float:
        """Milliseconds. Both marks may be used again afterwards."""
        if isinstance(first, float):
            assert isinstance(second, float)
            return 1e3 * (second - first)
        assert not isinstance(second, float)
        milliseconds: float = first.elapsed_time(second)
        self._unused += (first, second)
        return milliseconds


class Timers:
    """What megatron-core's configs take as `timers`."""

    def __init__(self, level: int, device: torch.device) -> None:
        """`level`: `tracking.timing_log_level`."""
        self.level = level
        self._marks = DeviceTimestamps(device)
        self._timers: dict[str, Timer] = {}
        self._iterations = 0

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer of this name, whose level is that of its first call; none: the most detailed."""
        if name not in self._timers:
            shown = (LEVELS if log_level is None else log_level) <= self.level
            self._timers[name] = Timer(self._marks) if shown else _Nothing(self._marks)
        return self._timers[name]

    def collect(self) -> None:
        """Add up an iteration. Call it when the device has been waited for."""
        self._iterations += 1
        for timer in self._timers.values():
            timer.collect()

    def take(self) -> dict[str, float]:
        """Milliseconds an iteration since the last call, by name; only of those that ran."""
        found = {}
        for name, timer in self._timers.items():
            if timer.milliseconds:
                found[name] = timer.milliseconds / max(1, self._iterations)
                timer.milliseconds = 0.0
        self._iterations = 0
        return found


def range_over_ranks(found: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """What `take` gave on each rank, as the least and the most by name, among the ranks that have the name."""
    names = sorted({name for each in found for name in each})
    values = {name: [each[name] for each in found if name in each] for name in names}
    return {name: {"min": min(each), "max": max(each)} for name, each in values.items()}
