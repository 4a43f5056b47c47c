"""Stands where the program would: a copy of this text, with a call of `main` at its end, is the `python` of a test.

What the server has not imported is started for real: other modules, options of Python, another checkout's code.
It must be quick, so it imports little.
"""

from __future__ import annotations

import array
import json
import os
import resource
import signal
import socket
import struct
import sys

GPU_CHECK = "relayrun.lab.gpucheck.programs."
MODULES = (
    "relayrun.train",
    "relayrun.train.rehearsal",
    "relayrun.train.fork_server",
    "relayrun.train.export.evaluate",
    "tests.warm.probe",
)
"""What the server can be; and the programs of `relayrun gpu-check`."""
SCRIPT = "tests/killed_by_itself.py"
"""And this one, which runs a user's program in its own process."""
FORWARDED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGTERM,
    signal.SIGCONT,
)


def request(connection: socket.socket, files: tuple[int, int, int], **values: object) -> int:
    """Ask for a program; return its process id."""
    message = json.dumps(values).encode("utf-8", "surrogateescape")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    connection.sendmsg([struct.pack("!I", len(message))], rights)
    connection.sendall(message)
    return receive_status(connection)


def receive_status(connection: socket.socket) -> int:
    """The next number from the server. ConnectionError where it is gone."""
    found = connection.recv(4, socket.MSG_WAITALL)
    if len(found) < 4:
        raise ConnectionError("the server of warm programs is gone")
    number: int = struct.unpack("!I", found)[0]
    return number


def is_of(root: str, arguments: list[str]) -> bool:
    """The server can be this program: it has the modules, and they are those of this checkout."""
    script = arguments[:1] == [os.path.join(root, SCRIPT)]
    module = arguments[1] if len(arguments) > 1 and arguments[0] == "-m" else ""
    if not (script or module in MODULES or module.startswith(GPU_CHECK)):
        return False
    folders = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return all(
        os.path.realpath(folder) == root or not os.path.exists(os.path.join(folder, "relayrun"))
        for folder in filter(None, folders)
    )


def main(path: str, python: str, root: str) -> None:
    """Be `python` with this process's arguments; the server of the socket `path` has the modules of `root`."""
    arguments = sys.argv[1:]
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
    connection = socket.socket(socket.AF_UNIX)
    if not is_of(root, arguments) or connection.connect_ex(path) != 0:
        os.execv(python, [python, *arguments])
    program: list[int] = []
    early: list[int] = []

    def forward(number: int, _frame: object) -> None:
        if program:
            os.kill(program[0], number)
        else:
            early.append(number)

    for number in FORWARDED:
        signal.signal(number, forward)
    mask = os.umask(0o77)
    os.umask(mask)
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    pid = request(
        connection,
        (0, 1, 2),
        argv=[python, *arguments],
        cwd=os.getcwd(),
        env=dict(os.environ),
        ignored=ignored,
        limits={str(number): resource.getrlimit(number) for number in {getattr(resource, name) for name in names}},
        umask=mask,
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        follow=True,
    )
    program.append(pid)
    for number in early:
        os.kill(pid, number)
    status = receive_status(connection)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))
