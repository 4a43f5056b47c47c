"""A trace of torch's profiler, in a few lines: what the device was busy with, and for how long."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

LONGEST_KERNELS = 12


def summarize_trace(path: Path) -> dict[str, Any]:
    """Return the seconds of the kernels of a Chrome trace by name, the longest first; of a CPU its operations.

    `busy_seconds`: in which at least one of them ran. `seconds`: from the begin of the first to the end of the last.
    """
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kind = "kernel" if any(event.get("cat") == "kernel" for event in events) else "cpu_op"
    chosen = [event for event in events if event.get("cat") == kind and event.get("ph") == "X"]
    spent: dict[str, list[float]] = {}
    for event in chosen:
        entry = spent.setdefault(str(event["name"]), [0.0, 0])
        entry[0] += float(event.get("dur", 0)) / 1e6
        entry[1] += 1
    longest = sorted(spent.items(), key=lambda item: -item[1][0])[:LONGEST_KERNELS]
    spans = sorted((float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))) for event in chosen)
    busy, end = 0.0, float("-inf")
    for begin, finish in spans:
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return {
        "kind": kind,
        "events": len(chosen),
        "seconds": (end - spans[0][0]) / 1e6 if spans else 0.0,
        "busy_seconds": busy / 1e6,
        "longest": [{"name": name[:160], "seconds": value, "calls": int(calls)} for name, (value, calls) in longest],
    }


def pack_trace(path: Path, target: Path) -> int:
    """Write a trace to `target` in gzip's form, which trace viewers open; return its bytes."""
    with path.open("rb") as source, gzip.open(target, "wb", compresslevel=5) as packed:
        shutil.copyfileobj(source, packed)
    return target.stat().st_size
