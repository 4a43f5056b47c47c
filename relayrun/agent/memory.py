"""Copies of ranks' states in the memory of their own node, which outlive the ranks. Standard library only.

Each rank has two slots, files in a folder of /dev/shm that belongs to the node's agent. They take turns, so that one is
whole while the other is written. A slot has a header of one line of JSON, which is there from the moment it counts:

    {"iteration": 447, "size": 123456, "plain": 789, "layout": "...", "hash": "..."}

The agent removes the folder when it ends; one that a killed agent left is removed by the next one on its node.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
from pathlib import Path
from typing import Any

from relayrun.errors import RelayrunError
from relayrun.files import free_space, temporary_prefix

PLACE = Path("/dev/shm")
FOLDER = "RELAYRUN_MEMORY"
"""Environment variable of the ranks that has the folder; empty where there is none."""
ITERATION = "RELAYRUN_MEMORY_ITERATION"
"""Environment variable of the ranks that has the iteration whose copies a round starts from; none: from the disk."""
HEADER = 4096
"""Bytes before a copy; a page, so that the copy begins with one."""
SLOTS = 2


class NoRoom(RelayrunError):
    """The node's memory has no room for a copy."""


def make_folder() -> Path:
    """Make the folder of this process's ranks, for this user alone.

    Its name tells `files.remove_leftovers` whose it is. Raises OSError where that cannot be, or where somebody has
    made it before.
    """
    folder = PLACE / f"{temporary_prefix()}relayrun-ranks"
    folder.mkdir(mode=0o700)
    return folder


def iterations(folder: Path, rank: int) -> list[int]:
    """The iterations of which a rank has a copy in this folder."""
    headers = (Slot(folder, rank, number).header() for number in range(SLOTS))
    return [int(header["iteration"]) for header in headers if header is not None]


class Slot:
    """One of a rank's files; nothing of it is made before `reserve`."""

    def __init__(self, folder: Path, rank: int, number: int) -> None:
        self.path = folder / f"rank-{rank:04}.{number}"
        self.map: mmap.mmap | None = None

    def header(self) -> dict[str, Any] | None:
        """What the slot holds; None where it holds nothing whole."""
        with contextlib.suppress(OSError, ValueError):
            with open(self.path, "rb") as file:
                found = json.loads(file.read(HEADER).partition(b"\n")[0])
            if isinstance(found, dict):
                return found
        return None

    def reserve(self, size: int) -> mmap.mmap:
        """Return the slot with room for a copy of `size` bytes behind the header.

        The room is allocated at once: else a full file system would end the rank in the middle of a copy (SIGBUS).
        Raises NoRoom with the figures.
        """
        if self.map is not None and len(self.map) >= HEADER + size:
            return self.map
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, HEADER + size)
            self.map = mmap.mmap(fd, HEADER + size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            self.path.unlink()
            room = free_space(self.path.parent)
            raise NoRoom(
                f"a copy of this rank's state takes {size:,} bytes, and {room:,} are free", where=self.path.parent
            ) from None
        finally:
            os.close(fd)
        return self.map

    def void(self) -> None:
        """Let it hold nothing: before it is written, and where what it holds must not be taken up."""
        if self.map is None:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        else:
            self.map[:1] = b"\0"

    def commit(self, **header: object) -> None:
        """Let what was written count."""
        assert self.map is not None
        line = json.dumps(header).encode() + b"\n"
        assert len(line) <= HEADER
        self.map[1 : len(line)] = line[1:]
        self.map[:1] = line[:1]  # one byte makes it count

    def open(self) -> mmap.mmap:
        """Return what lies in it, header included. Raises OSError."""
        if self.map is None:
            with open(self.path, "r+b") as file:
                self.map = mmap.mmap(file.fileno(), 0)
        return self.map
