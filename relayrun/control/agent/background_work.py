"""Work that may wait for a file system or a program, beside the one thread of an agent, whose heartbeats go on.

Each piece has a thread. One that waits in the kernel cannot be ended; nobody waits for it longer than it has time.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class BackgroundWork:
    """What is done beside the thread that made this, and what that thread does with it then.

    Args:
        watch: where the end of each piece is registered; the data of each key is what to call then.
    """

    def __init__(self, watch: selectors.BaseSelector) -> None:
        self._done: SimpleQueue[tuple[int, Callable[[], None]]] = SimpleQueue()
        self._until: dict[int, tuple[float, Callable[[], None]]] = {}
        """When each piece has had its time, by `time.monotonic`, and what to do then."""
        self._number = 0
        self._heard, self._told = os.pipe()
        os.set_blocking(self._heard, False)
        os.set_blocking(self._told, False)
        watch.register(self._heard, selectors.EVENT_READ, self._take)

    def start(
        self,
        work: Callable[[], T],
        then: Callable[[T], None],
        *,
        seconds: float,
        otherwise: Callable[[str], T],
    ) -> None:
        """Do `work` in a thread, and call `then` with its result in this one, by `attend` or the selector.

        After so many `seconds`, or where it raises, `then` is called with what `otherwise` makes of the words for that.
        """
        self._number += 1
        number = self._number
        self._until[number] = (
            time.monotonic() + seconds,
            lambda: then(otherwise(f"no answer within {seconds:g} s")),
        )

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                words = f"{type(error).__name__}: {error}"
                self._done.put((number, lambda: then(otherwise(words))))
            else:
                self._done.put((number, lambda: then(result)))
            with contextlib.suppress(BlockingIOError):  # then it is awake
                os.write(self._told, b".")

        threading.Thread(target=run, name="aside", daemon=True).start()

    def attend(self) -> None:
        """Now and then: take what is done, and see whose time is over."""
        self._take()
        now = time.monotonic()
        for number, (until, late) in [*self._until.items()]:
            if now > until and self._until.pop(number, None) is not None:
                late()

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._heard, 4096)
        with contextlib.suppress(Empty):
            while True:
                number, then = self._done.get_nowait()
                if self._until.pop(number, None) is not None:  # else its time was over
                    then()
