"""Run a module with a fault at the moment when it gives a file its name.

    python3 -m relayrun.lab.faults.supervisor_faults FAULT NAME -m MODULE ...

| FAULT | before the rename to NAME |
|---|---|
| kill | SIGKILL of this process |
| kill-with-parent | SIGKILL of the parent process, then of this one |

`Fault.commands` starts it instead of the supervisor. Uses the standard library alone.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def before_rename(name: str, action: Callable[[], None]) -> None:
    """Call `action` before this process renames a file to `name` for the first time."""
    left = [action]

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and Path(str(arguments[1])).name == name and left:
            left.pop()()

    sys.addaudithook(audit)


def kill(name: str, *, parent: bool) -> None:
    """Send SIGKILL to this process, after its parent if `parent`."""
    print(f"killed before {name}", file=sys.stderr, flush=True)
    if parent:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    fault, name, _, module = sys.argv[1:5]
    del sys.argv[1:5]
    before_rename(name, lambda: kill(name, parent=fault == "kill-with-parent"))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
