"""The merged views of a run: `metrics.jsonl` and `attempts.jsonl` at its root, written by the supervisor alone.

For each iteration the newest attempt counts: iterations beyond the base of a later attempt, or before a rollback, are
dropped. Iterations rise strictly, without gap. A view is appended to, and cut at its end if lines no longer count.
views.json records how far the views are: lines behind that come from a supervisor that was killed before it could
record them, and are written again. Only if views.json is lost, or a view is shorter than recorded, are the views made
from the beginning, in constant memory. The attempts' own files are the truth. Standard library only.
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
from relayrun.control.rundir.checkpoint_records import started_attempts_backwards
from relayrun.control.rundir.records import AttemptStart, Record
from relayrun.control.rundir.restarts import iteration_resets, resets_iteration
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import file_size, parse_record, read_json_lines, read_json_lines_backwards, write_json

CHUNK = 1 << 20
"""Bytes of an attempt's metrics that are read at a time."""
PROGRESS_WRITE_SECONDS = 10.0
"""Interval at which a running supervisor writes views.json."""
UPDATE_SECONDS = 1.0
"""Maximum time per update of a running supervisor, which has other duties."""
KEPT_EVALUATIONS = 100
"""Number of newest evaluations whose duration is kept."""


@dataclass(frozen=True, kw_only=True)
class ViewsProgress(Record):
    """`views.json`: how far the views are."""

    attempt: int = 0
    """The attempt of the last lines in metrics.jsonl; 0: no lines."""
    start_time: float = 0.0
    """Start of that attempt: if a person removes attempts, another one gets the same number."""
    offset: int = 0
    """Bytes of its own metrics.jsonl that were read."""
    rollbacks: int = 0
    """Number of rollbacks among them."""
    size: int = 0
    """Bytes of the view metrics.jsonl that are valid."""
    iteration: int = 0
    """Iteration of the last line of the view metrics.jsonl."""
    closed: int = 0
    """Attempts up to this one have their final row in attempts.jsonl."""
    closed_size: int = 0
    """Bytes of these rows."""
    evaluations: list[list[float]] = field(default_factory=list)
    """Iteration and seconds of the newest evaluations that count, oldest first."""


class MergedViews:
    """Updates the views of a run. One process at a time: the newest attempt's supervisor."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reached = read_views_progress(run)
        self._noted = self._reached
        self._next_note = time.monotonic() + PROGRESS_WRITE_SECONDS
        self._has_rows = False

    def update(self, *, attempt: int | None = None) -> bool:
        """Append new lines; return whether all lines were read. After an error the next call makes up for it.

        `attempt`: the caller's attempt, while it runs. Then nothing is done if a newer attempt exists, whose supervisor
        writes; views.json is written from time to time only; and work beyond UPDATE_SECONDS is left for the next call.
        Raises OSError if a view cannot be written, and RunDirError if a record is damaged.
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
            self._reached = read_views_progress(self._run)  # its progress is unknown
            raise
        if attempt is None or not whole or time.monotonic() > self._next_note:
            self.note()
        return whole

    def note(self) -> None:
        """Write views.json if it has changed."""
        self._next_note = time.monotonic() + PROGRESS_WRITE_SECONDS
        if self._reached != self._noted:
            self._write_note()

    def _write_note(self) -> None:
        write_json(self._run.views, vars(self._reached), durable=False)
        self._noted = self._reached

    def _trim(self) -> None:
        """Cut off invalid lines at the end; if lines are lost, start again."""
        size = file_size(self._run.metrics_view)
        if size < self._reached.size:
            self._reached = read_views_progress(self._run)
        if size > self._reached.size or not self._run.metrics_view.exists():
            _write_at(self._run.metrics_view, self._reached.size, b"")

    def _metrics(self, numbers: Sequence[int], *, goes_on: bool) -> bool:
        """Append new metrics; return whether all were read."""
        deadline = time.monotonic() + (UPDATE_SECONDS if goes_on else float("inf"))
        for number in numbers:
            attempt = self._run.attempt(number)
            if number < self._reached.attempt or (begin := attempt.read_begin()) is None:
                continue
            if number > self._reached.attempt:
                self._cut(begin.base_iteration)
                self._reached = replace(
                    self._reached, attempt=number, start_time=begin.start_time, offset=0, rollbacks=0
                )
            elif not self._reached.offset:  # before its first line the attempt may have fallen back further
                self._cut(begin.base_iteration)
            if not self._take(attempt, begin, deadline):
                return False
            if number != numbers[-1] or not (goes_on or attempt.read_end() is None):
                # a rollback is recorded before its line is in the metrics
                for entry in list(read_json_lines(attempt.rollbacks))[self._reached.rollbacks :]:
                    self._cut(entry["base_iteration"])
        return True

    def _take(self, attempt: Attempt, begin: AttemptStart, deadline: float) -> bool:
        """Append an attempt's new lines; False at the deadline. It opens the file anew: so NFS shows the new lines."""
        try:
            file = open(attempt.metrics, "rb")  # noqa: SIM115 - closed by the `with`
        except FileNotFoundError:
            return True
        with file:
            file.seek(self._reached.offset)
            while lines := file.readlines(CHUNK):
                torn = not lines[-1].endswith(b"\n")
                self._append(lines[: len(lines) - torn], begin)
                if torn:  # the rest may arrive: the line is read again from its beginning
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
            if (value := parse_record(line)) is None:
                continue
            iteration = value.get("iteration", 0)
            if resets_iteration(value):  # iterations beyond that checkpoint are computed again
                put()
                self._reached = replace(self._reached, rollbacks=reached.rollbacks + ("rollback" in value))
                self._cut(iteration)
                reached, evaluations = self._reached, list(self._reached.evaluations)
            elif iteration > begin.base_iteration:
                text += line
                reached = replace(reached, iteration=iteration)
                if "evaluation_seconds" in value:
                    evaluations.append([iteration, value["evaluation_seconds"]])
        put()

    def _cut(self, iteration: int) -> None:
        """Cut lines beyond this iteration off the end of the view."""
        if self._reached.iteration <= iteration:
            return
        size, last = 0, 0
        for behind, line in read_json_lines_backwards(self._run.metrics_view, end=self._reached.size):
            if line["iteration"] <= iteration:
                size, last = behind, line["iteration"]
                break
        kept = [entry for entry in self._reached.evaluations if entry[0] <= iteration]
        self._reached = replace(self._reached, size=size, iteration=last, evaluations=kept)
        self._write_note()  # first: a view that is shorter than views.json says counts as damaged
        os.truncate(self._run.metrics_view, size)

    def _rows(self, numbers: Sequence[int]) -> None:
        if file_size(self._run.attempts_view) < self._reached.closed_size:  # it was lost
            self._reached = replace(self._reached, closed=0, closed_size=0)
        closed, size, text = self._reached.closed, self._reached.closed_size, b""
        for number in numbers:
            attempt = self._run.attempt(number)
            if number <= self._reached.closed or (begin := attempt.read_begin()) is None:
                continue
            end = attempt.read_end()
            row = vars(begin) | (vars(end) if end is not None else {})
            text += json.dumps(row, ensure_ascii=False).encode() + b"\n"
            if number != numbers[-1]:  # the end of the newest attempt may be written once more
                closed, size = number, self._reached.closed_size + len(text)
        if text != _read_from(self._run.attempts_view, self._reached.closed_size):
            _write_at(self._run.attempts_view, self._reached.closed_size, text)
        self._reached = replace(self._reached, closed=closed, closed_size=size)


def read_views_progress(run: Run) -> ViewsProgress:
    """Return how far the views are; the start if views.json is lost or does not match a view."""
    try:
        reached = ViewsProgress.read(run.views) or ViewsProgress()
        begin = run.attempt(reached.attempt).read_begin() if reached.attempt else None
        last = next(read_json_lines_backwards(run.metrics_view, end=reached.size), (0, {}))
    except (OSError, RunDirError):  # views.json is not synced: a machine crash may tear it
        return ViewsProgress()
    if reached.attempt and (begin is None or begin.start_time != reached.start_time):
        return ViewsProgress()
    if (last[0], last[1].get("iteration", 0)) != (reached.size, reached.iteration):
        reached = replace(reached, attempt=0, offset=0, rollbacks=0, size=0, iteration=0, evaluations=[])
    return reached


def evaluation_seconds(run: Run, most: int) -> list[float]:
    """Return the seconds of at most `most` newest evaluations, oldest first."""
    try:
        reached = ViewsProgress.read(run.views)
    except (OSError, RunDirError):  # torn by a machine crash: the next supervisor rewrites it
        reached = None
    if reached is not None:
        return [seconds for _, seconds in reached.evaluations[-most:]]
    found = (line["evaluation_seconds"] for line in newest_valid_lines(run) if "evaluation_seconds" in line)
    return list(islice(found, most))[::-1]


def newest_valid_lines(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the lines that count, newest first, from the attempts' own files; read only as far as needed."""
    limit = float("inf")
    for number, begin in started_attempts_backwards(run):
        for line in run.attempt(number).metrics_backwards():
            iteration = line.get("iteration", 0)
            if resets_iteration(line):
                limit = min(limit, iteration)
            elif begin.base_iteration < iteration <= limit:
                yield line
        limit = min(limit, begin.base_iteration)
        if not limit:
            return


def valid_lines(run: Run, *, above: int = 0, before: tuple[int, int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of the merged view above iteration `above`, oldest first; files without such lines are not read.
    `before`: an attempt and the number of a rollback in it (0: its begin); the view as it was before that rollback."""
    begins = [begin for number in run.attempt_numbers() if (begin := run.attempt(number).read_begin())]
    begins = [begin for begin in begins if before is None or (begin.attempt, 0) < before]
    for number, begin in enumerate(begins):
        last = min((later.base_iteration for later in begins[number + 1 :]), default=None)
        if last is not None and last <= max(above, begin.base_iteration):
            continue
        left = before[1] if before is not None and begin.attempt == before[0] else None
        attempt = run.attempt(begin.attempt)
        ends = _iteration_resets_of(attempt, before_rollback=left)
        for line in read_json_lines(attempt.metrics):
            iteration = line.get("iteration", 0)
            if resets_iteration(line):  # training went back to a checkpoint
                ends = ends[1:]
                left = None if left is None else left - ("rollback" in line)
                if left == 0:
                    break
            elif iteration > max(above, begin.base_iteration) and all(
                iteration <= end for end in (*ends, *([] if last is None else [last]))
            ):
                yield line


def _iteration_resets_of(attempt: Attempt, *, before_rollback: int | None) -> list[int]:
    """`iteration_resets` of an attempt; without restarts the rollbacks on record are complete."""
    rollbacks = [entry["base_iteration"] for entry in read_json_lines(attempt.rollbacks)]
    if attempt.failed_restarts.exists():
        return iteration_resets(attempt.metrics, rollbacks, before_rollback=before_rollback)
    return rollbacks if before_rollback is None else rollbacks[: before_rollback - 1]


def _write_at(path: Path, at: int, data: bytes) -> None:
    """Write at this position of a file and end the file there. Raises OSError, also after a partial write."""
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
