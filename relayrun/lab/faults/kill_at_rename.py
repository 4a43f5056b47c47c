"""Run a module, and kill it before it gives a file its name.

`python3 -m relayrun.lab.faults.kill_at_rename NAME ALONE|WITH-PARENT -m MODULE ...`; `Fault.commands` starts it instead
of the supervisor. Uses the standard library alone.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path


def kill_before_rename(name: str, *, parent: bool) -> None:
    """Send SIGKILL to this process, after its parent if `parent`, before it renames a file to `name`."""

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and Path(str(arguments[1])).name == name:
            print(f"killed before {name}", file=sys.stderr, flush=True)
            if parent:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


if __name__ == "__main__":
    kill_before_rename(sys.argv[1], parent=sys.argv[2] == "WITH-PARENT")
    module = sys.argv[4]
    del sys.argv[1:5]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
