"""An iterator that is read ahead in a thread."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from relayrun.tokens.stores.urls import READER_CLOSED

T = TypeVar("T")
_POLL_SECONDS = 0.5
"""Seconds between two looks of a waiting thread at `_closing`."""
_EXIT_SECONDS = 5.0
"""Seconds that the exit of a process waits for its reading threads."""


class _EndOfItems:
    """Marks the end of the iterator, with the error that ended it."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Generic[T]):
    """Reads up to `depth` items of an iterator ahead in a thread, none before there is room; 0 starts no thread.

    `next` raises the iterator's error behind the items before it. The thread is a daemon: an exit waits `_EXIT_SECONDS`
    for a thread that hangs in the file system. A prefetcher made by that thread is closed with it.
    """

    def __init__(self, items: Iterator[T], depth: int, *, name: str, starts: bool = True) -> None:
        """`starts`: False, and `next` reads itself until `start`."""
        self._items, self._depth, self._name = items, depth, name
        self._closing = READER_CLOSED.get() or threading.Event()
        self._end: _EndOfItems | None = None
        self._queue: SimpleQueue[T | _EndOfItems] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()  # a Semaphore is Python code, which a batch of shards pays for
        for _ in range(depth):
            self._room.put(None)
        self._thread: threading.Thread | None = None
        if starts:
            self.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._end is None:
            item = self._next()
            if not isinstance(item, _EndOfItems):
                return item
            self._end = item
        raise self._end.error or StopIteration

    def start(self) -> None:
        """Start the thread, unless it was."""
        if self._depth and self._thread is None:
            self._thread = threading.Thread(target=self._read, daemon=True, name=self._name)
            _started_prefetchers.add(self)
            self._thread.start()

    def close(self) -> None:
        """Ask the thread to end after its current item."""
        self._closing.set()
        self._room.put(None)
        waiting, self._queue = self._queue, SimpleQueue()  # frees the items
        waiting.put(_EndOfItems(None))

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the thread, which another thread may be about to start."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(seconds)

    def _next(self) -> T | _EndOfItems:
        if self._thread is not None:
            item = self._queue.get()
            self._room.put(None)
            return item
        return self._read_next()

    def _read_next(self) -> T | _EndOfItems:
        try:
            return next(self._items)
        except StopIteration:
            return _EndOfItems(None)
        except BaseException as met:  # a second `next` of a failed iterator would only say StopIteration
            return _EndOfItems(met)

    def _has_room(self) -> bool:
        with suppress(Empty):
            self._room.get(timeout=_POLL_SECONDS)
            return True
        return False

    def _read(self) -> None:
        READER_CLOSED.set(self._closing)
        item: T | _EndOfItems | None = None
        while not isinstance(item, _EndOfItems):
            del item  # not kept until the next one is read
            while not self._has_room() and not self._closing.is_set():
                pass
            item = _EndOfItems(None) if self._closing.is_set() else self._read_next()
            self._queue.put(item)


_started_prefetchers: weakref.WeakSet[Prefetcher[Any]] = weakref.WeakSet()


@atexit.register
def _close_prefetchers() -> None:
    """Stop the threads first: a read below a URL calls Python from Arrow, and hangs or kills a dying interpreter."""
    end = time.monotonic() + _EXIT_SECONDS
    found = [*_started_prefetchers]
    for ahead in found:
        ahead.close()
    for ahead in found:
        ahead.join(max(0.0, end - time.monotonic()))
