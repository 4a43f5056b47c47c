"""How far the tasks of a dump are, in files: each task writes one of its own, and who only looks on reads them.

`OUTPUT/.progress/SHARD.json`, written anew every ten seconds (or `RELAYRUN_PROGRESS_SECONDS`) and gone when its shard
is finished. One that has not changed for `STALE_SECONDS` belongs to a task that was killed, or that waits for its
file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from relayrun.files import read_json, write_atomic
from relayrun.tokens.tokenize.limit import slurm_job_id

PROGRESS_FOLDER = ".progress"
PROGRESS_VARIABLE = "RELAYRUN_PROGRESS_SECONDS"
STALE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class RunningTask:
    """One task as it last said. Times are seconds since 1970."""

    shard: str
    node: str
    job: str
    """Slurm's id of the job; empty elsewhere."""
    started: float
    at: float
    documents: int
    tokens: int
    bytes_read: int
    """Bytes of the files that are done."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.at - self.started) if self.at > self.started else 0.0


class TaskProgress:
    """The file of one task. A disk that is full or slow to take it does not stop the task."""

    def __init__(self, output: str | os.PathLike[str], shard: str) -> None:
        self._path = Path(output, PROGRESS_FOLDER, f"{shard}.json")
        self._seconds = float(os.environ.get(PROGRESS_VARIABLE) or 10)
        self._next = 0.0
        self.bytes_read = 0
        """Bytes of the files that are done; the task counts them here."""
        self._last = RunningTask(
            shard=shard,
            node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            job=slurm_job_id() or "",
            started=time.time(),
            at=time.time(),
            documents=0,
            tokens=0,
            bytes_read=0,
        )
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
        self.say(documents=0, tokens=0)

    def say(self, *, documents: int, tokens: int) -> None:
        """Write, unless the last time was a moment ago. Cheap enough to be called for every batch."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._seconds
        record = asdict(self._last) | {
            "at": time.time(),
            "documents": documents,
            "tokens": tokens,
            "bytes_read": self.bytes_read,
        }
        with contextlib.suppress(OSError):
            write_atomic(self._path, json.dumps(record) + "\n", durable=False)

    def end(self) -> None:
        """The task is over."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def read_progress(output: str | os.PathLike[str]) -> list[RunningTask]:
    """What the tasks of a folder of shards last said, those that were killed included."""
    found = []
    for path in sorted(Path(output, PROGRESS_FOLDER).glob("[!.]*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):  # gone, or of another version
            found.append(RunningTask(**read_json(path)))
    return found


def clear_progress(output: str | os.PathLike[str]) -> None:
    """Forget the tasks of an earlier run."""
    shutil.rmtree(Path(output, PROGRESS_FOLDER), ignore_errors=True)
