"""A save under way, in a thread of its rank.

No fork and no server process, which a signal to the whole job would kill. The rank's main thread goes on with
training; it waits only before it changes what is not copied yet, and where it wants the result. From the copy on
the save stands behind training on the processors: where both want the same one, training gets most of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from relayrun.control.rundir.records import CheckpointCommit

BACKGROUND_NICE = 15
"""How far a save beside training stands behind it: a thirtieth of a contended processor (weights of nice(2), sched(7)).
At 19 it would get a seventieth, and training, waiting for the interpreter's lock in its hands, would wait long."""


class BackgroundSave:
    """Runs `write` at once. The ranks' threads talk to each other: all ranks begin the same saves in the same order."""

    def __init__(
        self, iteration: int, write: Callable[[Callable[[], None]], CheckpointCommit], *, beside: bool
    ) -> None:
        """`write` is given what it must call when the state is copied; it returns the commit, or raises.

        `beside`: training goes on meanwhile; else it waits for the result.
        """
        self.iteration = iteration
        self._beside = beside
        self._began = time.monotonic()
        self._copied = threading.Event()
        self._commit: CheckpointCommit | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"save-{iteration}", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[Callable[[], None]], CheckpointCommit]) -> None:
        try:
            self._commit = write(self._state_is_copied)
        except BaseException as error:
            self._error = error
        finally:
            self._copied.set()

    def _state_is_copied(self) -> None:
        self._copied.set()
        if self._beside:  # on Linux a priority is of a thread, and the threads that it starts have it too
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + BACKGROUND_NICE)

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

    def result(self) -> CheckpointCommit:
        """Wait for the end; raises what `write` raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._commit is not None
        return self._commit
