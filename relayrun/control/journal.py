"""What an agent says: in the job's log, and in a file of its own.

That one is written in a thread: its file system may hang, and the agent goes on.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue

LOG_FINISH_SECONDS = 2.0
"""How long the last lines may take."""
LOG_PAUSE = 0.01


class AgentLog:
    """A file to which lines are added, in their order; those that cannot be written are lost."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, SimpleQueue[str]()
        self._left = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="journal", daemon=True).start()

    def write(self, line: str) -> None:
        """Have this line written soon."""
        with self._lock:
            self._left += 1
        self._lines.put(line)

    def finish(self) -> None:
        """Wait for what is under way, but not for long."""
        until = time.monotonic() + LOG_FINISH_SECONDS
        while self._left and time.monotonic() < until:
            time.sleep(LOG_PAUSE)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
            with self._lock:
                self._left -= 1


def log_node_line(name: str, text: str, *, log: AgentLog | None = None) -> None:
    """A line in the job's log, with the time and the node; and in that of this agent."""
    line = f"[relayrun {time.strftime('%Y-%m-%dT%H:%M:%S')} {name}] {text}"
    with contextlib.suppress(OSError):  # srun has gone with the batch host, or the disk is full
        print(line, file=sys.stderr, flush=True)
    if log is not None:
        log.write(line)
