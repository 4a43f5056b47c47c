"""Memory of a node over time, a line every few seconds: of the host, and of its GPUs where there are any.

A thread of the node's first rank writes it. It waits for nothing but its own clock and the GPUs' driver, and a failure
ends it with one line.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from relayrun.train.reporting.gpus import node_gpus

log = logging.getLogger(__name__)

GIB = 1 << 30


def memory_sample() -> str:
    """Return the memory in use now, as one line: `host 12.3 of 95.0 GiB`, then `gpu 0: 1.2 of 94.0 GiB` for each
    GPU."""
    import psutil

    memory = psutil.virtual_memory()
    used = [f"host {(memory.total - memory.available) / GIB:.1f} of {memory.total / GIB:.1f} GiB", *_gpu_memory()]
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {', '.join(used)}"


def _gpu_memory() -> list[str]:
    return [f"gpu {gpu.index}: {_gib(gpu.memory_used)} of {_gib(gpu.memory_total)} GiB" for gpu in node_gpus()]


def _gib(size: int | None) -> str:
    """Some devices do not tell their memory."""
    return "?" if size is None else f"{size / GIB:.1f}"


def start_memory_log(path: Path, *, interval: float) -> None:
    """Append a line to `path` now and every `interval` seconds, until this process ends."""
    threading.Thread(target=_write_memory_log, args=(path, interval), name="memory", daemon=True).start()


def _write_memory_log(path: Path, interval: float) -> None:
    try:
        while True:
            with path.open("a", encoding="utf-8") as file:
                file.write(memory_sample() + "\n")
            time.sleep(interval)
    except OSError as error:
        log.warning("memory is no longer logged: %s", error)
