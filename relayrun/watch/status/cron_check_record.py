"""What a sentinel leaves in the folder of runs that it looks after, so that anybody sees when it last looked.

FOLDER/.sentinel-USER.json   its last look and its memory, see `CronCheckRecord`
FOLDER/.sentinel-USER.lock   held by the process that looks; its time is when something was said that could not be kept

USER is whose runs it looks after; others have their own in the same folder. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.control.notify.notices import QUIET_SECONDS
from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError, user_name
from relayrun.files import RealPathCache

MAX_FOLDER_DEPTH = 4
"""Runs lie at most so many folders below the one that is looked after."""
LATE_CHECK_SECONDS = 900.0
"""A sentinel that has not looked for so long is late, or for three times as long as between its last two looks."""


@dataclass(frozen=True, kw_only=True)
class CronCheckRecord(Record):
    """`.sentinel-USER.json`: the last look of a sentinel, and what it must not forget until the next one.

    Times are seconds since 1970. Runs are named by their path below the folder.
    """

    time: float
    """When the last look ended."""
    period: float | None = None
    """Seconds between the last two looks; None after the first one."""
    host: str
    user: str
    seen: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """By run and cause: `since`, when it was first seen, and `told`, whether somebody was told."""
    running: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By run: the `job` that runs, and `since`, from which look on it was seen running in each."""
    said: dict[str, float] = field(default_factory=dict)
    """When something was last printed, by run and cause."""
    jobs_known: bool = True
    """Whether a look, this one or one before it, had an answer of Slurm's; one without knows nothing."""


@dataclass(frozen=True, kw_only=True)
class LastCronCheck:
    """When the sentinel that looks after a run has last looked."""

    folder: str
    """What it looks after."""
    time: float | None
    """Seconds since 1970; None where its record cannot be read."""
    period: float | None
    host: str
    user: str
    late: bool
    """It should have looked since: it is dead, or its machine is."""


def cron_check_path(folder: Path, user: str) -> Path:
    return folder / _record_name(user)


def _record_name(user: str) -> str:
    return f".sentinel-{user}.json"


def cron_check_lock_path(folder: Path, user: str) -> Path:
    return folder / f".sentinel-{user}.lock"


def may_report_failure(folder: Path, *, now: float) -> bool:
    """Whether a look that failed is to be told: at most once an hour, by the time of the lock, which is set then."""
    try:
        fd = _open_lock(cron_check_lock_path(folder, user_name(os.geteuid())))
    except OSError:  # where nothing can be remembered, it is told each time
        return True
    try:
        return is_first_in_hour(fd, now=now)
    finally:
        os.close(fd)


def is_first_in_hour(lock: int, *, now: float) -> bool:
    """Whether nothing was said within the hour, by the time of the lock, which remembers it from now on."""
    if now - os.fstat(lock).st_mtime < QUIET_SECONDS:
        return False
    with contextlib.suppress(OSError):
        os.utime(lock, (now, now))
    return True


def _open_lock(path: Path) -> int:
    """The lock, open; made where it was not there."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        os.utime(fd, (0, 0))  # nothing was said yet
    except FileExistsError:
        fd = os.open(path, os.O_RDWR)
    return fd


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[tuple[int, bool]]:
    """Hold a lock: its open file, and whether it is this process's now."""
    fd = _open_lock(path)
    try:
        mine = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mine = False
        except OSError:  # a file system without locks: two looks at once tell the same, by notices of the same names
            pass
        yield fd, mine
    finally:
        os.close(fd)


def read_cron_check(folder: Path, user: str) -> CronCheckRecord | None:
    """Return the user's last look in this folder; None where there was none. Raises RunDirError if it is damaged."""
    return CronCheckRecord.read(cron_check_path(folder, user))


def write_cron_check(folder: Path, memory: CronCheckRecord) -> None:
    """Replace the record of its user's last look. Raises OSError."""
    memory.write(cron_check_path(folder, memory.user))


class FolderCache:
    """What the file system said of folders and of the records in them, for runs that lie in the same ones."""

    def __init__(self) -> None:
        self.real_path = RealPathCache()
        self._found: dict[tuple[str, str, int], tuple[tuple[str, os.stat_result], ...]] = {}

    def records(self, folder: str, user: str, depth: int) -> tuple[tuple[str, os.stat_result], ...]:
        """A user's records in a folder and at most `depth` folders above it: where each lies, and what it is."""
        found = self._found.get((folder, user, depth))
        if found is None:
            try:
                found = ((folder, os.stat(f"{folder}/{_record_name(user)}")),)
            except OSError:
                found = ()
            if depth:
                found += self.records(os.path.dirname(folder), user, depth - 1)
            self._found[folder, user, depth] = found
        return found


def last_cron_check(
    run: Run, owner: int | None, *, now: float, asked: FolderCache | None = None
) -> LastCronCheck | None:
    """Return when its owner's sentinel has last looked at a run; None where none was set up.

    `owner`: number of the user; None: who asks. `now`: seconds since 1970. `asked`: is asked before the file system,
    and filled; for the runs of one look alone.
    """
    asked = FolderCache() if asked is None else asked
    user = _name_of(os.geteuid() if owner is None else owner)
    given = str(run.path if run.path.is_absolute() else run.path.absolute())
    for path in dict.fromkeys((given, asked.real_path(given))):
        for folder, found in asked.records(path, user, MAX_FOLDER_DEPTH):
            try:
                memory = _read_once(Path(folder), user, found.st_ino, found.st_mtime_ns)
            except PermissionError:  # another user's, who shows it to nobody
                continue
            except (RunDirError, OSError):
                memory = None
            if memory is None:
                return LastCronCheck(folder=folder, time=None, period=None, host="", user=user, late=True)
            patience = max(LATE_CHECK_SECONDS, 3 * (memory.period or 0.0))
            return LastCronCheck(
                folder=folder,
                time=memory.time,
                period=memory.period,
                host=memory.host,
                user=memory.user,
                late=now - memory.time > patience,
            )
    return None


@functools.cache
def _name_of(user: int) -> str:
    return user_name(user)


@functools.lru_cache(maxsize=8)
def _read_once(folder: Path, user: str, inode: int, changed: int) -> CronCheckRecord | None:
    """Read it once for all runs of a folder, as long as it is the same file."""
    return read_cron_check(folder, user)
