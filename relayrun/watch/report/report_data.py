"""The data of a run's page. The metrics are read once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from relayrun.config.compose import resolve
from relayrun.config.compose.resolve import config_differences
from relayrun.control.rundir import evaluations
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run, is_stopped
from relayrun.errors import RelayrunError
from relayrun.files import read_json
from relayrun.tokens.order.schedule import Schedule
from relayrun.watch.goodput.account import NodeTimeAccount, account_for_run
from relayrun.watch.goodput.attribution import Mask, MetricsBlock
from relayrun.watch.goodput.facts import NodeAllocation, read_run_facts
from relayrun.watch.goodput.tables import AccountTable
from relayrun.watch.report.chart import EMPTY_SERIES, Points, Series, reduce_points
from relayrun.watch.status.queue import QueueStatus, query_queue
from relayrun.watch.status.summary import RunSummary, summarize_run

SHOWN_METRICS = ("loss", "lr", "grad_norm", "tokens_per_second", "memory_bytes")
"""Metrics with a chart."""


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    """One attempt."""

    number: int
    cause: str
    reason: str
    steps: tuple[int, int] | None = None
    """First and last iteration that it trained and that counts; None: it trained nothing that counts."""
    durable_iteration: int | None = None
    tokens: int = 0
    """Tokens of all its iterations, also of those that were computed again later."""
    tokens_per_second: float | None = None
    """Mean speed over its iterations."""
    seconds: float | None = None
    """None: it has not ended."""


@dataclass(frozen=True, kw_only=True)
class DatasetRead:
    """Samples read of one data set, up to the durable checkpoint."""

    dataset: str
    weight: float
    """Share of the samples in the newest phase; 0: the data set has left the mixture."""
    samples: int
    epochs: float | None
    """None if the length of an epoch is unknown."""


@dataclass(frozen=True, kw_only=True)
class RunReportData:
    """A run as a page shows it. Times are seconds since 1970."""

    run: Run
    plan: Plan
    account: NodeTimeAccount
    series: dict[str, Series]
    """Values that count, over iterations, by the names of `SHOWN_METRICS`."""
    last: dict[str, float]
    """The newest value of each metric and of `iteration`."""
    validation: dict[str, Series]
    """Loss of each validation set."""
    rows: Sequence[AttemptRow | None]
    """The attempt of each allocation of the account."""
    checkpoints: Sequence[CheckpointCommit]
    """Checkpoints that count, oldest first."""
    evaluations: Sequence[evaluations.EvaluationResult]
    data: Sequence[DatasetRead]
    data_missing: str
    """Reason why `data` is unknown; empty if it is known."""
    changes: Sequence[tuple[str, str]]
    """Revision of the config and a line, for each changed setting."""
    config: str
    """The newest revision of the config."""
    status: RunSummary

    @property
    def name(self) -> str:
        return self.account.plan.run

    @property
    def attempts(self) -> list[AttemptRow]:
        return [row for row in self.rows if row is not None]


@dataclass
class _MetricLines:
    """Metrics and validation losses that count."""

    columns: dict[str, list[Points]] = field(default_factory=lambda: {n: [] for n in ("iteration", *SHOWN_METRICS)})
    validation: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    trained: dict[int, tuple[int, int]] = field(default_factory=dict)
    """First and last iteration that counts, by the id of the allocation."""
    worked: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Tokens and seconds of all iterations, by the id of the allocation."""

    def seen(self, allocation: NodeAllocation) -> Callable[[MetricsBlock, Mask], None]:
        def take(block: MetricsBlock, counts: Mask) -> None:
            tokens, seconds = self.worked.get(id(allocation), (0.0, 0.0))
            took = block.columns["step_seconds"]
            tokens += float(np.nansum(took * block.columns["tokens_per_second"]))
            self.worked[id(allocation)] = (tokens, seconds + float(np.nansum(took)))
            steps = counts & ~np.isnan(block.columns["iteration"])
            for row, record in block.records.items():
                if "validation" in record:
                    steps[row] = False
                    losses = record["validation"] if counts[row] and isinstance(record["validation"], dict) else {}
                    for name, loss in losses.items():
                        if isinstance(loss, (int, float)):
                            entry = (float(record["iteration"]), float(loss))
                            self.validation.setdefault(str(name), []).append(entry)
            if not steps.any():
                return
            for name, parts in self.columns.items():
                parts.append(block.columns[name][steps])
            numbers = self.columns["iteration"][-1]
            first, _ = self.trained.get(id(allocation), (int(numbers[0]), 0))
            self.trained[id(allocation)] = (first, int(numbers[-1]))

        return take


def read_report_data(run: Run, *, now: float | None = None) -> RunReportData:
    """Read a run. Raises RunDirError if no attempt has begun, or a record is damaged."""
    facts = read_run_facts(run, now=now)
    lines = _MetricLines()
    found = account_for_run(run, facts=facts, seen=lines.seen, also=("grad_norm", "lr", "memory_bytes"))
    columns = {name: np.concatenate(parts) if parts else np.zeros(0) for name, parts in lines.columns.items()}
    x = columns["iteration"]
    order = np.argsort(x, kind="stable")
    checkpoints = Lineage(run).line()
    data, missing = datasets_read(run, max(0, checkpoints[-1].consumed_samples) if checkpoints else 0)
    newest = max(run.revisions(), default=None)
    queue = QueueStatus() if is_stopped(run) else query_queue(run, brief=True)
    return RunReportData(
        run=run,
        plan=facts.plan,
        account=found,
        series={
            name: reduce_points(x[order], columns[name][order]) if x.size else EMPTY_SERIES for name in SHOWN_METRICS
        },
        last={name: float(values[-1]) for name, values in columns.items() if values.size and np.isfinite(values[-1])},
        validation={name: reduce_points(*np.array(sorted(seen)).T) for name, seen in sorted(lines.validation.items())},
        rows=[_attempt_row(allocation, lines) for allocation in facts.allocations],
        checkpoints=checkpoints,
        evaluations=evaluations.evaluation_results(run),
        data=data,
        data_missing=missing,
        changes=_config_changes(run),
        config="" if newest is None else run.config_revision(newest).read_text(encoding="utf-8", errors="replace"),
        status=summarize_run(run, queue, now=time.time() if now is None else now),
    )


def _attempt_row(allocation: NodeAllocation, lines: _MetricLines) -> AttemptRow | None:
    if (facts := allocation.facts) is None:
        return None
    begin, end = facts.begin.start_time, facts.end
    tokens, seconds = lines.worked.get(id(allocation), (0.0, 0.0))
    ended = allocation.end if end is None else end.end_time
    return AttemptRow(
        number=facts.attempt.number,
        cause=allocation.cause,
        reason=allocation.reason,
        steps=lines.trained.get(id(allocation)),
        durable_iteration=None if end is None else end.durable_iteration,
        tokens=round(tokens),
        tokens_per_second=tokens / seconds if tokens and seconds else None,
        seconds=max(0.0, ended - begin) if allocation.ended else None,
    )


def attempts_table(report: RunReportData) -> AccountTable:
    """Return a table of the attempts with cause of end, iterations, tokens and tokens/s."""
    columns = ("attempt|n", "ended", "why", "iterations|n", "saved|n", "tokens|n", "wall s|n", "tokens/s|n")
    rows = [
        (
            str(row.number),
            row.cause,
            row.reason,
            "none" if row.steps is None else "–".join(map(str, row.steps)),
            "" if row.durable_iteration is None else str(row.durable_iteration),
            f"{row.tokens:,}",
            "" if row.seconds is None else f"{row.seconds:.0f}",
            "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        )
        for row in report.attempts
    ]
    return AccountTable(f"attempts of {report.run.path.name}", columns, rows)


def datasets_read(run: Run, consumed: int) -> tuple[list[DatasetRead], str]:
    """Return the samples read of each data set after `consumed` samples, or the reason why they are unknown.

    Computed from the phases that the newest attempt recorded, without reading the data.
    """
    for number in reversed(run.attempt_numbers()):
        path = run.attempt(number).data
        try:
            state = read_json(path)
            schedule = Schedule.from_json(state["phases"])
            weights = schedule.phases[-1].weights
            total = sum(weights.values())
            found = []
            for name, count in schedule.counts(consumed).items():
                windows = int(state["datasets"][name].get("windows") or 0)
                weight, epochs = weights.get(name, 0) / total, count / windows if windows else None
                found.append(DatasetRead(dataset=name, weight=weight, samples=count, epochs=epochs))
            return found, ""
        except FileNotFoundError:
            continue
        except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            return [], f"{path} is not readable: {error}"
    return [], "no attempt has written down its data order"


def _config_changes(run: Run) -> list[tuple[str, str]]:
    """Changed settings of each revision; the first has none."""
    found, before = [], None
    for revision in run.revisions():
        try:
            config = resolve.read_resolved_config(run.config_revision(revision))
        except (RelayrunError, OSError) as error:  # e.g. of another version
            lines = [f"not readable: {getattr(error, 'message', error)}"]
        else:
            lines = [] if before is None else config_differences(before, config) or ["the same settings"]
            before = config
        found += [(str(revision), line) for line in lines]
    return found
