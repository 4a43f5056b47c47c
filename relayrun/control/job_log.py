"""The log of a job: lines that relayrun writes into it, the files it consists of, and the new lines of a growing log.

An agent also writes its lines into a file of its own, in a thread, since that file system may hang.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

from relayrun.control.rundir.records import AttemptStart

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


LOG_PREFIX = "[relayrun "


def log_line(text: str) -> None:
    """One line on standard error, with the time. Nobody ends of a file system of the log that is full, or away."""
    with contextlib.suppress(OSError):
        print(f"{LOG_PREFIX}{time.strftime('%Y-%m-%dT%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def stdout_beside(log: str | None) -> str | None:
    """Standard output of the job whose standard error is `log`: `launchers/lib/log.sh` opens both side by side."""
    return log.removesuffix(".err") + ".out" if log is not None and log.endswith(".err") else None


def job_logs(begin: AttemptStart) -> list[tuple[str, int]]:
    """Standard output and error of the attempt's job, with their bytes when the attempt began; none without a log."""
    output = stdout_beside(begin.log)
    if begin.log is None or output is None:
        return []
    return [(output, begin.output_offset), (begin.log, begin.log_offset)]


def file_size(path: str) -> int:
    """Return the bytes of a file, 0 where there is none. Raises OSError."""
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0


LONGEST_LINE = 1 << 16
"""A longer line is no line of progress: its rest is left out."""

READ_BYTES = 1 << 20

_LINE_END = re.compile(rb"[\r\n]")
"""A progress bar ends its lines with a carriage return alone, and may never write another end."""


class LogFollower:
    """Whole lines of a file, each given once, from byte `offset` on; empty ones are left out.

    What has no end of line yet is kept for later, and what never gets one is never given: half a number is another
    number. A file that has become shorter is read from its beginning.
    """

    def __init__(self, path: str | os.PathLike[str], *, offset: int = 0) -> None:
        self._path = Path(path)
        self._offset = offset
        self._rest = b""

    def read(self) -> Iterator[str]:
        """The lines that are new and whole; none while there is no file. Raises OSError."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self._offset:
                self._offset, self._rest = 0, b""
            file.seek(self._offset)
            while chunk := file.read(READ_BYTES):
                self._offset += len(chunk)
                *lines, rest = _LINE_END.split(self._rest + chunk)
                self._rest = rest[:LONGEST_LINE]
                for line in filter(None, lines):
                    yield line[:LONGEST_LINE].decode("utf-8", errors="replace")
