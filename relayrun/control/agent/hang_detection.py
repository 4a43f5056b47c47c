"""Activity of each rank, and the detection of hangs.

A rank writes a page in its node's memory when it enters a section (forward, optimizer, save, ...); the agent reads it.
No message and no file system is involved. The ranks hang if the rank that progressed last is still for longer than the
longest limit of any rank's section. Before the first step there is no limit, except for a rank whose process is
stopped.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from relayrun.control.rundir import node_health as of_ranks
from relayrun.control.rundir.records import Hang

_RECORD = struct.Struct("<QqddQ24s")
"""Sections entered, iteration, start of the section (by time.monotonic, one clock per node), limit, process, name."""
QUIET_SECONDS = 30.0
"""An agent reports its ranks' activity if none of them progressed for this time, or for its limit if that is shorter.
Reports of ordinary long steps would be a megabyte a second of thousands of nodes."""
STOPPED_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting in the kernel", "Z": "dead"}
"""States of a process in which it is idle, by the letter of /proc/PID/stat."""
SET_UP = "set-up"
"""The section of a rank from its fork to the first section that it enters itself."""
UNLIMITED_SECTIONS = (SET_UP, "start")
"""Sections without a time limit, as far as the agent knows."""
STOPPED_SECONDS = 120.0
"""A rank hangs in one of these if its process neither runs nor takes CPU time for this time."""


class RankActivity(NamedTuple):
    """Activity of a rank."""

    rank: int
    entered: int
    """Number of sections entered since its start; equal on ranks that wait for each other."""
    section: str
    iteration: int
    """Completed iterations."""
    seconds: float
    """Seconds since its last progress."""
    limit: float
    """Seconds in this section after which it hangs."""
    state: str
    """State of its process if that is idle (`STOPPED_STATES`); empty otherwise."""


class ActivityPage:
    """A rank's page."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Create the page, or take over the page that this process has created. Raises OSError."""
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
        """Record that this rank enters another section."""
        self._entered += 1
        self._last = iteration, limit, section.encode()
        self.touch()

    def touch(self) -> None:
        """Record progress of this rank within its section."""
        iteration, limit, name = self._last
        _RECORD.pack_into(self._map, 0, self._entered, iteration, time.monotonic(), limit, self._pid, name)


def remove_pages(folder: Path) -> None:
    """Remove the pages of a restart that is over."""
    for path in folder.glob("section-*"):
        path.unlink(missing_ok=True)


class StoppedProcesses:
    """Measures for how long ranks of one restart are idle; asked now and then."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[int, float]] = {}
        """CPU time of each process in ticks, and the time since which it neither runs nor takes more, by
        `time.monotonic`."""

    def seconds(self, pid: int, state: str, ticks: int) -> float:
        """Return the seconds for which this process was idle in every look, without more CPU time."""
        known, since = self._since.get(pid, (-1, 0.0))
        if not state or ticks != known:
            since = time.monotonic()
        self._since[pid] = ticks, since
        return time.monotonic() - since


def read_activity(folder: Path, ranks: Iterable[int], stopped: StoppedProcesses | None = None) -> list[RankActivity]:
    """Return the activity of these ranks of this node; ranks without a page are left out."""
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
    """Return the idle state of a process, and the CPU time of its threads in ticks."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return STOPPED_STATES["Z"], 0
    return STOPPED_STATES.get(fields[0], ""), int(fields[11]) + int(fields[12])


def _page_path(folder: Path, rank: int) -> Path:
    return folder / f"section-{rank:04}"


STACKS_SECONDS = 2.0
"""Seconds for ranks that hang to write their Python stacks."""


class HangDetector:
    """Collects the activity that agents report in one restart."""

    def __init__(self) -> None:
        self._nodes: dict[int, Sequence[RankActivity]] = {}
        self._asked: float | None = None
        """Time at which ranks that hang were asked for their stacks."""

    def hear(self, node: int, standing: Iterable[Sequence[object]] | None) -> None:
        """Take an agent's report; None: its ranks progress, or have not begun."""
        if standing is None:
            self._nodes.pop(node, None)
        else:
            self._nodes[node] = [RankActivity(*values) for values in standing]  # type: ignore[arg-type]

    def look(self, nodes: Iterable[int], *, ranks: int) -> tuple[Sequence[RankActivity] | None, bool]:
        """Return the activity of ranks that hang, once they had time to write stacks; and whether to ask for stacks
        now."""
        found = self.judge(nodes, ranks=ranks)
        if found is None:
            self._asked = None
        elif self._asked is None:
            self._asked = time.monotonic()
            return None, True
        elif time.monotonic() - self._asked > STACKS_SECONDS:
            return found, False
        return None, False

    def judge(self, nodes: Iterable[int], *, ranks: int) -> Sequence[RankActivity] | None:
        """Return the activity of all ranks if they hang; else None. `nodes`: the nodes that train."""
        found = sorted(standing for node in nodes for standing in self._nodes.get(node, ()))
        if len(found) != ranks:
            return None
        if any(one.section in UNLIMITED_SECTIONS and one.state and one.seconds >= one.limit for one in found):
            return found  # the others may wait for it as long as they like
        return found if min(one.seconds for one in found) > max(one.limit for one in found) else None


def hang_record(found: Sequence[RankActivity], stacks: Path) -> Hang:
    """Return the record of a hang; `stacks`: the folder of the Python stacks.

    Late is a rank whose process is idle; else a rank that entered fewer sections than others; else a rank whose stack
    is in no collective while other stacks are.
    """
    stopped = {one.rank: f"{one.section}, {one.state}" for one in found if one.state}
    most = max(one.entered for one in found)
    behind = {one.rank: one.section for one in found if one.entered < most}
    by_stack = of_ranks.late_ranks(stacks)
    late: Mapping[int, str] = stopped or {rank: by_stack.get(rank, section) for rank, section in behind.items()}
    late = late or by_stack
    first = next((one for one in found if one.rank in late), found[0])
    return Hang(
        iteration=max(one.iteration for one in found),
        phase=first.section,
        seconds=min(one.seconds for one in found),
        silent=sorted({one.rank for one in found} - of_ranks.ranks_with_stacks(stacks)),
        late={str(rank): place for rank, place in late.items()},
        collectives=of_ranks.unfinished_collectives(stacks),
        time=time.time(),
    )
