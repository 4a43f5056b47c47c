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
STOPPED = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting in the kernel", "Z": "dead"}
"""States of a process in which it does nothing, by the letter of /proc/PID/stat."""


class Standing(NamedTuple):
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


class Page:
    """A rank's page."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Make it. Raises OSError."""
        fd = os.open(_path(folder, rank), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(fd, 0, mmap.PAGESIZE)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self._pid = os.getpid()
        self._entered = 0
        self._last = (0, 0.0, b"")

    def enter(self, section: str, iteration: int, limit: float) -> None:
        """This rank is now in another section."""
        self._entered += 1
        self._last = iteration, limit, section.encode()
        self.touch()

    def touch(self) -> None:
        """This rank came further within its section."""
        iteration, limit, name = self._last
        _RECORD.pack_into(self._map, 0, self._entered, iteration, time.monotonic(), limit, self._pid, name)


def forget(folder: Path) -> None:
    """Remove the pages of a round that is over."""
    for path in folder.glob("section-*"):
        path.unlink(missing_ok=True)


def standing(folder: Path, ranks: Iterable[int]) -> list[Standing]:
    """Where these ranks of this node are; without those that have entered no section yet."""
    found = []
    for rank in ranks:
        try:
            data = _path(folder, rank).read_bytes()[: _RECORD.size]
        except OSError:
            continue
        if len(data) < _RECORD.size or not any(data):
            continue
        entered, iteration, since, limit, pid, name = _RECORD.unpack(data)
        section = name.rstrip(b"\0").decode(errors="replace")
        found.append(Standing(rank, entered, section, iteration, time.monotonic() - since, limit, _state(pid)))
    return found


def _state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        letter = "Z"
    return STOPPED.get(letter, "")


def _path(folder: Path, rank: int) -> Path:
    return folder / f"section-{rank:04}"
