"""Where training went back to a checkpoint inside an attempt: by a rewind, or with ranks that were started again.

Either is a line of the attempt's metrics, `{"iteration": N, "rewind": {...}}` or `{"iteration": N, "round": M}`: what
follows begins behind iteration N. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESET_KEYS = ("rewind", "round")
"""Names that tell such a line."""
METRICS_CHUNK = 1 << 20
"""Bytes that are taken at a time: a run may have a million lines."""


def resets_iteration(line: Mapping[str, Any]) -> bool:
    """Whether a line of the metrics says that training went back."""
    return any(kind in line for kind in RESET_KEYS)


def iteration_resets(metrics: Path, rewinds: Sequence[int], *, before_rewind: int | None = None) -> list[int]:
    """The iterations to which an attempt went back, in the order of its metrics; a missing file has no line.

    `rewinds`: those on record, each of which is there before its line. `before_rewind`: only what came before the
    rewind of this number, from 1 on.
    """
    found = [(int(line["iteration"]), "rewind" in line) for line in _reset_lines(metrics)]
    found += [(iteration, True) for iteration in rewinds[sum(rewind for _, rewind in found) :]]
    places = [place for place, (_, rewind) in enumerate(found) if rewind]
    if before_rewind is not None and len(places) >= before_rewind:
        found = found[: places[before_rewind - 1]]
    return [iteration for iteration, _ in found]


def _reset_lines(metrics: Path) -> Iterator[dict[str, Any]]:
    """The lines by which training goes back; no other one is parsed, and none that a killed writer left."""
    keys = tuple(f'"{kind}": '.encode() for kind in RESET_KEYS)
    try:
        file = open(metrics, "rb")  # noqa: SIM115 - closed below, where the generator is
    except FileNotFoundError:
        return
    with file:
        while lines := file.readlines(METRICS_CHUNK):
            text = b"".join(lines)
            for line in lines if any(key in text for key in keys) else ():
                if line.endswith(b"\n") and any(key in line for key in keys):
                    try:
                        value = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(value, dict) and resets_iteration(value):
                        yield value
