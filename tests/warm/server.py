"""Imports what the training program imports, then forks it for everyone who asks: `server.py SOCKET OWNER ROOT ROOM`.

Ends with the process OWNER. A client that ends, also by SIGKILL, ends its program; one that is stopped stops it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import resource
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMPORTED = (
    "relayrun.config.compose.resolve",
    "relayrun.train.loop",
    "relayrun.train.reporting.debugging",
    "relayrun.train.export.evaluate",
    "relayrun.train.export.scores",
    "transformers.models.llama.modeling_llama",
    "lm_eval.models.huggingface",
    "relayrun.cli.data.tokenize",
    "relayrun.tokens.tokenize.pipeline",
)
"""What programs of tests import that takes seconds."""
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)

Request = dict[str, Any]


@dataclass
class Program:
    """A fork, and who asked for it."""

    pid: int
    pidfd: int
    connection: socket.socket
    follow: int
    """Process id of the client whose stops it shares; 0: of none."""
    stopped: bool = False


def receive(connection: socket.socket) -> tuple[Request, list[int]]:
    """What is asked for, and the three files."""
    connection.settimeout(60)
    size, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(12), socket.MSG_WAITALL)
    if len(size) < 4:
        raise ConnectionError
    files = array.array("i")
    for _level, _kind, data in ancillary:
        files.frombytes(data)
    wanted = struct.unpack("!I", size)[0]
    text = b""
    while len(text) < wanted:
        part = connection.recv(wanted - len(text))
        if not part:
            raise ConnectionError
        text += part
    connection.settimeout(None)
    return json.loads(text.decode("utf-8", "surrogateescape")), files.tolist()


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


class Server:
    def __init__(self, path: str, owner: int) -> None:
        self.path = path
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        self.owner = os.pidfd_open(owner)
        self.programs: list[Program] = []
        self.selector.register(self.listener, selectors.EVENT_READ, "listener")
        self.selector.register(self.owner, selectors.EVENT_READ, "owner")

    def serve(self) -> Request:
        """Returns in each fork; the server itself never comes back."""
        while True:
            followed = any(program.follow for program in self.programs)
            for key, _ in self.selector.select(0.02 if followed else None):
                if key.data == "owner":
                    self.end()
                elif key.data == "listener":
                    connection, _ = self.listener.accept()
                    with contextlib.suppress(OSError, ValueError):
                        asked = self.start(connection)
                        if asked is not None:
                            return asked
                elif key.data in self.programs:
                    self.look(key.data, ended=key.fd == key.data.pidfd)
            for program in self.programs:
                if program.follow and is_stopped(program.follow) != program.stopped:
                    program.stopped = not program.stopped
                    os.kill(program.pid, signal.SIGSTOP if program.stopped else signal.SIGCONT)

    def start(self, connection: socket.socket) -> Request | None:
        asked, files = receive(connection)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != server:
                os._exit(1)
            os.setsid()
            for number, file in enumerate(files):
                os.dup2(file, number)
            # what Python knows of first: an object that is freed later would close its number once more
            for program in self.programs:
                program.connection.close()
            connection.close()
            self.selector.close()
            self.listener.close()
            os.closerange(3, 4096)
            return asked
        for file in files:
            os.close(file)
        follow = struct.unpack("3i", credentials)[0] if asked["follow"] else 0
        program = Program(pid, os.pidfd_open(pid), connection, follow)
        self.programs.append(program)
        self.selector.register(program.pidfd, selectors.EVENT_READ, program)
        self.selector.register(connection, selectors.EVENT_READ, program)
        connection.sendall(struct.pack("!I", pid))
        return None

    def look(self, program: Program, *, ended: bool) -> None:
        """The program has ended, or its client has."""
        if not ended:
            os.kill(program.pid, signal.SIGKILL)
        _, status = os.waitpid(program.pid, 0)
        self.programs.remove(program)
        self.selector.unregister(program.pidfd)
        self.selector.unregister(program.connection)
        os.close(program.pidfd)
        with contextlib.suppress(OSError):
            program.connection.sendall(struct.pack("!I", status))
        program.connection.close()

    def end(self) -> None:
        for program in self.programs:
            os.kill(program.pid, signal.SIGKILL)
        shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)
        os._exit(0)


def write_into(start: int, end: int, words: list[bytes]) -> None:
    """Over the memory in which the kernel put this process's own arguments or environment."""
    text = b"".join(word + b"\0" for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def become(asked: Request) -> None:
    """Take over what the program would have been started with."""
    argv: list[str] = asked["argv"]
    sys.orig_argv = argv
    os.environ.clear()
    os.environ.update(asked["env"])
    places = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    arg_start, arg_end, env_start, env_end = map(int, places)
    write_into(arg_start, arg_end, [os.fsencode(word) for word in argv])
    write_into(env_start, env_end, [os.fsencode(f"{name}={value}") for name, value in asked["env"].items()])
    time.tzset()
    os.chdir(asked["cwd"])
    if "umask" in asked:
        os.umask(asked["umask"])
    if "nice" in asked:
        os.setpriority(os.PRIO_PROCESS, 0, asked["nice"])
    for number, limits in asked["limits"].items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(int(number), tuple(limits))
    for number in asked["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked.get("blocked", []))
    if asked["env"].get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if "numpy" in sys.modules:  # Python's own generator is seeded at a fork
        sys.modules["numpy"].random.seed()
    random.seed()
    sys.path[:0] = [folder for folder in asked["env"].get("PYTHONPATH", "").split(os.pathsep) if folder]


def run(argv: list[str]) -> None:
    """`[python, "-m", MODULE, ...]`, `[python, "-c", TEXT, ...]` or `[python, SCRIPT, ...]` in this process."""
    if argv[1] == "-m":
        sys.argv = argv[2:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    elif argv[1] == "-c":
        sys.argv = ["-c", *argv[3:]]
        sys.path.insert(0, os.getcwd())
        exec(compile(argv[2], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = argv[1:]
        sys.path.insert(0, os.path.dirname(os.path.abspath(argv[1])))
        runpy.run_path(argv[1], run_name="__main__")


codes: list[int] = []
"""The exit code of a fork that is about to end."""


def leave() -> None:
    """The last exit handler of a fork: without it Python would take all that is imported apart, for 0.3 s."""
    if codes:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(codes[0])


def main() -> None:
    atexit.register(leave)  # before all others, which so come first
    path, owner, root = sys.argv[1:4]
    sys.path[0] = root
    before = dict(os.environ)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in IMPORTED:
            importlib.import_module(module)
        for kind in sys.modules[IMPORTED[0]].CONFIG_CLASSES.values():
            kind.model_rebuild()  # or each fork builds its schema
    del sys.path[0]
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    if len(os.listdir("/proc/self/task")) != 1:
        raise SystemExit("the imports started threads; a fork would lose them")
    gc.collect()
    gc.freeze()
    asked = Server(path, int(owner)).serve()
    become(asked)
    os.environ.update({name: value for name, value in set_by_imports.items() if name not in asked["env"]})
    try:
        run(asked["argv"])
        codes.append(0)
    except SystemExit as error:
        codes.append(0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1)
        raise
    except Exception:
        codes.append(1)
        raise


if __name__ == "__main__":
    main()
