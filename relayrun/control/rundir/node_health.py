"""Health of nodes and ranks: findings of node checks, slow ranks, ranks that hang. Standard library only.

attempts/0007/node_health.jsonl   the findings of one attempt, a line each, and the action that followed
metrics.jsonl, `straggler`        the rank that is slower than its peers
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import Record
from relayrun.files import read_json_lines

HealthAction = Literal["warned", "left out", "ended"]


@dataclass(frozen=True, kw_only=True)
class HealthFinding(Record):
    """A fault of a node, with its value and the limit that it exceeds."""

    node: str
    check: str
    """`shm`, `tmp`, `run_dir`, `open_files`, `clock`, `gpus`, `gpu_ecc`, `gpu_rows`, `gpu_slowed`, `command` or
    `answer`."""
    value: float
    limit: float
    words: str
    hard: bool
    """Ranks cannot train on the node, or their results cannot be trusted."""
    action: HealthAction = "warned"
    reason: str = ""
    """The reason for which a sick node was not excluded."""
    restart: int = 0
    """The restart after which it was found; 0: before the first one."""
    time: float = 0.0

    @property
    def told(self) -> str:
        """One line for people."""
        what = {"warned": "goes on", "left out": "left out", "ended": "ends the attempt"}[self.action]
        return f"{self.node}: {self.words}; {what}" + (f", {self.reason}" if self.reason else "")


def read_findings(attempt: Attempt) -> list[HealthFinding]:
    """Return the findings of this attempt, oldest first."""
    return [HealthFinding.of(line) for line in read_json_lines(attempt.node_health)]


def why_health_ended_attempt(attempt: Attempt) -> str:
    """Return in words which findings ended an attempt; empty if none did."""
    return "; ".join(f"{found.node}: {found.words}" for found in read_findings(attempt) if found.action == "ended")


def sick_nodes(attempt: Attempt) -> dict[str, str]:
    """Return the nodes of this attempt on which ranks cannot train and that were acted upon, with the reason."""
    return {found.node: found.words for found in read_findings(attempt) if found.hard and found.action != "warned"}


WAITING_PATHS = (
    "/torch/distributed/",
    "/torch/cuda/",
    "/megatron/core/pipeline_parallel/p2p",
    "/megatron/core/distributed/",
)
"""Parts of source paths of functions in which a rank waits for other ranks, or for its GPU."""
STACK_FRAMES = 3
"""Number of innermost frames of a stack that are examined."""
_STACK_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')


def ranks_with_stacks(stacks: Path) -> set[int]:
    """Return the ranks that wrote their stacks."""
    return {int(path.stem.removeprefix("rank-")) for path in stacks.glob("rank-*.txt") if path.stat().st_size}


def late_ranks(stacks: Path) -> dict[int, str]:
    """Return the ranks for which the others wait, by their Python stacks, with their places: `sleep_on (hooks.py:33)`.

    A rank waits if its main thread is in a collective, a message or a wait for its GPU. Empty if no rank waits, or all
    do.
    """
    places: dict[int, list[re.Match[str]]] = {}
    for path in stacks.glob("rank-*.txt"):
        text = path.read_text(encoding="utf-8", errors="replace")
        main = text.rpartition("hread 0x")[2]  # the main thread is written last
        if frames := list(islice(_STACK_FRAME.finditer(main), STACK_FRAMES)):
            places[int(path.stem.removeprefix("rank-"))] = frames
    waiting = {
        rank
        for rank, frames in places.items()
        if any(part in frame["file"] for frame in frames for part in WAITING_PATHS)
    }
    if not waiting:
        return {}
    return {
        rank: f"{frames[0]['name']} ({Path(frames[0]['file']).name}:{frames[0]['line']})"
        for rank, frames in sorted(places.items())
        if rank not in waiting
    }


STALE_SECONDS = 60.0
"""A rank that has not answered this time has an older file."""


def unfinished_collectives(stacks: Path) -> dict[str, str]:
    """Return the oldest unfinished collective by rank, as torch's flight recorder has it, with its number in its group:
    `all_reduce 57 of TENSOR_MODEL_PARALLEL_GROUP`."""
    found: dict[str, str] = {}
    newest = max((path.stat().st_mtime for path in stacks.glob("collectives-*.json")), default=0.0)
    for path in sorted(stacks.glob("collectives-*.json")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # of another torch
            if path.stat().st_mtime < newest - STALE_SECONDS:
                continue
            entry = json.loads(path.read_text())[0]
            number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
            words = f"{entry['profiling_name'].partition(':')[2]} {number} of {entry['process_group'][1]}"
            found[str(int(path.stem.removeprefix("collectives-")))] = words[:200]
    return found


STRAGGLER_WINDOW = 20
"""Steps over which ranks are compared."""
STRAGGLER_SECTIONS = ("data", "forward", "optimizer", "save")
STRAGGLER_RATIO = 1.3
"""A rank that takes this many times as long as its peers is a straggler."""


@dataclass(frozen=True, kw_only=True)
class Straggler(Record):
    """`straggler` in a line of metrics.jsonl: the slow rank of the last STRAGGLER_WINDOW steps."""

    rank: int
    node: str
    section: str
    """The section with the largest loss: `data`, `forward` (both passes), `optimizer` or `save`."""
    ratio: float
    """Its own time over the median of its peers', all sections together; waiting for others is not counted."""
    seconds: float
    """Additional seconds per step of this rank in this section, compared with its peers."""

    @property
    def words(self) -> str:
        """One line for people."""
        return (
            f"rank {self.rank} on {self.node} takes {self.ratio:.2f} times as long as its peers, "
            f"{1000 * self.seconds:.0f} ms a step more in {self.section}"
        )


def slowest_rank(seconds: Sequence[Sequence[float]]) -> tuple[int, float, str, float]:
    """Return the slowest rank, its time over the median of the others', its worst section, and the loss in it.
    `seconds`: by rank and STRAGGLER_SECTIONS, of at least two ranks."""
    totals = [sum(own) for own in seconds]
    rank = max(range(len(totals)), key=totals.__getitem__)
    others = [own for other, own in enumerate(seconds) if other != rank]
    usual = statistics.median(sum(own) for own in others)
    more = [own - statistics.median(other[place] for other in others) for place, own in enumerate(seconds[rank])]
    most = max(range(len(STRAGGLER_SECTIONS)), key=more.__getitem__)
    return rank, totals[rank] / usual if usual else 1.0, STRAGGLER_SECTIONS[most], more[most]
