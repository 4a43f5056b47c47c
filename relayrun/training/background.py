"""A save under way, in a thread of its rank.

No fork and no server process, which a signal to the whole job would kill. The rank's main thread goes on with
training; it waits only before it changes what is not copied yet, and where it wants the result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from relayrun.rundir.records import Commit


class BackgroundSave:
    """Runs `write` at once. The ranks' threads talk to each other: all ranks begin the same saves in the same order."""

    def __init__(self, iteration: int, write: Callable[[Callable[[], None]], Commit]) -> None:
        """`write` is given what it must call when the state is copied; it returns the commit, or raises."""
        self.iteration = iteration
        self._began = time.monotonic()
        self._copied = threading.Event()
        self._commit: Commit | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"save-{iteration}", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[Callable[[], None]], Commit]) -> None:
        try:
            self._commit = write(self._copied.set)
        except BaseException as error:
            self._error = error
        finally:
            self._copied.set()

    @property
    def over(self) -> bool:
        """Whether this rank's part has come to an end, good or bad."""
        return not self._thread.is_alive()

    @property
    def copied(self) -> bool:
        """Whether the state may change."""
        return self._copied.is_set()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def wait_for_copy(self) -> None:
        """Return when the state may change."""
        self._copied.wait()

    def result(self) -> Commit:
        """Wait for the end; raises what `write` raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._commit is not None
        return self._commit
