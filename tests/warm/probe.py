"""What test_warm.py starts: says what it was started with, ends as it is told, or waits for signals."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path

from tests.warm.server import IMPORTED


def started_with() -> dict[str, object]:
    def words(name: str) -> list[str]:
        return sorted(filter(None, Path("/proc/self", name).read_text().split("\0")))

    mask = os.umask(0)
    os.umask(mask)
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "command line": words("cmdline")[-1],
        "environment": dict(os.environ),
        "environment in /proc": [word for word in words("environ") if not word.startswith("_=")],
        "folder": os.getcwd(),
        "path": sys.path,
        "umask": mask,
        "nice": os.nice(0),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "largest file": resource.getrlimit(resource.RLIMIT_FSIZE),
        "ignored": [int(number) for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
        "handled": [int(number) for number in signal.valid_signals() if callable(signal.getsignal(number))],
        "standard input": sys.stdin.read(),
        "open": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3],
        "main": sys.modules["__main__"].__file__,
    }


if __name__ == "__main__":
    verb, *more = sys.argv[1:]
    if verb == "imported":
        print(json.dumps([module for module in IMPORTED if module in sys.modules]))
    elif verb == "say":
        warnings.simplefilter("ignore")
        for module in IMPORTED:  # they change the environment and the path
            importlib.import_module(module)
        print(json.dumps(started_with()))
    elif verb == "exit":
        sys.exit(int(more[0]))
    elif verb == "die":
        os.kill(os.getpid(), int(more[0]))
    elif verb == "raise":
        raise ValueError("as it was told")
    elif verb == "wait":
        signal.signal(signal.SIGUSR2, lambda *_: sys.exit(12))
        print(os.getpid(), flush=True)
        time.sleep(600)
