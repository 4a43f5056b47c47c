"""Follow a running job: new lines of its logs, and its progress from the metrics."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.control import job_log
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError

MAX_POLL_BYTES = 1 << 24
"""Maximum new bytes of a log that one poll returns."""


class ProgressFollower:
    """Prints the progress of a run to standard error, at most one line every `seconds`."""

    def __init__(self, run: Run, *, total_steps: int | None, seconds: float = 10.0) -> None:
        self._run = run
        self._total = total_steps
        self._seconds = seconds
        self._attempt = 0
        self._metrics = job_log.LogFollower(run.attempt(0).metrics)
        self._next = 0.0

    def poll(self) -> None:
        """Print a line if there is a new step and the last line is old enough."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._seconds
        lines = self._new_lines()
        steps = [line for line in lines if not line.keys() & {"validation", "rollback", "restart"}]
        if steps:
            last = steps[-1]
            speeds = [line["tokens_per_second"] for line in steps if "tokens_per_second" in line]
            speed = f"  {sum(speeds) / len(speeds):,.0f} tokens/s" if speeds else ""
            of = f"/{self._total}" if self._total else ""
            loss = f"  loss {last['loss']:.3f}" if "loss" in last else ""  # optional for a foreign program
            words = f"attempt {self._attempt}  iteration {last['iteration']}{of}{loss}{speed}"
            print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)

    def _new_lines(self) -> list[dict[str, Any]]:
        """Complete lines of the newest attempt since the last call."""
        newest = max(self._run.attempt_numbers(), default=0)
        if newest != self._attempt:
            self._attempt, self._metrics = newest, job_log.LogFollower(self._run.attempt(newest).metrics)
        found = []
        for line in self._metrics.read():
            with contextlib.suppress(ValueError):  # torn line of a killed rank, followed by a restart
                found.append(json.loads(line))
        return found


def job_log_files(run: Run, attempt: int | None = None) -> list[Path]:
    """Return standard output and standard error of an attempt's job, by default the newest.

    If no attempt has begun, return the files of the newest job with a log. Raises RunDirError if there is none.
    """
    numbers = run.attempt_numbers()
    if attempt is not None and attempt not in numbers:
        known = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise RunDirError(f"this run has no attempt {attempt}; there are: {known}", where=run.attempts)
    for number in [attempt] if attempt is not None else numbers[:-3:-1]:  # the newest attempt may not have begun
        begin = run.attempt(number).read_begin()
        if begin is not None and begin.log is not None:
            return _log_pair(Path(begin.log))
    plan = Plan.load(run)
    folders = (Path(plan.log_folder), run.path)
    found = [path for folder in folders for path in folder.glob(f"{plan.job_name}-[0-9]*.err")]
    if attempt is None and found:
        return _log_pair(max(found, key=lambda path: path.stat().st_mtime))
    what = "no job of this run has written a log" if attempt is None else f"attempt {attempt} has no log on record"
    raise RunDirError(what, where=plan.log_folder, hint="`relayrun status` says what its jobs do")


def rank_messages(run: Run, attempt: int, rank: int) -> str:
    """Return the error record of one rank of an attempt, and its stack traces if they were requested.

    Raises RunDirError if the rank left neither.
    """
    from relayrun.control.chain import failure_reason  # every trainer: slow to import

    said = [f"{failure.node}: {failure.error}" for failure in failure_reason.read_failures(run.attempt(attempt), rank)]
    stacks = run.stacks(attempt) / f"rank-{rank:04}.txt"
    if stacks.exists() and stacks.stat().st_size:
        said.append(f"{stacks}:\n{stacks.read_text(encoding='utf-8', errors='replace')}")
    if not said:
        hint = "what all ranks write is in the job's log: leave out --rank"
        raise RunDirError(f"rank {rank} of attempt {attempt} left no words", where=run.attempt(attempt).path, hint=hint)
    return "\n".join(said)


@dataclass
class ChainLogFollower:
    """Follows the logs of a chain across its jobs."""

    run: Run
    seen: dict[Path, int] = field(default_factory=dict)
    """Offset up to which each file was read."""

    def poll(self) -> list[tuple[Path, bytes]]:
        """Return new bytes of each file, whole lines if there are some, at most `MAX_POLL_BYTES`; a truncated file is
        returned from its start."""
        try:
            current = job_log_files(self.run)
        except RunDirError:
            return []
        found = []
        for path in dict.fromkeys([*self.seen, *current]):
            try:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    at = self.seen.get(path, 0)
                    begin = file.seek(at if at <= size else 0)
                    text = file.read(MAX_POLL_BYTES)
                    text = text[: codecs.utf_8_decode(text, "surrogateescape", False)[1]]
                    # a state of a progress bar that is not whole waits for the next poll
                    text = text[: max(text.rfind(b"\n"), text.rfind(b"\r", 0, -1)) + 1] or text
                    self.seen[path] = begin + len(text)
            except OSError:  # removed, or the file system is unavailable for a while
                continue
            if text:
                found.append((path, text))
        self.seen = {path: at for path, at in self.seen.items() if path in current}
        return found


def _log_pair(err: Path) -> list[Path]:
    return [err.with_suffix(".out"), err]
