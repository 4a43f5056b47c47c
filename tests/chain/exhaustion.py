"""A program in a forked child whose n-th call of the system fails: of `os`, of `open`, of `subprocess`.

Counted are calls that reach into one directory, by path or by descriptor, and Slurm's commands.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

from .fake_slurm import FakeSlurm

PATHS = ("open", "stat", "lstat", "listdir", "scandir", "mkdir", "rename", "replace", "unlink", "rmdir", "utime")
DESCRIPTORS = ("fsync", "write", "pread", "pwrite", "ftruncate", "fchmod", "fstat")


@dataclass(frozen=True)
class Fault:
    """What happens at the call: SIGKILL, or an error, which may last from there on.

    One of a file lasts for what writes, one of a command of Slurm for all of them.
    """

    name: str
    lasting: bool = False

    def __str__(self) -> str:
        return self.name + ("..." if self.lasting else "")


KILL = Fault("SIGKILL")
PAUSE = Fault("a pause")
"""The program stands still before the call until it is told to go on: `Child.go_on`."""
FAULTS = (
    KILL,
    Fault("ENOSPC"),
    Fault("EIO"),
    Fault("ESTALE"),
    Fault("EACCES"),
    Fault("ENOSPC", lasting=True),
    Fault("EACCES", lasting=True),
    Fault("EIO", lasting=True),
)
WRITING = {"mkdir", "rename", "replace", "unlink", "rmdir", "utime", "fsync", "write", "pwrite", "ftruncate", "fchmod"}

PAUSE_SECONDS, PAUSES = 0.002, 300_000
"""A child that pauses looks so often, and so many times: it goes on by itself where its parent has gone."""


@dataclass(frozen=True)
class Reached:
    """How the child ended, and the calls that it made."""

    code: int
    """Its exit code; 128 + signal where it was killed; 1 with a traceback in `output` where it raised."""
    calls: list[str]
    output: str
    lasting: bool = False
    """The fault lasted to its end."""


class Harness:
    """Counts calls in this process, which is a child, and lets one fail."""

    def __init__(self, folder: Path, slurm: FakeSlurm, log: Path, at: int, fault: Fault | None, also: int) -> None:
        self._folder = os.fspath(folder)
        self._slurm = slurm
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._at, self._fault, self._also = at, fault, also
        self._count = 0
        self._lasts_for_commands = False
        self._inside = False
        self._original = {name: getattr(os, name) for name in (*PATHS, *DESCRIPTORS)}
        self._run = subprocess.run
        self._sleep = time.sleep
        self._pause = log.with_suffix(".paused")

    def install(self) -> None:
        for name in PATHS:
            setattr(os, name, self._guarded(name, self._path))
        for name in DESCRIPTORS:
            setattr(os, name, self._guarded(name, self._descriptor))
        original = builtins.open

        def opened(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            path = self._path(file)
            if path is not None:
                self._reach("open " + path, writes=any(letter in mode for letter in "wax+"))
            return self._quietly(original, file, mode, *rest, **more)

        builtins.open = opened  # type: ignore[assignment]
        io.open = opened  # type: ignore[assignment]
        subprocess.run = self._command  # type: ignore[assignment]
        slept, now = [0.0], time.monotonic
        time.sleep = lambda seconds: slept.__setitem__(0, slept[0] + seconds)
        time.monotonic = lambda: now() + slept[0]

    def _quietly(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        before, self._inside = self._inside, True
        try:
            return call(*arguments, **more)
        finally:
            self._inside = before

    def _guarded(self, name: str, where: Callable[[Any], str | None]) -> Callable[..., Any]:
        original = self._original[name]

        def call(*arguments: Any, **more: Any) -> Any:
            place = None if self._inside else where(arguments[0] if arguments else more.get("path", "."))
            if place is not None:
                flags = arguments[1] if name == "open" and len(arguments) > 1 else 0
                writing = name in WRITING or bool(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
                self._reach(f"{name} {place}", writes=writing)
            return original(*arguments, **more)

        return call

    def _path(self, given: Any) -> str | None:
        if self._inside or isinstance(given, int):
            return None
        text = os.fsdecode(given)
        return os.path.relpath(text, self._folder) if text.startswith(self._folder) else None

    def _descriptor(self, fd: Any) -> str | None:
        try:
            return self._path(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            return None

    def _failing(self, call: str, *, writes: bool, command: bool = False) -> str | None:
        """The name of the error with which this call fails."""
        self._original["write"](self._log, (call + "\n").encode())
        number, self._count = self._count, self._count + 1
        fault = self._fault
        if fault == PAUSE and number in (self._at, self._also):
            self._quietly(self._pause.touch)
            for _ in range(PAUSES):
                if not self._quietly(self._pause.exists):
                    break
                self._sleep(PAUSE_SECONDS)
        if fault in (None, PAUSE) or number < self._at or (number > self._at and not fault.lasting):
            return None
        if fault == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self._at:
            self._lasts_for_commands = command
        elif command != self._lasts_for_commands or not (writes or command):
            return None  # a full or read-only file system can still be read
        return fault.name

    def _reach(self, call: str, *, writes: bool) -> None:
        name = self._failing(call, writes=writes)
        if name is not None:
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), call)

    def _command(self, command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        """Slurm answers; or does what it is told and says that it failed; or hangs; or does not hear."""
        call = f"run {' '.join(command[:2])}"
        name = self._failing(call, writes=False, command=True)
        if name in (None, "EIO", "ESTALE"):
            done = self._quietly(self._slurm.run, command, more.get("input") or "")
            if name == "EIO":
                return subprocess.CompletedProcess(command, 1, "", "error: Socket timed out on send/recv operation")
            if name == "ESTALE":
                raise subprocess.TimeoutExpired(command, 120)
            return done
        words = {"ENOSPC": "error: never heard of", "EACCES": "error: Protocol authentication error"}[name or ""]
        return subprocess.CompletedProcess(command, 1, "", words)


@dataclass(frozen=True)
class Child:
    """A program in a fork."""

    pid: int
    log: Path
    output: Path

    @property
    def paused(self) -> bool:
        return self.log.with_suffix(".paused").exists()

    @property
    def ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def go_on(self) -> None:
        self.log.with_suffix(".paused").unlink(missing_ok=True)

    def wait(self) -> Reached:
        """Wait for its end, where it need not stand still any more."""

        def over() -> bool:
            if not self.ended:
                self.go_on()
            return self.ended

        wait_for(over, 600, step=0.002, words=lambda: f"the child ends\n{self.output.read_text(errors='replace')}")
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return Reached(
            code=128 - code if code < 0 else code,
            calls=self.log.read_text().splitlines(),
            output=self.output.read_text(errors="replace"),
        )


def start_child(
    program: Callable[[], int],
    folder: Path,
    slurm: FakeSlurm,
    *,
    at: int = -1,
    fault: Fault | None = None,
    job: str = "1",
    name: str = "child",
    also: int = -1,
) -> Child:
    """Start `program` in a fork, as job `job`; call number `at` fails. Without a fault the calls are only listed.

    `also`: a second call at which it pauses.
    `name`: of two that run at once each needs its own.
    """
    scratch = slurm.file.parent
    log, output = scratch / f"{name}.calls", scratch / f"{name}.output"
    log.with_suffix(".paused").unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(target, 1)
            os.dup2(target, 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - the child's
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            os.environ["SLURM_JOB_ID"] = job
            Harness(folder, slurm, log, at, fault, also).install()
            code = program()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return Child(pid, log, output)


def run_child(
    program: Callable[[], int],
    folder: Path,
    slurm: FakeSlurm,
    *,
    at: int = -1,
    fault: Fault | None = None,
    job: str = "1",
) -> Reached:
    """Run `program` as `start_child` does, to its end."""
    return start_child(program, folder, slurm, at=at, fault=fault, job=job).wait()
