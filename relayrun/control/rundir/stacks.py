"""What the Python stacks tell that ranks wrote when they were asked: who answered, and for whom the others wait."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

WAITING_PATHS = (
    "/torch/distributed/",
    "/torch/cuda/",
    "/megatron/core/pipeline_parallel/p2p",
    "/megatron/core/distributed/",
)
"""Parts of paths of functions in which a rank waits for others, or for what it has given to its GPU."""
STACK_FRAMES = 3
"""Frames of a stack, from the innermost on, by which a rank's place is told."""
_STACK_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')


def ranks_with_stacks(stacks: Path) -> set[int]:
    """Ranks that wrote their stacks."""
    found = set()
    for path in stacks.glob("rank-*.txt"):
        if path.stat().st_size:
            found.add(int(path.stem.removeprefix("rank-")))
    return found


def late_ranks(stacks: Path) -> dict[int, str]:
    """Ranks for which the others wait, by their Python stacks, with their places: `sleep_on (hooks.py:33)`.

    A rank waits where the innermost frames of its main thread are in a collective, a message or a wait for its GPU.
    Empty where no rank waits, or all do: then the stacks do not tell.
    """
    places: dict[int, list[re.Match[str]]] = {}
    for path in stacks.glob("rank-*.txt"):
        text = path.read_text(encoding="utf-8", errors="replace")
        main = text.rpartition("hread 0x")[2]  # the last one that is written
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
