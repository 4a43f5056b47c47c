"""A time that jumps from event to event, and programs that run in it one at a time, each in a thread of its own.

A program waits by `time.sleep`, by `signal.sigwait`, and before each of Slurm's commands. There it can be killed.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO, cast
from unittest import mock

START = 2_000_000_000.0
"""Beginning of every history, in seconds since 1970: later than the files that it makes."""
LONGEST_RUN = 2_000_000
"""Events after which a history does not end by itself."""
FIRST_PID = 1 << 30
"""No process of Linux has so high a number."""
start_thread, join_thread, strftime = threading.Thread.start, threading.Thread.join, time.strftime


def taken_lock() -> threading.Lock:
    """A turn that another program has: whoever waits for it goes on when the other one releases it."""
    lock = threading.Lock()  # a Semaphore takes three locks for one turn
    lock.acquire()
    return lock


class Killed(BaseException):
    """SIGKILL of the program that runs."""


class Program:
    """A program in a thread; it ends with an exit code, or None if it was killed."""

    def __init__(self, clock: Clock, name: str, target: Callable[[], int], environment: dict[str, str]) -> None:
        self.clock, self.name, self.target, self.environment = clock, name, target, environment
        self.pid = next(clock.pids)
        self.code: int | None = None
        self.over = False
        self.killed = False
        self.said = ""
        """What it printed."""
        self.signals: list[signal.Signals] = []
        self.heeds = frozenset[signal.Signals]()
        """Signals that wake it; other signals than SIGKILL change nothing."""
        self.kill_after_writes = -1
        """Number of changes of files before it is killed; negative: it is not."""
        self.on_end: list[Callable[[], None]] = []
        self._turn = taken_lock()
        self._wake = 0
        """Number of the wait that goes on: an older alarm does not end it."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self.killed:
                self.code = self.target()
        except Killed:
            self.killed = True
        except SystemExit as ended:
            self.code = int(ended.code or 0)
        except Exception as error:
            self.code = 1
            self.clock.note(f"{type(error).__name__}: {getattr(error, 'message', None) or error}", who=self.name)
            self.clock.errors.append(error)
        self.over = True
        self.clock.give_back()

    def resume(self) -> None:
        """Let it run until it waits or ends. Called by the clock alone."""
        if self.pid not in self.clock.programs:
            return
        if self._thread.ident is None:
            start_thread(self._thread)
        before, self.clock.running = self.clock.running, self
        for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURMD_NODENAME", "RELAYRUN_SCRIPT_TIME"):
            os.environ.pop(name, None)
        os.environ.update(self.environment)
        self._turn.release()
        self.clock.take_turn()
        self.clock.running = before
        if self.over:
            for call in self.on_end:
                call()

    def wait(self, seconds: float | None) -> None:
        """Wait so long, or until `poke`. Called by the program itself. Raises Killed."""
        if self.killed:
            raise Killed
        self._wake += 1
        number = self._wake
        if seconds is not None:
            self.clock.after(max(seconds, 0.0), lambda: self.resume() if self._wake == number else None)
        self.clock.give_back()
        self._turn.acquire()
        self._wake += 1
        if self.killed:
            raise Killed

    def in_turn(self) -> bool:
        """Return whether the caller is this program."""
        return threading.current_thread() is self._thread

    def poke(self) -> None:
        """End its wait, soon."""
        number = self._wake
        if not self.over:
            self.clock.after(0.0, lambda: self.resume() if self._wake == number else None)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        if number == signal.SIGKILL:
            self.killed = True
            self.poke()
        elif number in self.heeds:
            self.signals.append(number)
            self.poke()


class Clock:
    """The time, what happens at which time, and the program that runs."""

    def __init__(self, note: Callable[[str], None] = lambda _: None) -> None:
        self.now = START
        self.pids = itertools.count(FIRST_PID)
        self.programs: dict[int, Program] = {}
        self.running: Program | None = None
        self.errors: list[Exception] = []
        """Errors with which programs ended."""
        self.on_write: Callable[[str], None] = lambda _: None
        """Called before each change of a file, with its path; may raise OSError."""
        self.on_read: Callable[[str], None] = lambda _: None
        """The same, before a file is opened to be read."""
        self.skews: dict[str, float] = {}
        """Seconds by which the clocks of nodes are ahead."""
        self._note = note
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._turn = taken_lock()

    def note(self, text: str, *, who: str = "") -> None:
        """Keep a line of the history."""
        self._note(f"{self.now - START:9.1f} {who or (self.running.name if self.running else '')}: {text}")

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something later. Two calls of one time keep their order."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def start(self, name: str, target: Callable[[], int], environment: dict[str, str] | None = None) -> Program:
        """Start a program now."""
        program = Program(self, name, target, environment or {})
        self.programs[program.pid] = program
        program.on_end.append(lambda: self.programs.__delitem__(program.pid))
        self.after(0.0, program.resume)
        return program

    def run(self, until: float) -> None:
        """Go on to this time."""
        for _ in range(LONGEST_RUN):
            if not self._events or self._events[0][0] > until:
                break
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = max(self.now, until)

    def end(self) -> None:
        """Kill every program, so that no thread is left."""
        for program in list(self.programs.values()):
            program.killed = True
            program.resume()

    def give_back(self) -> None:
        self._turn.release()

    def take_turn(self) -> None:
        self._turn.acquire()

    def sleep(self, seconds: float) -> None:
        """`time.sleep` of the program that runs."""
        assert self.running is not None
        self.running.wait(seconds)

    def alive(self, pid: int) -> bool:
        return pid in self.programs and not self.programs[pid].killed

    def _time(self) -> float:
        """`time.time` of the program that runs, by the clock of its node."""
        node = self.running.environment.get("SLURMD_NODENAME", "") if self.running is not None else ""
        return self.now + self.skews.get(node, 0.0)

    def _kill(self, pid: int, number: int) -> None:
        if pid < FIRST_PID:
            raise AssertionError(f"a signal to a process of this machine: {pid}")
        if not self.alive(pid):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        if number:
            self.programs[pid].send(signal.Signals(number))

    def _sigwait(self, _numbers: Any) -> signal.Signals:
        program = self.running
        assert program is not None
        program.heeds = frozenset({signal.SIGTERM})
        while not program.signals:
            program.wait(None)
        return program.signals.pop()

    def only_the_program(self) -> None:
        """Refuse a second thread, whose turn the machine would decide: a history is the same each time."""
        if self.running is not None and not self.running.in_turn():
            error = AssertionError(f"{threading.current_thread().name} works beside {self.running.name}")
            self.errors.append(error)
            raise error

    @staticmethod
    def _start_thread(thread: threading.Thread) -> None:
        """A thread that a program starts does its work at once; a timer never does."""
        if not isinstance(thread, threading.Timer):
            thread.run()

    def _strftime(self, form: str, moment: Any = None) -> str:
        return strftime(form, time.localtime(self._time()) if moment is None else moment)

    def wrote(self, path: Any) -> None:
        """A program is about to change a file."""
        if (program := self.running) is None:
            return
        self.only_the_program()
        if program.kill_after_writes >= 0:
            program.kill_after_writes -= 1
            if program.kill_after_writes < 0:
                self.note("killed before it changes a file")
                program.killed = True
                raise Killed
        self.on_write(os.fsdecode(path) if not isinstance(path, int) else "")

    @contextmanager
    def installed(self, command: Callable[..., Any], start: Callable[..., Any]) -> Iterator[None]:
        """Give this process the clock, and `command` and `start` for `subprocess.run` and `Popen`."""

        def changing(call: Callable[..., Any]) -> Callable[..., Any]:
            def changed(path: Any, *rest: Any, **more: Any) -> Any:
                self.wrote(path)
                return call(path, *rest, **more)

            return changed

        opened = os.open

        def opening(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                self.wrote(path)
            elif self.running is not None:
                self.on_read(os.fsdecode(path))
            return opened(path, flags, *rest, **more)

        def nothing(_: Any) -> None:
            """What is written need not reach a disk."""

        numbers = itertools.count()
        stand_ins: list[tuple[Any, str, Any]] = [
            *((os, name, changing(getattr(os, name))) for name in ("replace", "rename", "mkdir")),
            *((os, name, nothing) for name in ("fsync", "fdatasync")),
            (os, "open", opening),
            (os, "kill", self._kill),
            (time, "time", self._time),
            (time, "monotonic", lambda: self.now - START),
            (time, "sleep", self.sleep),
            (time, "strftime", self._strftime),
            (secrets, "token_hex", lambda count: f"{next(numbers):0{2 * count}x}"),
            (tempfile, "_name_sequence", map("{:08}".format, numbers)),
            (threading.Thread, "start", self._start_thread),
            (threading.Thread, "join", lambda thread, timeout=None: thread.ident and join_thread(thread, timeout)),
            (signal, "sigwait", self._sigwait),
            (subprocess, "run", command),
            (subprocess, "Popen", start),
        ]
        with ExitStack() as stack:
            for module, name, stand_in in stand_ins:
                stack.enter_context(mock.patch.object(module, name, stand_in))
            here = {name: os.environ[name] for name in ("PATH", "HOME", "TZ") if name in os.environ}
            stack.enter_context(mock.patch.dict(os.environ, here, clear=True))  # as a node's, on every machine
            stack.enter_context(mock.patch.object(sys, "stdout", cast(TextIO, Output(self, printed=True))))
            stack.enter_context(mock.patch.object(sys, "stderr", cast(TextIO, Output(self))))
            yield


class Output:
    """Standard output or standard error of the program that runs."""

    def __init__(self, clock: Clock, *, printed: bool = False) -> None:
        self._clock, self._printed = clock, printed

    def write(self, text: str) -> int:
        if self._printed and self._clock.running is not None:
            self._clock.running.said += text
        elif text.strip():
            self._clock.note(text.strip())
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""
