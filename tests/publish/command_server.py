"""Runs commands in forks of one process, which has imported the libraries; a command can stop at a file operation.

Requests are lines of JSON on the standard input: `{"argv": ..., "output": file}` starts a command and answers its
number, `{"wait": number}` answers its exit code. The clock of a command stands still, and `below` is a file system of
its own.

`stop_at`: number of a file operation below `below`: there the command makes the file `OUTPUT.stopped` and waits until
it is gone. `stop_behind`: a file that is read; it stops where the next one is opened. `limit`: most bytes of a file.
`fails`: an error, and the number of changes below `below` after which all fail with it. `terminal`: as if a person saw
what it says. All operations stand in `OUTPUT.operations` at the end.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from relayrun import leftovers, progress
from tests.waiting import wait_for

CHANGING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "ctypes.dlsym")
NOW = 1_790_000_000.0
"""The time of every command."""


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif (answer := os.fork()) == 0:
            os._exit(_run(request))
        print(json.dumps(answer), flush=True)


def _run(request: dict[str, Any]) -> int:
    said, output = os.pipe()  # which a limit of the size of files does not concern
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["relayrun", *request["argv"]]
    done = read = False
    behind = request.get("stop_behind")
    operations: list[str] = []
    stopped = Path(request["output"] + ".stopped")

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal done, read, behind
        if done:
            return
        stops = read and event == "open"
        if stops:
            read, behind = False, None
        elif behind is not None and event == "open":
            read = _lies_in(arguments[0], behind)
        if _changes(event, arguments, request["below"]):
            operations.append(f"{event} {arguments[0]}")
            stops = stops or len(operations) == request.get("stop_at")
        if stops:
            done = True
            stopped.touch()
            wait_for(lambda: not stopped.exists(), step=0.002, words=f"nobody removed {stopped}")
            done = False

    sys.addaudithook(look)
    if request.get("limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], resource.RLIM_INFINITY))
    if request.get("fails"):
        code, after = request["fails"]
        ctypes.CDLL(None).fail_changes(request["below"].encode(), code, ctypes.c_long(after))
    if request.get("terminal"):
        progress.has_terminal, progress._INTERVAL = lambda: True, 0.0
    time.time = lambda: NOW
    _set_apart(request["below"])
    from relayrun.cli import main as relayrun

    try:
        code = _run_module() if request["argv"][0] == "-m" else relayrun()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 99
    done = True
    if request.get("fails"):
        ctypes.CDLL(None).fail_changes(b"", 0, ctypes.c_long(0))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    with open(said, "rb") as words:
        Path(request["output"]).write_bytes(words.read())
    Path(request["output"] + ".operations").write_text(json.dumps(operations))
    return code


def _run_module() -> int:
    """Run `main` of a module as `python -m` does."""
    from relayrun.errors import run_command

    module = importlib.import_module(sys.argv[2])
    sys.argv = [str(module.__file__), *sys.argv[3:]]
    return run_command(module.main)


def _set_apart(below: str) -> None:
    """Let a rename into this folder fail as between two file systems."""
    rename, without_replacing = os.rename, leftovers._rename

    def between(source: Any, target: Any, *flag: int) -> Any:
        if _lies_in(target, below) and not _lies_in(source, below):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)
        return without_replacing(source, target, *flag) if flag else rename(source, target)

    os.rename = leftovers._rename = between


def _changes(event: str, arguments: tuple[Any, ...], below: str) -> bool:
    """Whether an audit event is a change of a file in the folder of the outputs, or a call of renameat2."""
    if event == "ctypes.dlsym":
        return "renameat2" in str(arguments[1])
    if event == "open":
        return _lies_in(arguments[0], below) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
    return event in CHANGING and _lies_in(arguments[0], below)


def _lies_in(path: object, below: str) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(below)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
