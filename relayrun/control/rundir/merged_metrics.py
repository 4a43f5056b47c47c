"""The merged views of a run: `metrics.jsonl` and `attempts.jsonl` at its root, kept by the supervisor alone.

For an iteration the newest attempt wins: what an attempt computed beyond the checkpoint that the next
one started from is dropped, since the next one computes it again; so is what it computed before a rewind.
Iterations rise strictly, without gap.

A view is appended to. Where lines of it count no more, its end is cut off; where that begins is searched from the end.
views.json says how far the views are: what stands behind that was written by a supervisor that was killed before it
could say so, and is cut off and written again. Only where views.json is lost, or a view is shorter than it says, are
the views made from the beginning, in constant memory.

The attempts' own files are the truth; nothing of a chain depends on a view but what evaluations took.
Standard library only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import AttemptStart, Record
from relayrun.control.rundir.restarts import iteration_resets, resets_iteration
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import read_lines, read_lines_backwards, write_json

CHUNK = 1 << 20
"""Bytes of an attempt's metrics that are taken at a time."""

PROGRESS_WRITE_SECONDS = 10.0
"""Between two times that a running supervisor says how far the views are."""

UPDATE_SECONDS = 1.0
"""That a running supervisor gives to the views at a time: it has more to look after."""

KEPT_EVALUATIONS = 100
"""The newest evaluations whose time is kept."""


@dataclass(frozen=True, kw_only=True)
class ViewsProgress(Record):
    """`views.json`: how far the views are."""

    attempt: int = 0
    """Whose lines are the last ones of metrics.jsonl; 0: none are."""
    start_time: float = 0.0
    """When that attempt began: who removes attempts by hand gives its number to another one."""
    offset: int = 0
    """Bytes of its own metrics.jsonl that were taken."""
    rewinds: int = 0
    """How many rewinds were among them."""
    size: int = 0
    """Bytes of the view metrics.jsonl that are right."""
    iteration: int = 0
    """Iteration of the last line of the view metrics.jsonl."""
    closed: int = 0
    """Attempts up to this one have the row in attempts.jsonl that they keep."""
    closed_size: int = 0
    """Bytes of these rows."""
    evaluations: list[list[float]] = field(default_factory=list)
    """Iteration and seconds of the newest evaluations that count, oldest first."""


class MergedViews:
    """Brings the views of a run up to date. One process at a time: the newest attempt's supervisor."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reached = read_views_progress(run)
        self._noted = self._reached
        self._next_note = time.monotonic() + PROGRESS_WRITE_SECONDS
        self._has_rows = False

    def update(self, *, attempt: int | None = None) -> bool:
        """Append what is new; return whether that is all there is.

        Raises OSError where a view cannot be written, and RunDirError if a record is damaged; the next call, of this
        object or of another process, makes up for it.

        `attempt`: the caller's, as long as it goes on. Nothing is done once a newer one is there, whose supervisor
        writes then; views.json is written now and then only; and where there is more to do than a second's work, the
        rest is left for the next call.
        """
        numbers = self._run.attempt_numbers()
        if attempt is not None and numbers[-1:] != [attempt]:
            return True
        try:
            self._trim()
            whole = self._metrics(numbers, goes_on=attempt is not None)
            if attempt is None or not self._has_rows:
                self._rows(numbers)
                self._has_rows = True
        except BaseException:
            self._reached = read_views_progress(self._run)  # how far it came is not known
            raise
        if attempt is None or not whole or time.monotonic() > self._next_note:
            self.note()
        return whole

    def note(self) -> None:
        """Write views.json, if it does not say so already."""
        self._next_note = time.monotonic() + PROGRESS_WRITE_SECONDS
        if self._reached != self._noted:
            self._write_note()

    def _write_note(self) -> None:
        write_json(self._run.views, vars(self._reached), durable=False)
        self._noted = self._reached

    def _trim(self) -> None:
        """Drop what stands behind the right lines; where lines are lost, begin again."""
        size = _size(self._run.metrics_view)
        if size < self._reached.size:
            self._reached = read_views_progress(self._run)
        if size > self._reached.size or not self._run.metrics_view.exists():
            _write_at(self._run.metrics_view, self._reached.size, b"")

    def _metrics(self, numbers: Sequence[int], *, goes_on: bool) -> bool:
        """Whether all there is was taken."""
        deadline = time.monotonic() + (UPDATE_SECONDS if goes_on else float("inf"))
        for number in numbers:
            attempt = self._run.attempt(number)
            if number < self._reached.attempt or (begin := attempt.read_begin()) is None:
                continue
            if number > self._reached.attempt:
                self._cut(begin.base_iteration)
                self._reached = replace(self._reached, attempt=number, start_time=begin.start_time, offset=0, rewinds=0)
            elif not self._reached.offset:  # before its first line it may have fallen back further
                self._cut(begin.base_iteration)
            if not self._take(attempt, begin, deadline):
                return False
            if number != numbers[-1] or not (goes_on or attempt.read_end() is None):
                # a rewind is on record before its line stands in the metrics
                for entry in list(read_lines(attempt.rewinds))[self._reached.rewinds :]:
                    self._cut(entry["base_iteration"])
        return True

    def _take(self, attempt: Attempt, begin: AttemptStart, deadline: float) -> bool:
        """Append the new and whole lines of an attempt; false if there are more, but the time is over.

        Its file is opened anew each time: so NFS shows what has been written.
        """
        try:
            file = open(attempt.metrics, "rb")  # noqa: SIM115 - closed by the `with`
        except FileNotFoundError:
            return True
        with file:
            file.seek(self._reached.offset)
            while lines := file.readlines(CHUNK):
                torn = not lines[-1].endswith(b"\n")
                self._append(lines[: len(lines) - torn], begin)
                if torn:  # the rest of it may come meanwhile: it is read again from its beginning
                    return True
                if time.monotonic() > deadline:
                    return False
        return True

    def _append(self, lines: Sequence[bytes], begin: AttemptStart) -> None:
        reached, text, evaluations = self._reached, bytearray(), list(self._reached.evaluations)

        def put() -> None:
            nonlocal reached
            if text:
                _write_at(self._run.metrics_view, reached.size, bytes(text))
                reached = replace(reached, size=reached.size + len(text))
                text.clear()
            self._reached = replace(reached, evaluations=evaluations[-KEPT_EVALUATIONS:])

        for line in lines:
            reached = replace(reached, offset=reached.offset + len(line))
            try:
                value = json.loads(line)
            except ValueError:  # what a killed writer left
                continue
            if not isinstance(value, dict):
                continue
            iteration = value.get("iteration", 0)
            if resets_iteration(value):  # what lies beyond that checkpoint is computed again
                put()
                self._reached = replace(self._reached, rewinds=reached.rewinds + ("rewind" in value))
                self._cut(iteration)
                reached, evaluations = self._reached, list(self._reached.evaluations)
            elif iteration > begin.base_iteration:
                text += line
                reached = replace(reached, iteration=iteration)
                if "evaluation_seconds" in value:
                    evaluations.append([iteration, value["evaluation_seconds"]])
        put()

    def _cut(self, iteration: int) -> None:
        """Drop the lines beyond this iteration from the end of the view."""
        if self._reached.iteration <= iteration:
            return
        size, last = 0, 0
        for behind, line in read_lines_backwards(self._run.metrics_view, end=self._reached.size):
            if line["iteration"] <= iteration:
                size, last = behind, line["iteration"]
                break
        kept = [entry for entry in self._reached.evaluations if entry[0] <= iteration]
        self._reached = replace(self._reached, size=size, iteration=last, evaluations=kept)
        self._write_note()  # first: a view that is shorter than views.json says has lost something
        os.truncate(self._run.metrics_view, size)

    def _rows(self, numbers: Sequence[int]) -> None:
        if _size(self._run.attempts_view) < self._reached.closed_size:  # it was lost
            self._reached = replace(self._reached, closed=0, closed_size=0)
        closed, size, text = self._reached.closed, self._reached.closed_size, b""
        for number in numbers:
            attempt = self._run.attempt(number)
            if number <= self._reached.closed or (begin := attempt.read_begin()) is None:
                continue
            end = attempt.read_end()
            row = vars(begin) | (vars(end) if end is not None else {})
            text += json.dumps(row, ensure_ascii=False).encode() + b"\n"
            if number != numbers[-1]:  # the newest one's end may be written once more
                closed, size = number, self._reached.closed_size + len(text)
        if text != _read_from(self._run.attempts_view, self._reached.closed_size):
            _write_at(self._run.attempts_view, self._reached.closed_size, text)
        self._reached = replace(self._reached, closed=closed, closed_size=size)


def read_views_progress(run: Run) -> ViewsProgress:
    """How far the views are; from nothing on where that is lost, or a view is not what it says."""
    try:
        reached = ViewsProgress.read(run.views) or ViewsProgress()
        begin = run.attempt(reached.attempt).read_begin() if reached.attempt else None
        last = next(read_lines_backwards(run.metrics_view, end=reached.size), (0, {}))
    except (OSError, RunDirError):  # torn by a machine that went down: it is not synced
        return ViewsProgress()
    if reached.attempt and (begin is None or begin.start_time != reached.start_time):
        return ViewsProgress()
    if (last[0], last[1].get("iteration", 0)) != (reached.size, reached.iteration):
        reached = replace(reached, attempt=0, offset=0, rewinds=0, size=0, iteration=0, evaluations=[])
    return reached


def evaluation_seconds(run: Run, most: int) -> list[float]:
    """Seconds of the newest evaluations, at most so many, oldest first; from views.json, or else from all metrics."""
    try:
        reached = ViewsProgress.read(run.views)
    except (OSError, RunDirError):  # torn by a machine that went down: the next supervisor makes it anew
        reached = None
    if reached is not None:
        return [seconds for _, seconds in reached.evaluations[-most:]]
    found = (line["evaluation_seconds"] for line in newest_valid_lines(run) if "evaluation_seconds" in line)
    return list(islice(found, most))[::-1]


def newest_valid_lines(run: Run) -> Iterator[dict[str, Any]]:
    """The lines that count, the newest first, from the attempts' own files; only as far back as somebody asks."""
    limit = float("inf")
    for number in reversed(run.attempt_numbers()):
        attempt = run.attempt(number)
        begin = attempt.read_begin()
        if begin is None:
            continue
        for line in attempt.metrics_backwards():
            iteration = line.get("iteration", 0)
            if resets_iteration(line):
                limit = min(limit, iteration)
            elif begin.base_iteration < iteration <= limit:
                yield line
        limit = min(limit, begin.base_iteration)
        if not limit:
            return


def merged_metrics(run: Run) -> list[dict[str, Any]]:
    """All lines that count, oldest first, over all attempts."""
    return list(valid_lines(run))


def valid_lines(run: Run, *, above: int = 0, before: tuple[int, int] | None = None) -> Iterator[dict[str, Any]]:
    """The lines of the merged view, oldest first, of iterations above `above`; files that cannot hold any are not read.

    With `before`, an attempt and the number of a rewind in it, the view as it was when that had not happened; number 0
    is the attempt's begin.
    """
    begins = [begin for number in run.attempt_numbers() if (begin := run.attempt(number).read_begin())]
    begins = [begin for begin in begins if before is None or (begin.attempt, 0) < before]
    for number, begin in enumerate(begins):
        last = min((later.base_iteration for later in begins[number + 1 :]), default=None)
        if last is not None and last <= max(above, begin.base_iteration):
            continue
        left = before[1] if before is not None and begin.attempt == before[0] else None
        attempt = run.attempt(begin.attempt)
        ends = _iteration_resets_of(attempt, before_rewind=left)
        for line in read_lines(attempt.metrics):
            iteration = line.get("iteration", 0)
            if resets_iteration(line):  # it went back to a checkpoint, and computes what lies beyond again
                ends = ends[1:]
                left = None if left is None else left - ("rewind" in line)
                if left == 0:
                    break
            elif iteration > max(above, begin.base_iteration) and all(
                iteration <= end for end in (*ends, *([] if last is None else [last]))
            ):
                yield line


def _iteration_resets_of(attempt: Attempt, *, before_rewind: int | None) -> list[int]:
    """As `iteration_resets`; where there were no rounds, the rewinds on record are all."""
    rewinds = [entry["base_iteration"] for entry in read_lines(attempt.rewinds)]
    if attempt.rounds.exists():
        return iteration_resets(attempt.metrics, rewinds, before_rewind=before_rewind)
    return rewinds if before_rewind is None else rewinds[: before_rewind - 1]


def _write_at(path: Path, at: int, data: bytes) -> None:
    """Write at this place of a file, which ends behind it then. Raises OSError, also where a part was written."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        if os.fstat(fd).st_size != at:
            os.ftruncate(fd, at)
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, at)
            view, at = view[written:], at + written
    finally:
        os.close(fd)


def _read_from(path: Path, at: int) -> bytes | None:
    try:
        with open(path, "rb") as file:
            file.seek(at)
            return file.read()
    except FileNotFoundError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
