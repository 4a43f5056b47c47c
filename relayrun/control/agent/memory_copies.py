"""Copies of ranks' states in the memory of their node and of the next one, which outlive the ranks.

Each rank has two slots, files in a folder of /dev/shm that belongs to the node's agent, and two more for the copies
that it keeps of a rank of the node before; one is complete while the other is written. A slot has a header of one line
of JSON, which is there from the moment it counts:

    {"rank": 3, "ranks": 8, "iteration": 447, "size": 123456, "plain": 789, "layout": "...", "hash": "..."}

The agent removes the folder when it ends; the next agent on a node removes that of a killed one. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from relayrun.errors import RelayrunError
from relayrun.files import free_space
from relayrun.leftovers import temporary_prefix

SHARED_MEMORY = Path("/dev/shm")
MEMORY_FOLDER_VARIABLE = "RELAYRUN_MEMORY"
"""Environment variable of the ranks: the folder; empty without one."""
MEMORY_ITERATION_VARIABLE = "RELAYRUN_MEMORY_ITERATION"
"""Environment variable of the ranks: the iteration whose copies a restart starts from; empty: from the disk."""
HEADER_BYTES = 4096
"""Bytes before a copy: one page, so that the copy is aligned."""
SLOTS_PER_RANK = 2
OWN, KEPT = "rank", "kept"
"""Prefix of the name of a rank's own copies, and of copies kept for a rank of another node."""
_NAME = re.compile(rf"({OWN}|{KEPT})-(\d+)\.(\d)")


class NodeMemoryFullError(RelayrunError):
    """The node's memory has no room for a copy."""


def make_memory_folder() -> Path:
    """Create the folder of this process's ranks, for this user alone. Raises OSError. `remove_leftovers` sees its
    owner in its name."""
    folder = SHARED_MEMORY / f"{temporary_prefix()}relayrun-ranks"
    folder.mkdir(mode=0o700)
    return folder


class NodeMemoryCopy(NamedTuple):
    """A whole copy in the memory of a node."""

    rank: int
    """The rank whose state it is."""
    iteration: int
    hash: str
    kept: bool
    """It is kept for a rank of another node."""


def read_copies(folder: Path) -> list[NodeMemoryCopy]:
    """Return the copies in this folder; files without a complete header are left out."""
    found = []
    for path in sorted(folder.glob("*-*.*")):
        if (name := _NAME.fullmatch(path.name)) is None:
            continue
        rank, kept = int(name[2]), name[1] == KEPT
        header = MemorySlot(folder, rank, int(name[3]), kept=kept).header() or {}
        if isinstance(header.get("iteration"), int) and isinstance(header.get("hash"), str):
            found.append(NodeMemoryCopy(rank, header["iteration"], header["hash"], kept))
    return found


def newest_complete_copy(copies: Iterable[NodeMemoryCopy], *, ranks: int, after: int) -> tuple[int, str] | None:
    """Return the newest iteration after `after` with a copy for each of these ranks, and the source of most copies.

    The source is `memory` if each rank has its own copy, and `neighbour` if another node keeps a copy that a rank has
    lost. An iteration with two different hashes for one rank does not count. None if no iteration counts.
    """
    found: dict[int, dict[int, dict[bool, str]]] = {}
    for copy in copies:
        found.setdefault(copy.iteration, {}).setdefault(copy.rank, {})[copy.kept] = copy.hash
    for iteration in sorted((known for known in found if known > after), reverse=True):
        places = [found[iteration].get(rank, {}) for rank in range(ranks)]
        if all(len(set(place.values())) == 1 for place in places):
            return iteration, "memory" if all(False in place for place in places) else "neighbour"
    return None


class MemorySlot:
    """One of a rank's files; it does not exist before `reserve`."""

    def __init__(self, folder: Path, rank: int, number: int, *, kept: bool = False) -> None:
        """`kept`: on another node than the rank's own."""
        self.path = folder / f"{KEPT if kept else OWN}-{rank:04}.{number}"
        self.map: mmap.mmap | None = None

    def header(self) -> dict[str, Any] | None:
        """Return the header of the slot; None if it holds no complete copy."""
        with contextlib.suppress(OSError, ValueError):
            with open(self.path, "rb") as file:
                found = json.loads(file.read(HEADER_BYTES).partition(b"\n")[0])
            if isinstance(found, dict):
                return found
        return None

    def reserve(self, size: int, *, spare: int = 0) -> mmap.mmap:
        """Return the slot with room for a copy of `size` bytes behind the header; `spare`: further bytes if it must
        grow.

        The room is allocated at once: else a full file system would end the rank inside a copy (SIGBUS). Raises
        NodeMemoryFullError with the figures.
        """
        if self.map is not None and len(self.map) >= HEADER_BYTES + size:
            return self.map
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, HEADER_BYTES + size + spare)
            self.map = mmap.mmap(fd, HEADER_BYTES + size + spare)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            self.path.unlink()
            room = free_space(self.path.parent)
            raise NodeMemoryFullError(
                f"a copy of this rank's state takes {size:,} bytes, and {room:,} are free", where=self.path.parent
            ) from None
        finally:
            os.close(fd)
        return self.map

    def void(self) -> None:
        """Mark the slot as empty: before a write, and if its content must not be used."""
        if self.map is None:
            with contextlib.suppress(FileNotFoundError), open(self.path, "r+b") as file:
                file.write(b"\0")
        else:
            self.map[:1] = b"\0"

    def commit(self, **header: object) -> None:
        """Mark the written copy as valid."""
        assert self.map is not None
        line = json.dumps(header).encode() + b"\n"
        assert len(line) <= HEADER_BYTES
        self.map[1 : len(line)] = line[1:]
        self.map[:1] = line[:1]  # one byte makes it count

    def open(self) -> mmap.mmap:
        """Return the content, header included. Raises OSError."""
        if self.map is None:
            with open(self.path, "r+b") as file:
                self.map = mmap.mmap(file.fileno(), 0)
        return self.map
