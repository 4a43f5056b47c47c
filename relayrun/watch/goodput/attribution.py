"""The time of one allocation, divided into parts: pure except for reading the metrics, exact to the microsecond.

A cursor moves from the start of the allocation to its end. A recorded point in time closes the part before it; a
recorded duration is limited to the time left before the next point. So each microsecond is booked once, inside the
allocation, whatever the clocks of the records say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relayrun.control.rundir.restarts import metrics_chunks, resets_iteration
from relayrun.files import parse_record
from relayrun.progress import count
from relayrun.watch.goodput.facts import AttemptFacts, NodeAllocation
from relayrun.watch.goodput.ledger import MICROSECONDS_PER_SECOND, Ledger, to_microseconds

LONGEST_STEP_SECONDS = 1e9
"""Limit of plausible durations."""

LATEST_TIME = 1e11
"""Limit of plausible times, in seconds since 1970."""

NEEDED_COLUMNS = (
    "iteration",
    "loss",
    "time",
    "step_seconds",
    "save_seconds",
    "data_seconds",
    "evaluation_seconds",
    "tokens_per_second",
    "mfu",
    "model_tflops_per_gpu",
)
"""Columns of the metrics that `attribute_time` reads."""

FIRST_LINES = 21
"""Lines of an attempt whose median step time is subtracted from its first step."""

Column = npt.NDArray[np.float64]
Amounts = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class MetricsBlock:
    """Consecutive lines of the metrics."""

    rows: int
    columns: Mapping[str, Column]
    """One number per line for each requested name; NaN if the line has none."""
    records: Mapping[int, Mapping[str, Any]]
    """Lines of no step, by their row."""

    def part(self, first: int, end: int) -> MetricsBlock:
        """Return rows `first` to `end`, exclusive."""
        return MetricsBlock(
            rows=end - first,
            columns={name: column[first:end] for name, column in self.columns.items()},
            records={row - first: record for row, record in self.records.items() if first <= row < end},
        )


def read_metrics_blocks(path: Path | str, names: Sequence[str]) -> Iterator[MetricsBlock]:
    """Yield the lines of an attempt's metrics, oldest first; nothing for a missing file. `names`: the requested
    numbers. Lines that are not a whole JSON object are skipped: a killed writer leaves them."""
    for lines in metrics_chunks(path):
        count(sum(map(len, lines)))
        if found := _records([line for line in lines if line.endswith(b"\n")]):
            others = {n: each for n, each in enumerate(found) if "loss" not in each or resets_iteration(each)}
            columns = {name: _column(found, name) for name in names}
            yield MetricsBlock(rows=len(found), columns=columns, records=others)


def _records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")  # twice as fast as line by line
    except ValueError:
        found = [parse_record(line) for line in lines]
    return [record for record in found if isinstance(record, dict)]


def _column(records: Sequence[Mapping[str, Any]], name: str) -> Column:
    values = (record.get(name) for record in records)
    numbers = (value if type(value) in (int, float) else np.nan for value in values)
    return np.fromiter(numbers, dtype=np.float64, count=len(records))


@dataclass(kw_only=True)
class CountedWork:
    """Sums over an allocation's steps that count."""

    iterations: int = 0
    tokens: float = 0.0
    step_seconds: float = 0.0
    mfu_seconds: float = 0.0
    """Sum over steps of model FLOP utilisation × seconds × training nodes; 0 if not measured."""
    tflop_seconds: float = 0.0
    """Sum over steps of model TFLOP/s per GPU × seconds × training nodes."""
    redone_iterations: int = 0
    redone_tokens: float = 0.0


@dataclass(kw_only=True)
class AttributedTime:
    """The parts of an allocation, in microseconds of all its nodes; they sum to the node time from `start` to `end`."""

    start: int
    end: int
    parts: dict[str, int]
    stepped: int = 0
    """Microseconds in which steps that count were computed, on any number of nodes."""
    work: CountedWork = field(default_factory=CountedWork)


def attribute_time(
    allocation: NodeAllocation,
    blocks: Iterable[MetricsBlock],
    *,
    seen: Callable[[MetricsBlock, Mask], None] | None = None,
) -> AttributedTime:
    """Divide the time of an allocation.

    Args:
        blocks: metrics of its attempt, oldest first, with the columns of `NEEDED_COLUMNS`.
        seen: called with each block and the mask of its lines that count.

    An allocation that has not ended is divided up to its newest sign of life, which becomes its end.
    """
    ledger = Ledger(allocation)
    facts = allocation.facts
    if facts is None:
        ledger.book_until("no attempt", ledger.end)
        return AttributedTime(start=ledger.start, end=ledger.end, parts=ledger.parts)
    _attribute_start(ledger, facts)
    steps = _Steps(ledger, facts)
    for block in blocks:
        rollbacks = sorted(row for row, record in block.records.items() if row and resets_iteration(record))
        for first, end in pairwise([0, *rollbacks, block.rows]):
            for piece in steps.split_at_restarts(block.part(first, end)):
                counts = steps.take(piece)
                if seen is not None:
                    seen(piece, counts)
    steps.end_restarts()
    if allocation.ended:
        _attribute_end(ledger, allocation, facts, under_way=steps.under_way)
    else:
        start = "between" if steps.under_way == "redone" else steps.under_way
        ledger.book_until("launch" if start == "failed start" else start, to_microseconds(facts.last_sign))
    return AttributedTime(
        start=ledger.start, end=ledger.cursor, parts=ledger.parts, stepped=ledger.stepped, work=steps.work
    )


def _attribute_start(ledger: Ledger, facts: AttemptFacts) -> None:
    begin, started = facts.begin, facts.first_start
    if begin.script_time is not None:
        ledger.book_until("prolog", to_microseconds(begin.script_time))
    ledger.book_until("supervisor" if begin.script_time is not None else "prolog", to_microseconds(begin.start_time))
    if started is None:
        return
    if started.initialised > started.process:
        ledger.book_until("launch", to_microseconds(started.process))
        ledger.book_until("import", to_microseconds(started.imported))
        ledger.book_until("init", to_microseconds(started.initialised))
        ledger.book_until("load", to_microseconds(started.loaded))
    else:  # an observer knows the time of the first step alone
        ledger.book_until("init", to_microseconds(started.loaded))


class _Steps:
    """The steps and evaluations of an attempt, block by block."""

    def __init__(self, ledger: Ledger, facts: AttemptFacts) -> None:
        self.work = CountedWork()
        self.begun = False
        self._ledger = ledger
        self._facts = facts
        self._limits = list(accumulate(reversed(facts.rollbacks), min, initial=facts.limit))
        """The last iteration that counts: after the last rollback, before it, ..., before the first."""
        self._limit = self._limits.pop()
        self._first = True
        """True until the first step."""
        self._rolled_back = False
        """True if the newest event is a rollback to a checkpoint."""
        self._failed = [each for each in facts.failed_restarts if each.again]
        """Failures followed by a restart of which no line has been read yet."""

    @property
    def under_way(self) -> str:
        """Part for time after the newest line, in which ranks write no line."""
        if self._rolled_back:
            return "recovery"
        return "redone" if self.begun or self._facts.first_start is not None else "failed start"

    def split_at_restarts(self, block: MetricsBlock) -> Iterator[MetricsBlock]:
        """Split the lines at failures of the ranks, and book each failure on the way. A failure that lost steps is
        marked by a line; a failure exactly at a checkpoint is not."""
        number = block.records.get(0, {}).get("restart")
        while self._failed and isinstance(number, int) and self._failed[0].restart < number:
            self._end_restart()
        times = block.columns["time"]
        while self._failed and self._failed[0].iteration <= self._failed[0].next_iteration:
            behind = np.flatnonzero(times > self._failed[0].time)
            if not behind.size:
                break
            if at := int(behind[0]):
                yield block.part(0, at)
                block = block.part(at, block.rows)
                times = block.columns["time"]
            self._end_restart()
        yield block

    def end_restarts(self) -> None:
        """Book the failures after the last line."""
        while self._failed:
            self._end_restart()

    def _end_restart(self) -> None:
        failed = self._failed.pop(0)
        if (hang := self._facts.hangs.get(failed.restart)) is not None:
            self._ledger.book_until(self.under_way, to_microseconds(hang.time - hang.seconds))
            self._ledger.book_until("hang", to_microseconds(hang.time))
            self._rolled_back = True
        self._ledger.book_until(self.under_way, to_microseconds(failed.time))
        self._ledger.next_restart(failed)
        self._rolled_back = True

    def take(self, block: MetricsBlock) -> Mask:
        """Book the lines of a block, of which at most the first is a rollback; return the mask of lines that count."""
        record = block.records.get(0, {})
        if resets_iteration(record):
            if "rollback" in record:
                self._ledger.book_until("between", to_microseconds(record["rollback"]["time"]))
            self._limit = self._limits.pop() if self._limits else self._facts.limit
            self._rolled_back = True
            rest = self.take(block.part(1, block.rows)) if block.rows > 1 else np.zeros(0, dtype=np.bool_)
            return np.concatenate([np.zeros(1, dtype=np.bool_), rest])
        columns, ledger = block.columns, self._ledger
        counts = (columns["iteration"] > self._facts.begin.base_iteration) & (columns["iteration"] <= self._limit)
        evaluates = np.isnan(columns["loss"]) & ~np.isnan(columns["evaluation_seconds"])
        unsaid = np.isnan(columns["step_seconds"]) & ~evaluates
        asked = _as_microseconds(np.where(evaluates, columns["evaluation_seconds"], columns["step_seconds"]))
        said = _as_microseconds(columns["time"], most=LATEST_TIME)
        if not (self.begun or self._rolled_back) and self._facts.first_start is None:  # a program without start times
            ledger.book_until("launch", int(said[0]) - int(asked[0]))
        self.begun = True

        ends = np.maximum.accumulate(np.append(ledger.cursor, np.minimum(said, ledger.end)))  # times must not decrease
        left, ends = np.diff(ends), ends[1:]
        held = np.minimum(np.where(evaluates, 0, _as_microseconds(columns["save_seconds"])), left)
        took = np.where(unsaid, left - held, np.minimum(asked, left))
        held = np.minimum(held, left - took)
        between = left - took - held
        steps = counts & ~evaluates
        waited = np.where(steps, np.minimum(_as_microseconds(columns["data_seconds"]), took), 0)
        parts = {
            "step": np.where(steps, took - waited, 0),
            "data": waited,
            "save": held,
            "evaluation": np.where(counts & evaluates, took, 0),
            "between": between,
            "redone": np.where(counts, 0, took),
            "compile": np.zeros_like(took),
            "recovery": np.zeros_like(took),
        }
        places = np.flatnonzero(~evaluates)
        if places.size:
            self._first_step(columns, parts, places)
        self._put(parts, ends)
        self._sum(columns, steps, ~counts & ~evaluates)
        return counts

    def _first_step(self, columns: Mapping[str, Column], parts: Mapping[str, Amounts], places: Indices) -> None:
        """Split off the first step's excess over the following ones, and a rollback before the first step."""
        at = int(places[0])
        if self._first and parts["step"][at]:
            seconds = columns["step_seconds"] - np.nan_to_num(columns["data_seconds"])
            said = _as_microseconds(seconds[places[:FIRST_LINES]])
            if said.size > 2:
                beyond = max(0, int(said[0]) - int(np.median(said[1:])))
                beyond = min(beyond, int(parts["step"][at]))
                parts["step"][at] -= beyond
                parts["compile"][at] = beyond
        self._first = False
        if self._rolled_back:
            parts["recovery"][at], parts["between"][at] = parts["between"][at], 0
            self._rolled_back = False

    def _put(self, parts: Mapping[str, Amounts], ends: Amounts) -> None:
        """Book the lines together; alone a line during which the number of nodes changes."""
        starts: Indices = np.zeros(1, dtype=np.intp)
        if self._ledger.resized:
            changed = np.searchsorted(ends, self._ledger.resized, side="right")
            starts = np.union1d(starts, np.concatenate([changed, changed + 1]))
            starts = starts[starts < len(ends)]
        sums = {part: np.add.reduceat(amounts, starts).tolist() for part, amounts in parts.items()}
        lasts = ends[np.append(starts[1:], len(ends)) - 1].tolist()
        for number, last in enumerate(lasts):
            self._ledger.book_parts({part: amounts[number] for part, amounts in sums.items()}, last)

    def _sum(self, columns: Mapping[str, Column], steps: Mask, redone: Mask) -> None:
        work = self.work
        seconds = _as_microseconds(columns["step_seconds"]) / MICROSECONDS_PER_SECOND
        tokens = np.nan_to_num(columns["tokens_per_second"]) * seconds
        work.iterations += int(steps.sum())
        work.redone_iterations += int(redone.sum())
        work.step_seconds += float(seconds[steps].sum())
        work.tokens += float(tokens[steps].sum())
        work.redone_tokens += float(tokens[redone].sum())
        nodes = self._ledger.training
        work.mfu_seconds += nodes * float((np.nan_to_num(columns["mfu"]) * seconds)[steps].sum())
        work.tflop_seconds += nodes * float((np.nan_to_num(columns["model_tflops_per_gpu"]) * seconds)[steps].sum())


def _as_microseconds(seconds: Column, *, most: float = LONGEST_STEP_SECONDS) -> Amounts:
    """Convert to microseconds; implausible values become 0."""
    return np.asarray(
        np.where((seconds > 0) & (seconds < most), seconds, 0.0) * MICROSECONDS_PER_SECOND, dtype=np.int64
    )


def _attribute_end(ledger: Ledger, allocation: NodeAllocation, facts: AttemptFacts, *, under_way: str) -> None:
    """Book the time from the last metrics line to the end of the allocation."""
    outcome, hang, end = facts.outcome, facts.hang, facts.end
    stepped = under_way != "failed start"
    if outcome is not None:
        left = to_microseconds(outcome.time)
        if under_way != "redone":
            ledger.book_until(under_way, left)
        for commit in facts.commits:
            published = min(to_microseconds(commit.time), left)
            ledger.book_until("between", published - to_microseconds(commit.seconds))
            ledger.book_until("save", published)
        ledger.book_until("between", left)
        ledger.book_until("end" if allocation.end_known else "unknown", ledger.end)
        return
    if hang is not None:
        ledger.book_until(under_way, to_microseconds(hang.time - hang.seconds))
        ledger.book_until("hang", to_microseconds(hang.time))
    elif facts.failure_time is not None:
        ledger.book_until(under_way, to_microseconds(facts.failure_time))
    else:
        ledger.book_until(under_way, to_microseconds(facts.last_sign))
        if end is not None and facts.end_seen:
            ledger.book_until("hang" if stepped else "failed start", to_microseconds(end.end_time))
        elif allocation.end_known:
            ledger.book_until("hang", ledger.end)
    if end is not None and facts.end_seen:
        ledger.book_until("recovery", to_microseconds(end.end_time))
        ledger.book_until("end", ledger.end)
    ledger.book_until("recovery" if allocation.end_known else "unknown", ledger.end)
