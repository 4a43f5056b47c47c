"""What the logs of an attempt say about its end."""

from __future__ import annotations

import os
from pathlib import Path

from relayrun.chain.log import PREFIX
from relayrun.rundir.attempt import Attempt
from relayrun.rundir.records import Failure

TAIL_BYTES = 200_000
EXCERPT_LINES = 30


def own_log() -> str | None:
    """The file that this process's standard error goes to, if it is one."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if os.path.isfile(path) else None


def size(log: str | None) -> int:
    """Bytes of a log now."""
    return os.path.getsize(log) if log is not None and os.path.exists(log) else 0


def tail(log: str | None, *, since: int = 0) -> str:
    """The end of a log, at most TAIL_BYTES, nothing of it before byte `since`; empty where there is none."""
    if log is None:
        return ""
    try:
        with open(log, "rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def excerpt(log: str) -> str:
    """The lines that matter: from the first traceback or error among the last ones, without the supervisor's own."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith(PREFIX)]
    return "\n".join(lines[-EXCERPT_LINES:])


def failures(attempt: Attempt) -> list[Failure]:
    """What ranks said of their own end."""
    found = [Failure.read(path) for path in attempt.failures.glob("rank-*.json")]
    return sorted((failure for failure in found if failure), key=lambda failure: failure.time)


def answered(stacks: Path) -> set[int]:
    """Ranks that wrote their stacks."""
    found = set()
    for path in stacks.glob("rank-*.txt"):
        if path.stat().st_size:
            found.add(int(path.stem.removeprefix("rank-")))
    return found
