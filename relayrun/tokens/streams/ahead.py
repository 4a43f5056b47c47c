"""An iterator that is read ahead by a thread of its own."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Iterator
from queue import Empty, Full, Queue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_POLL_SECONDS = 1.0
"""How often a thread that waits for room looks whether it is still wanted."""
_EXIT_SECONDS = 5.0
"""How long a program that ends waits for what its threads are reading."""


class _EndOfItems:
    """What comes behind the last item: the error that ended the iterator, or none."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Generic[T]):
    """Up to `depth` items of an iterator before they are asked for; with 0 there is no thread.

    What the iterator raises, `next` raises behind the items that came before. The thread is a daemon: a process that
    ends waits some seconds for one that hangs in the file system, and no longer.
    """

    def __init__(self, items: Iterator[T], depth: int, *, name: str) -> None:
        self._items = items
        self._closing = threading.Event()
        self._end: _EndOfItems | None = None
        self._queue: Queue[T | _EndOfItems] = Queue(max(1, depth))
        self._thread = threading.Thread(target=self._read, daemon=True, name=name) if depth else None
        if self._thread is not None:
            _started_prefetchers.add(self)
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._end is None:
            item = self._next()
            if not isinstance(item, _EndOfItems):
                return item
            self._end = item
        raise self._end.error or StopIteration

    def close(self) -> None:
        """Let the thread end when it has read what it is reading."""
        self._closing.set()
        try:
            while True:
                self._queue.get_nowait()
        except Empty:
            pass

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, so long at most."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _next(self) -> T | _EndOfItems:
        if self._thread is not None:
            return self._queue.get()
        try:
            return next(self._items)
        except StopIteration:
            return _EndOfItems(None)
        except BaseException as met:  # an iterator that has raised only says that it is at its end
            return _EndOfItems(met)

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                self._put(item)
                if self._closing.is_set():
                    return
        except BaseException as met:
            error = met
        self._put(_EndOfItems(error))

    def _put(self, item: T | _EndOfItems) -> None:
        while not self._closing.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
                return
            except Full:
                continue


_started_prefetchers: weakref.WeakSet[Prefetcher[Any]] = weakref.WeakSet()


@atexit.register
def _close_prefetchers() -> None:
    """A thread that Arrow lets call Python, to read below a URL, hangs or kills an interpreter that is ending."""
    end = time.monotonic() + _EXIT_SECONDS
    found = [*_started_prefetchers]
    for ahead in found:
        ahead.close()
    for ahead in found:
        ahead.join(max(0.0, end - time.monotonic()))
