"""Triggers: files that any member of the team touches to steer a run.

`triggers/save` asks for a checkpoint, `triggers/exit` for a checkpoint and the end of the chain.
Rank 0 alone looks; when it has obeyed, it removes the file and leaves `save.done` or `exit.done` with
who asked, when, at which iteration, and the result. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relayrun.files import write_json
from relayrun.rundir.layout import RunDir

Name = Literal["save", "exit"]
NAMES: tuple[Name, ...] = ("save", "exit")


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """A touched file: who and when (seconds since 1970)."""

    name: Name
    user: str
    time: float


def create_folder(run: RunDir) -> None:
    """Make `triggers/`: writable by owner and group, the group handed on to new files, closed to others."""
    run.triggers.mkdir(parents=True, exist_ok=True)
    run.triggers.chmod(0o2770)


def touch(run: RunDir, name: Name) -> None:
    """Ask for `name` on behalf of this user."""
    (run.triggers / name).touch()


def look(run: RunDir, name: Name) -> Trigger | None:
    """The trigger, if somebody touched it."""
    try:
        status = os.stat(run.triggers / name, follow_symlinks=False)
    except FileNotFoundError:
        return None
    try:
        user = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:  # containers often lack the site's user database
        user = str(status.st_uid)
    return Trigger(name=name, user=user, time=status.st_mtime)


def acknowledge(run: RunDir, trigger: Trigger, *, iteration: int, result: str) -> None:
    """Leave NAME.done and remove the trigger, unless it was touched again meanwhile."""
    write_json(
        _done(run, trigger.name),
        {"user": trigger.user, "touched": trigger.time, "time": time.time(), "iteration": iteration, "result": result},
    )
    again = look(run, trigger.name)
    if again is not None and again.time == trigger.time:
        with contextlib.suppress(FileNotFoundError):
            (run.triggers / trigger.name).unlink()


def _done(run: RunDir, name: Name) -> Path:
    return run.triggers / f"{name}.done"
