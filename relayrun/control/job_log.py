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
from queue import Queue

from relayrun.control.rundir.records import AttemptStart
from relayrun.terminal import inert

LOG_FINISH_SECONDS = 2.0
"""Maximum seconds for the last lines."""
LOG_PAUSE = 0.01


class AgentLog:
    """A file to which lines are appended in order; lines that cannot be written are lost."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, Queue[str]()
        threading.Thread(target=self._run, name="journal", daemon=True).start()

    def write(self, line: str) -> None:
        """Append this line soon."""
        self._lines.put(line)

    def finish(self) -> None:
        """Wait until every line is written, at most LOG_FINISH_SECONDS."""
        until = time.monotonic() + LOG_FINISH_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(LOG_PAUSE)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
            self._lines.task_done()


def log_node_line(name: str, text: str, *, log: AgentLog | None = None) -> None:
    """Write a line with time and node into the job's log, and into the log of this agent."""
    line = f"[relayrun {time.strftime('%Y-%m-%dT%H:%M:%S')} {name}] {inert(text)}"
    with contextlib.suppress(OSError):  # srun has gone with the batch host, or the disk is full
        print(line, file=sys.stderr, flush=True)
    if log is not None:
        log.write(line)


LOG_PREFIX = "[relayrun "


def log_line(text: str) -> None:
    """Write one line with the time to standard error. A full or silent disk of the log raises no error."""
    with contextlib.suppress(OSError):
        print(f"{LOG_PREFIX}{time.strftime('%Y-%m-%dT%H:%M:%S')}] {inert(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def logged(words: str, *kinds: type[Exception]) -> Iterator[None]:
    """Log an error of these kinds behind these words: the program goes on without what the block was to do."""
    try:
        yield
    except kinds as error:
        log_line(f"{words}: {getattr(error, 'message', error)}")


def stdout_beside(log: str | None) -> str | None:
    """Return the standard output beside a standard error: `launchers/lib/log.sh` opens both side by side."""
    return log.removesuffix(".err") + ".out" if log is not None and log.endswith(".err") else None


def job_output_files(begin: AttemptStart) -> list[tuple[str, int]]:
    """Return standard output and error of the attempt's job, and their bytes when it began; empty without a log."""
    output = stdout_beside(begin.log)
    if begin.log is None or output is None:
        return []
    return [(output, begin.output_offset), (begin.log, begin.log_offset)]


def log_size(log: str | os.PathLike[str] | None) -> int:
    """Return the present bytes of a log; 0 if there is none, or if it cannot be looked at."""
    try:
        return 0 if log is None else os.path.getsize(log)
    except OSError:
        return 0


LONGEST_LINE = 1 << 16
"""Maximum bytes of a line of progress; the rest of a longer line is left out."""

READ_BYTES = 1 << 20

_LINE_END = re.compile(rb"[\r\n]")
"""A progress bar ends its lines with a carriage return alone, and may never write another end."""


class LogFollower:
    """Yields the complete lines of a file, each once, from byte `offset` on, without empty lines.

    An incomplete line is kept until its end comes: half a number is another number. A file that has become shorter is
    read from its beginning.
    """

    def __init__(self, path: str | os.PathLike[str], *, offset: int = 0) -> None:
        self._path = Path(path)
        self._offset = offset
        self._rest = b""

    def read(self) -> Iterator[str]:
        """Yield the new complete lines; none without a file. Raises OSError."""
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
