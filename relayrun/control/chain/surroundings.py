"""The surroundings of an attempt that failed: space, memory and names, as its last job on the batch host finds them.

A cause may leave no words in a log: the kernel kills without any, and a full disk takes none. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import AttemptStart, Record
from relayrun.control.scheduler.error_lines import expand_nodelist
from relayrun.files import MIN_FREE_BYTES

RESOLVE_SECONDS = 5.0
"""Maximum seconds for the names of all nodes."""
MAX_NAMES = 64


@dataclass(frozen=True, kw_only=True)
class Surroundings(Record):
    """`surroundings.json`: written by the supervisor after an attempt failed."""

    time: float
    free_bytes: dict[str, int] = field(default_factory=dict)
    """Free bytes for this user, by folder."""
    free_inodes: dict[str, int] = field(default_factory=dict)
    oom_kills: int | None = None
    """Processes of the job that the kernel killed for memory on the batch host; None if the cgroup does not say."""
    unresolved: list[str] = field(default_factory=list)
    """Names of the job's nodes that the batch host does not resolve."""

    @property
    def full(self) -> list[str]:
        """The folders whose file system is full."""
        no_inodes = {path for path, count in self.free_inodes.items() if count == 0}
        return [path for path, free in self.free_bytes.items() if free < MIN_FREE_BYTES or path in no_inodes]


def record_surroundings(attempt: Attempt, started: AttemptStart) -> None:
    """Write the surroundings of a failed attempt; a full disk takes no record."""
    run = attempt.path.parent.parent
    with contextlib.suppress(OSError):
        found = observe([str(run), str(run / "checkpoints"), "/tmp", "/dev/shm"], expand_nodelist(started.nodes))
        found.write(attempt.surroundings)


def observe(folders: Sequence[str], nodes: Sequence[str]) -> Surroundings:
    """Return the space below the folders, the memory kills of this job, and the names that do not resolve."""
    found = Surroundings(time=time.time(), oom_kills=_oom_kills(), unresolved=_unresolved(nodes))
    for folder in folders:
        with contextlib.suppress(OSError):
            free = os.statvfs(folder)
            found.free_bytes[folder] = free.f_bavail * free.f_frsize
            if free.f_files:  # some file systems count none
                found.free_inodes[folder] = free.f_favail
    return found


def _oom_kills(cgroups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    try:
        own = next(line for line in Path(cgroups).read_text().splitlines() if line.startswith("0::"))[3:]
        parts = own.split("/")
        job = next((n for n, part in enumerate(parts) if re.fullmatch(r"job_\d+", part)), len(parts) - 1)
        events = Path(root + "/".join(parts[: job + 1]), "memory.events").read_text()
        return next(int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))
    except (OSError, ValueError, StopIteration):
        return None


def _unresolved(names: Sequence[str]) -> list[str]:
    """Return the names without an address. A resolver that does not answer leaves its names out."""
    failed: list[str] = []

    def resolve() -> None:
        for name in names[:MAX_NAMES]:
            try:
                socket.getaddrinfo(name, None)
            except OSError:
                failed.append(name)

    worker = threading.Thread(target=resolve, daemon=True)
    worker.start()
    worker.join(RESOLVE_SECONDS)
    return list(failed)
