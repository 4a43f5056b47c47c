"""What each rank does now: a page of its node's memory that the rank writes and the agent reads.

Nothing is sent for it, and no file system is asked: a rank writes a few bytes where it enters a section (forward,
optimizer, save, ...), before the collectives in it. Standard library only.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_RECORD = struct.Struct("<QqddQ24s")
"""Sections entered, iteration, since when (by time.monotonic, which is one clock a node), limit, process, name."""
QUIET_SECONDS = 2.0
"""An agent says how its ranks stand when none of them has come further for so long."""
STOPPED_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting in the kernel", "Z": "dead"}
"""States of a process in which it does nothing, by the letter of /proc/PID/stat."""
SET_UP = "set-up"
"""The section of a rank from its fork to the first that it enters itself."""
UNLIMITED_SECTIONS = (SET_UP, "start")
"""Sections that may last for as long as they like, as far as the agent knows."""
STOPPED_SECONDS = 120.0
"""A rank that does nothing at all in one of these for so long hangs: its process neither runs nor takes CPU time."""


class RankActivity(NamedTuple):
    """Where a rank is."""

    rank: int
    entered: int
    """How many sections it has entered since it started; the same on ranks that wait for each other."""
    section: str
    iteration: int
    """Iterations behind it."""
    seconds: float
    """Since it last came further."""
    limit: float
    """Seconds in this section after which it hangs."""
    state: str
    """How its process does nothing (`STOPPED`); empty where it may do something."""


class ActivityPage:
    """A rank's page."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Make it, or go on with that which this process has made. Raises OSError."""
        fd = os.open(_page_path(folder, rank), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, mmap.PAGESIZE)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self._pid = os.getpid()
        self._entered, iteration, _, limit, _, name = _RECORD.unpack_from(self._map)
        self._last = iteration, limit, name

    def enter(self, section: str, iteration: int, limit: float) -> None:
        """This rank is now in another section."""
        self._entered += 1
        self._last = iteration, limit, section.encode()
        self.touch()

    def touch(self) -> None:
        """This rank came further within its section."""
        iteration, limit, name = self._last
        _RECORD.pack_into(self._map, 0, self._entered, iteration, time.monotonic(), limit, self._pid, name)


def remove_pages(folder: Path) -> None:
    """Remove the pages of a round that is over."""
    for path in folder.glob("section-*"):
        path.unlink(missing_ok=True)


class StoppedProcesses:
    """For how long ranks do nothing at all; asked now and then, in one round."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, float]] = {}
        """The CPU time of each, in ticks, and since when it neither runs nor has more, by `time.monotonic`."""

    def seconds(self, pid: int, state: str, ticks: int) -> float:
        """How long this process has been seen in such a state alone, without more CPU time."""
        known, since = self._since.get(pid, (-1, 0.0))
        if not state or ticks != known:
            since = time.monotonic()
        self._since[pid] = ticks, since
        return time.monotonic() - since


def read_activity(folder: Path, ranks: Iterable[int], stopped: StoppedProcesses | None = None) -> list[RankActivity]:
    """Where these ranks of this node are; without those that have no page yet."""
    found = []
    for rank in ranks:
        try:
            data = _page_path(folder, rank).read_bytes()[: _RECORD.size]
        except OSError:
            continue
        if len(data) < _RECORD.size or not any(data):
            continue
        entered, iteration, since, limit, pid, name = _RECORD.unpack(data)
        section = name.rstrip(b"\0").decode(errors="replace")
        state, ticks = _process_state(pid)
        still = 0.0 if stopped is None else stopped.seconds(pid, state, ticks)
        if still >= STOPPED_SECONDS and section in UNLIMITED_SECTIONS:
            limit = STOPPED_SECONDS
        found.append(RankActivity(rank, entered, section, iteration, time.monotonic() - since, limit, state))
    return found


def _process_state(pid: int) -> tuple[str, int]:
    """How a process does nothing, and the CPU time of its threads in ticks."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return STOPPED_STATES["Z"], 0
    return STOPPED_STATES.get(fields[0], ""), int(fields[11]) + int(fields[12])


def _page_path(folder: Path, rank: int) -> Path:
    return folder / f"section-{rank:04}"
