"""Python programs that need not import: a server has imported torch, megatron-core and the training program, and forks.

What a test starts through `python()` or `start` is a process of its own with the arguments, folder, environment, files,
limits and signals that it would have had, and it ends as it would have. Only the imports are done. Tests about
starting, and programs of another checkout, use `sys.executable`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from relayrun.tokens.tokenize.processes import ONE_THREAD_ENVIRONMENT
from tests.waiting import wait_for

from .stand_in import receive_status, request

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def _owner() -> int:
    """The pytest whose workers share the server."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


wanted = True
"""Whether a program is likely to be started: a fast test only writes down with which Python it would be."""


@cache
def _folder() -> Path:
    """With `socket` and `python`; the server starts with the first call of all workers and ends with their pytest."""
    folder = _with_python()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _answers(folder / "socket"):
            _start_server(folder)
    return folder


@cache
def _with_python() -> Path:
    """The folder with `python`, which imports by itself as long as no server answers."""
    folder = Path("/tmp", f"relayrun-warm-{os.geteuid()}-{_owner()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "python").exists():
            _write_python(folder)
    return folder


def end() -> None:
    """Called where all tests are over: remove what no server removes."""
    folder = Path("/tmp", f"relayrun-warm-{os.geteuid()}-{os.getpid()}")
    if folder.exists() and not _answers(folder / "socket"):
        shutil.rmtree(folder)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _write_python(folder: Path) -> None:
    # a link without "python" in its name: who looks for ranks in /proc finds the program, not what stands in for it
    (folder / "stand-in").symlink_to(os.path.realpath(sys.executable))
    call = f"main({str(folder / 'socket')!r}, {sys.executable!r}, {str(ROOT)!r})"
    text = (HERE / "stand_in.py").read_text(encoding="utf-8")
    (folder / "new").write_text(f"#!{folder}/stand-in -IS\n{text}\n\n{call}\n", encoding="utf-8")
    (folder / "new").chmod(0o755)
    (folder / "new").rename(folder / "python")


def _start_server(folder: Path) -> None:
    # room that a program's own arguments and environment are written into, so that /proc shows them
    room = {f"ROOM{number}": "x" * 30_000 for number in range(4)}
    plain = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "HOME": "/"}
    plain |= ONE_THREAD_ENVIRONMENT
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(folder / "socket"), str(_owner()), str(ROOT), "x" * 20_000],
            cwd=folder,
            env=plain | room,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def answers() -> bool:
        assert server.poll() is None, said()
        return _answers(folder / "socket")

    def said() -> str:
        return f"the server of warm programs does not start:\n{(folder / 'log').read_text()}"

    wait_for(answers, 600, step=0.05, words=said)
    server.returncode = 0  # nobody waits for it: it ends behind its pytest


def python() -> str:
    """A program to be started in place of `sys.executable`, for `-m relayrun.train` and the like.

    It stands in for the process that trains: hands signals on, ends with it, and the other way round.
    """
    return str((_folder() if wanted else _with_python()) / "python")


class Warm:
    """A started program; of subprocess.Popen's methods those that tests use. `pid` is the program's own."""

    def __init__(self, argv: Sequence[str], connection: socket.socket, pid: int) -> None:
        self.args, self.pid = argv, pid
        self.returncode: int | None = None
        self._connection = connection

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(receive_status(self._connection))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0) from None
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    argv: Sequence[str | Path],
    *,
    stdout: int,
    stderr: int,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    ignored: Iterable[int] = (),
    limits: Mapping[int, tuple[int, int]] | None = None,
) -> Warm:
    """Start `[python, "-m", MODULE, ...]`, `[python, "-c", TEXT, ...]` or `[python, SCRIPT, ...]`.

    Args:
        stdout, stderr: file descriptors.
        ignored: signals to ignore. limits: of resources, as for resource.setrlimit.
    """
    words = [str(word) for word in argv]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(_folder() / "socket"))
    with open(os.devnull) as nothing:
        pid = request(
            connection,
            (nothing.fileno(), stdout, stderr),
            argv=words,
            cwd=str(cwd or Path.cwd()),
            env=dict(os.environ if env is None else env),
            ignored=sorted({signal.SIGPIPE, signal.SIGXFSZ, *ignored}),
            limits={str(number): pair for number, pair in (limits or {}).items()},
            follow=False,
        )
    return Warm(words, connection, pid)


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limits: Mapping[int, tuple[int, int]] | None = None,
    timeout: float = 300,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run with captured text."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        program = start(argv, stdout=out.fileno(), stderr=err.fileno(), cwd=cwd, env=env, limits=limits)
        try:
            program.wait(timeout)
        finally:
            program.kill()
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(program.args, program.wait(300), out.read().decode(), err.read().decode())
    if check:
        done.check_returncode()
    return done
