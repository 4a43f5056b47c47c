"""Run a module while another user's take-over interferes with the begin of an attempt.

`python3 -m relayrun.lab.faults.change_owner -m MODULE ...`; `Fault.commands` starts it instead of the supervisor.
Before begin.json gets its name, the plan becomes another user's; a little later it is restored, as by a submit that
finds the attempt. Uses the standard library alone.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path

from relayrun.files import read_json, write_atomic, write_json

OTHER_USER_ID = 4242
"""An unused uid."""
CHANGE_SECONDS = 3.0


def change_owner_before_rename(name: str, plan: Path) -> None:
    """Let another user own the plan for a while, from the moment this process renames a file to `name`."""
    done: list[bytes] = []

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and Path(str(arguments[1])).name == name and not done:
            done.append(plan.read_bytes())
            write_json(plan, read_json(plan) | {"owner": OTHER_USER_ID})
            threading.Timer(CHANGE_SECONDS, write_atomic, (plan, done[0])).start()

    sys.addaudithook(look)


if __name__ == "__main__":
    change_owner_before_rename("begin.json", Path(os.environ["RELAYRUN_RUN_DIR"]) / "plan.json")
    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
