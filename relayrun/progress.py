"""One line on a terminal that says how far a long command is: share, rate, and remaining time.

A command opens a `Progress`; whatever reads or writes for it calls `count`, which does nothing in all other programs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from relayrun.terminal import inert, raw_stream

Item = TypeVar("Item")
_INTERVAL = 0.5
"""Seconds between two lines; a command that ends before the first shows none."""
_open: list[Progress] = []
"""The work in progress in this process, the innermost last."""


def has_terminal() -> bool:
    """Return whether a person looks at what this process prints."""
    return sys.stdout.isatty() and sys.stderr.isatty()


class Progress:
    """Work of `total` units, or of an unknown number (None), shown in the `with` block, on a terminal alone."""

    def __init__(self, what: str, total: int | None, unit: str = "bytes") -> None:
        self._what, self._total, self._unit = what, total if total is None else max(total, 1), unit
        self._done, self._lock, self._process = 0, threading.Lock(), os.getpid()
        self._began = time.monotonic()
        self._next = self._began + _INTERVAL if has_terminal() else float("inf")

    def __enter__(self) -> Progress:
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        clear_line()
        _open.remove(self)

    def add(self, count: int) -> None:
        """Count units that are done; cheap enough for every piece of them. Threads may call it."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now >= self._next and os.getpid() == self._process:
                self._next = now + _INTERVAL
                _write(self._line(now - self._began))

    def follow(self, done: Callable[[], int]) -> None:
        """Show the work of other processes, of which `done` returns the units; it takes a tenth of the time at most."""
        if (begin := time.monotonic()) >= self._next:
            self.add(done() - self._done)
            self._next = max(self._next, time.monotonic() + 10 * (time.monotonic() - begin))

    def _line(self, seconds: float) -> str:
        rate = self._done / seconds
        if self._total is None:
            return f"{self._what}: {short_number(self._done)} {self._unit}, {short_number(rate)} per second"
        done = min(self._done, self._total)
        share = f"{self._what}: {done / self._total:.0%} of {short_number(self._total)} {self._unit}"
        if not done:
            return share
        left = round((self._total - done) / rate)
        clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
        return f"{share}, {short_number(rate)} per second, {clock} left"


def count(units: int) -> None:
    """Count units of the innermost work in progress, if any."""
    if _open:
        _open[-1].add(units)


def counted(items: Iterable[Item]) -> Iterator[Item]:
    """Yield all items, and count each as a unit."""
    for item in items:
        count(1)
        yield item


def clear_line() -> None:
    """Clear the line of the work in progress: another line follows."""
    if _open and has_terminal():
        _write("")


def short_number(value: float) -> str:
    """Format a number: `1.2M`, `350`, `0.03`, `3e-05`."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{inert(text)[:width]}", end="", file=raw_stream(sys.stderr), flush=True)
