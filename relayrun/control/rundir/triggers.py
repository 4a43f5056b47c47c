"""Triggers: files that any member of the team touches to steer a run.

`triggers/save` asks for a checkpoint, `triggers/exit` for a checkpoint and the end of the chain. Rank 0 alone obeys;
then it removes the file and writes `save.done` or `exit.done` with the user, the time, the iteration, and the result.
Standard library only.
"""

from __future__ import annotations

import contextlib
import grp
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError, RunDirError, describe_owner, group_name, user_name
from relayrun.files import stat_of, write_json

TriggerName = Literal["save", "exit"]
TRIGGER_NAMES: tuple[TriggerName, ...] = ("save", "exit")
TRIGGER_FOLDER_MODE = 0o2770
"""Permissions of the folder: setgid, so that new files belong to the group."""


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """A touched file: its user and its time (seconds since 1970)."""

    name: TriggerName
    user: str
    time: float


def create_trigger_folder(run: Run, group: str | None = None) -> None:
    """Make `triggers/`: writable by owner and group, new files inherit the group, closed to others. `group`: name or
    number; None: the group of the run directory. Raises ConfigError if this user cannot use the group."""
    run.triggers.mkdir(parents=True, exist_ok=True)
    wanted = run.path.stat().st_gid if group is None else _group_id(group)
    found = run.triggers.stat()
    if (found.st_gid, stat.S_IMODE(found.st_mode)) == (wanted, TRIGGER_FOLDER_MODE):
        return  # it may be a colleague's, and only the owner can change it
    try:
        os.chown(run.triggers, -1, wanted)
        run.triggers.chmod(TRIGGER_FOLDER_MODE)  # after chown, which clears the setgid bit
    except PermissionError:
        words = f"the triggers cannot be given to the group {group_name(wanted)}"
        hint = f"set chain.triggers_group to a group of yours, or let {user_name(found.st_uid)} submit"
        raise ConfigError(words, where=run.triggers, hint=hint) from None


def touch_trigger(run: Run, name: TriggerName) -> None:
    """Touch a trigger as this user. No link is followed: others may have made it. Raises RunDirError if the folder is
    missing or this user may not write; OSError."""
    try:
        opened = os.open(run.triggers, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666, dir_fd=opened))
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # it was obeyed just then
                os.utime(name, dir_fd=opened, follow_symlinks=False)
        finally:
            os.close(opened)
    except FileNotFoundError:
        hint = "submit the run first; that makes it"
        raise RunDirError("this run has no folder for triggers", where=run.triggers, hint=hint) from None
    except PermissionError:
        with contextlib.suppress(PermissionError):
            if read_trigger(run, name) is not None:  # a colleague's request is still pending
                return
        folder = run.triggers.stat()
        who = f"only the user {user_name(folder.st_uid)} and the group {group_name(folder.st_gid)} may"
        words = f"you may not write here: {who}; {describe_owner(run.triggers)}"
        raise RunDirError(words, where=run.triggers, hint="ask one of them") from None


def first_closed_folder(run: Run) -> Path | None:
    """Return the first folder to `triggers/` that its group may not pass, as after a submit under umask 077."""
    group = run.triggers.stat().st_gid
    for folder in reversed(run.triggers.absolute().parents):
        found = folder.stat()
        if not found.st_mode & (stat.S_IXGRP if found.st_gid == group else stat.S_IXOTH):
            return folder
    return None


def read_trigger(run: Run, name: TriggerName) -> Trigger | None:
    """Return the trigger, or None if it is not touched."""
    status = stat_of(run.triggers / name, follow_symlinks=False)
    return None if status is None else Trigger(name=name, user=user_name(status.st_uid), time=status.st_mtime)


def is_trigger_touched(run: Run, name: TriggerName) -> bool:
    """Return whether the trigger exists, without a look-up of its user's name."""
    return stat_of(run.triggers / name, follow_symlinks=False) is not None


def acknowledge_trigger(run: Run, trigger: Trigger, *, iteration: int, result: str) -> None:
    """Write NAME.done and remove the trigger, unless it was touched again meanwhile."""
    answer = {"user": trigger.user, "touched": trigger.time, "time": time.time(), "iteration": iteration}
    write_json(run.triggers / f"{trigger.name}.done", answer | {"result": result})
    again = read_trigger(run, trigger.name)
    if again is not None and again.time == trigger.time:
        path = run.triggers / trigger.name
        with contextlib.suppress(FileNotFoundError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def _group_id(group: str) -> int:
    try:
        return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        words, hint = (
            f"there is no group {group!r} on this machine",
            "give a name that `getent group` knows, or a number",
        )
        raise ConfigError(words, where="chain.triggers_group", hint=hint) from None
