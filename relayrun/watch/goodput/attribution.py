"""One stay on nodes, divided into parts: pure but for reading the attempt's metrics, and exact to the microsecond.

A cursor goes from the start of the stay to its end. What the records say moves it: a point in time closes what went
before, a duration is taken from what is left before the next point. So whatever clocks say, each microsecond is booked
once, and none before the start or behind the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from relayrun.control.rundir.restarts import resets_iteration
from relayrun.watch.goodput.facts import AttemptFacts, NodeAllocation
from relayrun.watch.goodput.ledger import MICROSECONDS_PER_SECOND, BookedPartSink, Ledger, RestartTime, to_microseconds
from relayrun.watch.goodput.metrics_columns import Column, MetricsBlock

LONGEST_STEP_SECONDS = 1e9
"""Seconds that no step takes."""

LATEST_TIME = 1e11
"""Seconds since 1970 that no clock shows."""

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
"""Numbers of the metrics that `attribute_time` looks at."""

FIRST_LINES = 21
"""Lines of an attempt of which the usual time of a step is taken, to tell what the first one took beyond it."""

Amounts = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


@dataclass(kw_only=True)
class CountedWork:
    """What the steps of a stay did that count."""

    iterations: int = 0
    tokens: float = 0.0
    step_seconds: float = 0.0
    mfu_seconds: float = 0.0
    """Sum over steps of model FLOP utilisation times seconds times the nodes that trained; 0 where none is measured."""
    tflop_seconds: float = 0.0
    """Sum over steps of model TFLOP/s of a GPU times seconds times the nodes that trained."""
    redone_iterations: int = 0
    redone_tokens: float = 0.0


@dataclass(kw_only=True)
class AttributedTime:
    """The parts of a stay, in microseconds of all its nodes; they sum to what each had from `start` to `end`."""

    start: int
    end: int
    rounds: Sequence[RestartTime]
    """Its rounds, oldest first: one, where ranks were not started again."""
    stepped: int = 0
    """Microseconds in which steps were computed that count, on however many nodes."""
    work: CountedWork = field(default_factory=CountedWork)

    @property
    def parts(self) -> dict[str, int]:
        """The parts of all rounds together."""
        found: dict[str, int] = {}
        for each in self.rounds:
            for part, amount in each.parts.items():
                found[part] = found.get(part, 0) + amount
        return found


def attribute_time(
    stay: NodeAllocation,
    blocks: Iterable[MetricsBlock],
    *,
    sink: BookedPartSink | None = None,
    grain: int = 60 * MICROSECONDS_PER_SECOND,
    seen: Callable[[MetricsBlock, Mask], None] | None = None,
) -> AttributedTime:
    """Divide a stay. `blocks`: its attempt's metrics, oldest first, with the columns of `NEEDED_COLUMNS`.

    `sink` is told of each part, of steps about every `grain` microseconds. `seen` is given each block, and which of its
    lines count. A stay that has not ended is divided up to its newest sign of life, which is then its end.
    """
    ledger = Ledger(stay, sink)
    facts = stay.facts
    if facts is None:
        ledger.until("no attempt", ledger.end)
        return AttributedTime(start=ledger.start, end=ledger.end, rounds=ledger.rounds)
    _attribute_start(ledger, facts)
    steps = _Steps(ledger, facts, grain=grain if sink is not None else None)
    for block in blocks:
        for part in _split_at_rollbacks(block):
            for piece in steps.by_round(part):
                counts = steps.take(piece)
                if seen is not None:
                    seen(piece, counts)
    steps.end_rounds()
    if stay.ended:
        _attribute_end(ledger, stay, facts, under_way=steps.under_way)
    else:
        start = "between" if steps.under_way == "redone" else steps.under_way
        ledger.until("launch" if start == "failed start" else start, to_microseconds(facts.last_sign))
    return AttributedTime(
        start=ledger.start, end=ledger.cursor, rounds=ledger.rounds, stepped=ledger.stepped, work=steps.work
    )


def _attribute_start(ledger: Ledger, facts: AttemptFacts) -> None:
    """Up to where the first step could begin."""
    begin, started = facts.begin, facts.first_start
    if begin.script_time is not None:
        ledger.until("prolog", to_microseconds(begin.script_time))
    ledger.until("supervisor" if begin.script_time is not None else "prolog", to_microseconds(begin.start_time))
    if started is None:
        return
    if started.initialised > started.process:
        ledger.until("launch", to_microseconds(started.process))
        ledger.until("import", to_microseconds(started.imported))
        ledger.until("init", to_microseconds(started.initialised))
        ledger.until("load", to_microseconds(started.loaded))
    else:  # who looked on from outside knows of the first step alone
        ledger.until("init", to_microseconds(started.loaded))


class _Steps:
    """The steps and evaluations of an attempt, block by block."""

    def __init__(self, ledger: Ledger, facts: AttemptFacts, *, grain: int | None) -> None:
        self.work = CountedWork()
        self.begun = False
        """Whether there was a line."""
        self._ledger = ledger
        self._facts = facts
        self._grain = grain
        self._limits = _iteration_limits(facts)
        self._limit = self._limits.pop()
        self._first = True
        """No step has been seen."""
        self._gone_back = False
        """A way back to a checkpoint is the newest that happened."""
        self._failed = [each for each in facts.rounds if each.again]
        """Rounds behind which another one was begun, of which no line has been seen yet."""

    @property
    def under_way(self) -> str:
        """The part of what ranks do that leave no line behind the newest one."""
        if self._gone_back:
            return "recovery"
        return "redone" if self.begun or self._facts.first_start is not None else "failed start"

    def by_round(self, block: MetricsBlock) -> Iterator[MetricsBlock]:
        """Cut the lines where a round failed between two of them; what ends a round is booked on the way.

        A round whose newest step was lost has a line that says so. One that failed at its checkpoint has none.
        """
        number = block.records.get(0, {}).get("round")
        while self._failed and isinstance(number, int) and self._failed[0].round < number:
            self._end_round()
        times = block.columns["time"]
        while self._failed and self._failed[0].iteration <= self._failed[0].next_iteration:
            behind = np.flatnonzero(times > self._failed[0].time)
            if not behind.size:
                break
            if at := int(behind[0]):
                yield block.part(0, at)
                block = block.part(at, block.rows)
                times = block.columns["time"]
            self._end_round()
        yield block

    def end_rounds(self) -> None:
        """Book the ends of rounds behind which there is no line."""
        while self._failed:
            self._end_round()

    def _end_round(self) -> None:
        failed = self._failed.pop(0)
        if (hang := self._facts.hangs.get(failed.round)) is not None:
            self._ledger.until(self.under_way, to_microseconds(hang.time - hang.seconds))
            self._ledger.until("hang", to_microseconds(hang.time))
            self._gone_back = True
        self._ledger.until(self.under_way, to_microseconds(failed.time))
        self._ledger.next_round(failed)
        self._gone_back = True

    def take(self, block: MetricsBlock) -> Mask:
        """Book the lines of a block, at most the first of which goes back; return which of them count."""
        record = block.records.get(0, {})
        if resets_iteration(record):
            if "rewind" in record:
                self._ledger.until("between", to_microseconds(record["rewind"]["time"]))
            self._limit = self._limits.pop() if self._limits else self._facts.limit
            self._gone_back = True
            rest = self.take(block.part(1, block.rows)) if block.rows > 1 else np.zeros(0, dtype=np.bool_)
            return np.concatenate([np.zeros(1, dtype=np.bool_), rest])
        columns, ledger = block.columns, self._ledger
        counts = (columns["iteration"] > self._facts.begin.base_iteration) & (columns["iteration"] <= self._limit)
        evaluates = np.isnan(columns["loss"]) & ~np.isnan(columns["evaluation_seconds"])
        unsaid = np.isnan(columns["step_seconds"]) & ~evaluates
        asked = _as_microseconds(np.where(evaluates, columns["evaluation_seconds"], columns["step_seconds"]))
        said = _as_microseconds(columns["time"], most=LATEST_TIME)
        if (
            not (self.begun or self._gone_back) and self._facts.first_start is None
        ):  # a program that does not say how it started
            ledger.until("launch", int(said[0]) - int(asked[0]))
        self.begun = True

        ends = np.maximum.accumulate(np.append(ledger.cursor, np.minimum(said, ledger.end)))  # no clock goes back
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
        """Tell what the first step took beyond the next ones, and the way back before the first one behind it."""
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
        if self._gone_back:
            parts["recovery"][at], parts["between"][at] = parts["between"][at], 0
            self._gone_back = False

    def _put(self, parts: Mapping[str, Amounts], ends: Amounts) -> None:
        """Book the lines: all at once, or where somebody wants to know when, by the grain.

        One in which the number of nodes changes is booked alone.
        """
        starts: Indices = np.zeros(1, dtype=np.intp)
        if self._grain is not None:
            starts = np.flatnonzero(np.diff(ends // self._grain, prepend=-1))
        if self._ledger.resized:
            changed = np.searchsorted(ends, self._ledger.resized, side="right")
            starts = np.union1d(starts, np.concatenate([changed, changed + 1]))
            starts = starts[starts < len(ends)]
        sums = {part: np.add.reduceat(amounts, starts).tolist() for part, amounts in parts.items()}
        lasts = ends[np.append(starts[1:], len(ends)) - 1].tolist()
        for number, last in enumerate(lasts):
            self._ledger.mixed({part: amounts[number] for part, amounts in sums.items()}, last)

    def _sum(self, columns: Mapping[str, Column], steps: Mask, redone: Mask) -> None:
        work = self.work
        seconds = _as_microseconds(columns["step_seconds"]) / MICROSECONDS_PER_SECOND
        tokens = np.nan_to_num(columns["tokens_per_second"]) * seconds
        for each in (work, self._ledger.rounds[-1]):
            each.iterations += int(steps.sum())
            each.redone_iterations += int(redone.sum())
        work.step_seconds += float(seconds[steps].sum())
        work.tokens += float(tokens[steps].sum())
        work.redone_tokens += float(tokens[redone].sum())
        nodes = self._ledger.training
        work.mfu_seconds += nodes * float((np.nan_to_num(columns["mfu"]) * seconds)[steps].sum())
        work.tflop_seconds += nodes * float((np.nan_to_num(columns["model_tflops_per_gpu"]) * seconds)[steps].sum())


def _split_at_rollbacks(block: MetricsBlock) -> Iterator[MetricsBlock]:
    """The block in parts, each of which begins with a line by which training goes back, but for the first."""
    edges = [0, *sorted(row for row, record in block.records.items() if row and resets_iteration(record)), block.rows]
    for first, end in pairwise(edges):
        yield block.part(first, end)


def _as_microseconds(seconds: Column, *, most: float = LONGEST_STEP_SECONDS) -> Amounts:
    """Seconds as microseconds; nothing where a program says what no clock does."""
    return np.asarray(
        np.where((seconds > 0) & (seconds < most), seconds, 0.0) * MICROSECONDS_PER_SECOND, dtype=np.int64
    )


def _iteration_limits(facts: AttemptFacts) -> list[float]:
    """The last iteration that counts behind the attempt's last way back, before it, ..., before the first one."""
    limit = facts.limit
    found = [limit]
    for base in reversed(facts.went_back):
        limit = min(limit, base)
        found.append(limit)
    return found


def _attribute_end(ledger: Ledger, stay: NodeAllocation, facts: AttemptFacts, *, under_way: str) -> None:
    """From the last line of the metrics to the end of the stay."""
    outcome, hang, end = facts.outcome, facts.hang, facts.end
    stepped = under_way != "failed start"
    if outcome is not None:
        left = to_microseconds(outcome.time)
        if under_way != "redone":
            ledger.until(under_way, left)
        for commit in facts.commits:
            published = min(to_microseconds(commit.time), left)
            ledger.until("between", published - to_microseconds(commit.seconds))
            ledger.until("save", published)
        ledger.until("between", left)
        ledger.until("end" if stay.end_known else "unknown", ledger.end)
        return
    if hang is not None:
        ledger.until(under_way, to_microseconds(hang.time - hang.seconds))
        ledger.until("hang", to_microseconds(hang.time))
    elif facts.failure_time is not None:
        ledger.until(under_way, to_microseconds(facts.failure_time))
    else:
        ledger.until(under_way, to_microseconds(facts.last_sign))
        if end is not None and facts.end_seen:
            ledger.until("hang" if stepped else "failed start", to_microseconds(end.end_time))
        elif stay.end_known:
            ledger.until("hang", ledger.end)
    if end is not None and facts.end_seen:
        ledger.until("recovery", to_microseconds(end.end_time))
        ledger.until("end", ledger.end)
    ledger.until("recovery" if stay.end_known else "unknown", ledger.end)
