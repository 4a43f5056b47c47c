"""A process that makes one text after the other for a server, and is begun anew where it was killed."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection

from relayrun.errors import RelayrunError

WorkItem = tuple["Future[str]", Callable[..., str], tuple[object, ...]]


class ReportWorker:
    """Makes one thing after the other in a process of its own, which begins with the first.

    Args:
        prepare: is called in the process first.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._prepare = prepare
        self._lock = threading.RLock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._link: Connection | None = None
        self._waiting: queue.SimpleQueue[WorkItem | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False

    def begin(self, make: Callable[..., str], *values: object) -> Future[str]:
        """Have the process call `make` with these values, once it is done with what it was given before.

        The future raises what `make` raises, and RelayrunError where the process has ended over it, or after `end`.
        """
        made: Future[str] = Future()
        with self._lock:  # or `end` would come between
            if self._ended:
                made.set_exception(RelayrunError("the server has ended"))
                return made
            if self._thread is None:
                self._running()
                thread = threading.Thread(target=self._serve, daemon=True)
                thread.start()
                self._thread = thread
            self._waiting.put((made, make, values))
        return made

    def end(self) -> None:
        """End the process, whatever it does; what was to be made raises RelayrunError."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
        if self._process is not None:
            self._process.join()

    def _serve(self) -> None:
        while (work := self._waiting.get()) is not None:
            made, make, values = work
            try:
                made.set_result(self._made(make, values))
            except Exception as error:
                made.set_exception(error)

    def _made(self, make: Callable[..., str], values: tuple[object, ...]) -> str:
        link = self._running()
        try:
            link.send((make, values))
            done, found = link.recv()
        except (EOFError, OSError):
            raise RelayrunError(
                f"the process that made it has ended ({self._how()})",
                hint="ask again; where that is killed too, memory may be short",
            ) from None
        if not done:
            raise found
        return str(found)

    def _running(self) -> Connection:
        """Return the way to the process; it is begun where there is none."""
        with self._lock:
            if self._ended:
                raise RelayrunError("the server has ended")
            if self._link is None or self._process is None or not self._process.is_alive():
                context = multiprocessing.get_context("spawn")
                self._link, other = context.Pipe()
                self._process = context.Process(target=_run_worker, args=(other, self._prepare), daemon=True)
                self._process.start()
                other.close()
            return self._link

    def _how(self) -> str:
        """How the process has ended, in words."""
        if self._process is None:
            return "it is not known how"
        self._process.join()
        code = self._process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _run_worker(link: Connection, prepare: Callable[[], None]) -> None:
    prepare()
    while True:
        try:
            make, values = link.recv()
        except EOFError:  # the server has gone
            return
        try:
            answer: tuple[bool, object] = True, make(*values)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = False, error
        try:
            link.send(answer)
        except (AttributeError, TypeError, ValueError) as error:  # it does not travel
            link.send((False, RuntimeError(f"{answer[1]!r}: {error}")))
