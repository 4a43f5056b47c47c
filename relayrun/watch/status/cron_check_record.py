"""The record that the cron check of a folder keeps, from which everybody sees when the last check ran.

FOLDER/.sentinel-USER.json   the last check and its state, see `CronCheckRecord`
FOLDER/.sentinel-USER.lock   held by the running check; its mtime is the last report that could not be recorded

USER owns the checked runs; several users can check one folder. Uses the standard library alone.
"""

from __future__ import annotations

import contextlib
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
from relayrun.leftovers import open_lock, try_lock

_cached_user_name = functools.cache(user_name)
MAX_FOLDER_DEPTH = 4
"""Levels of folders between the checked folder and its runs."""
LATE_CHECK_SECONDS = 900.0
"""Age of the last check from which it is late, if three times the last period is not longer."""


@dataclass(frozen=True, kw_only=True)
class CronCheckRecord(Record):
    """`.sentinel-USER.json`: the last cron check, and its state for the next one.

    Times are seconds since 1970. Runs are named by their path below the folder.
    """

    time: float
    """End of the last check."""
    period: float | None = None
    """Seconds between the last two checks; None after the first."""
    host: str
    user: str
    seen: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """By run and cause: `since`, the first time it was seen, and `told`, True if it was reported."""
    running: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By run: the running `job`, and `since`, the first of the unbroken checks that saw it running."""
    said: dict[str, float] = field(default_factory=dict)
    """Time of the last printed line, by run and cause."""
    jobs_known: bool = True
    """True if this check or an earlier one had an answer of Slurm."""


@dataclass(frozen=True, kw_only=True)
class LastCronCheck:
    """The last cron check of a run's folder."""

    folder: str
    """The checked folder."""
    time: float | None
    """Seconds since 1970; None if the record cannot be read."""
    period: float | None
    host: str
    user: str
    late: bool
    """The next check is overdue: cron or its machine is down."""


def cron_check_path(folder: Path, user: str) -> Path:
    return folder / f".sentinel-{user}.json"


def cron_check_lock_path(folder: Path, user: str) -> Path:
    return folder / f".sentinel-{user}.lock"


def may_report_failure(folder: Path, *, now: float) -> bool:
    """True at most once per hour, by the mtime of the lock, which is then set to `now`."""
    try:
        fd = _open_lock(cron_check_lock_path(folder, user_name(os.geteuid())))
    except OSError:  # nothing can be recorded: report each time
        return True
    try:
        return is_first_in_hour(fd, now=now)
    finally:
        os.close(fd)


def is_first_in_hour(lock: int, *, now: float) -> bool:
    """True if the lock is older than an hour; its mtime is then set to `now`."""
    if now - os.fstat(lock).st_mtime < QUIET_SECONDS:
        return False
    with contextlib.suppress(OSError):
        os.utime(lock, (now, now))
    return True


def _open_lock(path: Path) -> int:
    try:
        fd = open_lock(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.utime(fd, (0, 0))  # nothing was reported yet
        return fd
    except FileExistsError:
        return open_lock(path, os.O_RDWR)


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[tuple[int, bool]]:
    """Hold the lock; yield its file descriptor, and True if this process has it."""
    fd = _open_lock(path)
    try:
        mine = True
        with contextlib.suppress(OSError):  # without locks two checks at once write the same notice ids
            mine = try_lock(fd)
        yield fd, mine
    finally:
        os.close(fd)


def read_cron_check(folder: Path, user: str) -> CronCheckRecord | None:
    """Return the user's last check of this folder, None without one. Raises RunDirError if it is damaged."""
    return CronCheckRecord.read(cron_check_path(folder, user))


class FolderCache:
    """Answers of the file system about folders and their records, shared by runs of the same folders."""

    def __init__(self) -> None:
        self.real_path = RealPathCache()
        self.checks = functools.cache(self._checks)

    def _checks(self, folder: str, user: str, depth: int) -> tuple[tuple[str, CronCheckRecord | None], ...]:
        """Return the user's checks of a folder and of up to `depth` folders above it, None for a damaged record."""
        above = self.checks(os.path.dirname(folder), user, depth - 1) if depth else ()
        try:
            last = read_cron_check(Path(folder), user) if os.path.exists(f"{folder}/.sentinel-{user}.json") else None
            return above if last is None else ((folder, last), *above)
        except PermissionError:  # another user's private record
            return above
        except (RunDirError, OSError):
            return ((folder, None), *above)


def last_cron_check(
    run: Run, owner: int | None, *, now: float, cache: FolderCache | None = None
) -> LastCronCheck | None:
    """Return the last check of a run by its owner's cron, None if none is set up.

    `owner`: uid, None for the current user. `now`: seconds since 1970. `cache`: a cache for runs read together.
    """
    cache = FolderCache() if cache is None else cache
    user = _cached_user_name(os.geteuid() if owner is None else owner)
    given = str(run.path if run.path.is_absolute() else run.path.absolute())
    for path in dict.fromkeys((given, cache.real_path(given))):
        for folder, memory in cache.checks(path, user, MAX_FOLDER_DEPTH):
            time, period, host = (memory.time, memory.period, memory.host) if memory else (None, None, "")
            late = time is None or now - time > max(LATE_CHECK_SECONDS, 3 * (period or 0.0))
            return LastCronCheck(folder=folder, time=time, period=period, host=host, user=user, late=late)
    return None
