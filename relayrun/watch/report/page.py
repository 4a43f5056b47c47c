"""The report as one HTML file, about one run or about several, one after the other.

`templates/report.html` says where everything stands; here are the values of its charts and the cells of its tables.
All text of a run is escaped, so its name stays text. A content policy forbids scripts and network access. The style
sheet serves narrow and wide screens, light and dark, and paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import relayrun
from relayrun.control.rundir.plan import cost_words
from relayrun.control.rundir.restarts import FailedRestart
from relayrun.files import text_of
from relayrun.terminal import parse_column_header
from relayrun.watch.goodput.account import WAIT_KINDS, AllocationAccount
from relayrun.watch.goodput.tables import PART_COLUMNS, account_tables, format_duration, format_node_time
from relayrun.watch.report import chart
from relayrun.watch.report.chart import EMPTY_SERIES, Chart, ChartLine, ChartMark
from relayrun.watch.report.report_data import RunReportData
from relayrun.watch.status.summary import PLANNED_CAUSES
from relayrun.watch.text import format_exact_seconds, format_optional, format_time

PART_GROUPS: tuple[tuple[str, tuple[str, ...], str], ...] = tuple(
    (name, parts, f"g{number}") for number, (name, parts) in enumerate(PART_COLUMNS)
)
"""Parts of the node time with one colour, and their class."""

MOST_MARKS = 200
"""Maximum number of marked events in a chart: the newest."""

METRIC_CHARTS = (
    ("lr", "learning rate", ""),
    ("tokens_per_second", "throughput", "tokens/s"),
    ("memory_bytes", "memory", "bytes, peak of rank 0"),
    ("grad_norm", "gradient norm", "before clipping"),
)


def report_page(pages: Sequence[RunReportData], *, now: float) -> str:
    """Return the HTML of a page about these runs, with the time `now` in seconds since 1970."""
    templates = FileSystemLoader(Path(__file__).parent / "templates")
    made = Environment(
        loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {"column": parse_column_header, "percent": "{:.2%}".format}
    return made.get_template("report.html").render(
        title=", ".join(page.name for page in pages),
        made=f"As it was at {format_time(now)}; relayrun {relayrun.__version__}.",
        runs=[_run_values(page) for page in pages],
    )


def _run_values(page: RunReportData) -> dict[str, Any]:
    """Return the values of a run's part of the page."""
    account, loss = page.account, page.series.get("loss", EMPTY_SERIES)
    marks = attempt_marks(page)
    total = max(1, account.allocated)
    sums = [(name, css, sum(account.parts[part] for part in parts) / total) for name, parts, css in PART_GROUPS]
    drawn = [ChartLine(name="training", series=loss)]
    drawn += [
        ChartLine(name=name, series=series, colour=number, dots=True)
        for number, (name, series) in enumerate(page.validation.items(), start=1)
    ]
    return {
        "page": page,
        "facts": _facts(page),
        "losses": loss_charts("loss", drawn, marks=marks),
        "metrics": [
            chart.line_chart(
                title, [ChartLine(name=title, series=page.series[name])], marks=marks, unit=unit, from_zero=True
            )
            for name, title, unit in METRIC_CHARTS
        ],
        "marks": marks,
        "left_out": loss.left_out,
        "shares": [(f"{name} {share:.1%}", css, share) for name, css, share in sums if share],
        "waits": ", ".join(
            f"{name} {format_duration(account.waited[name])}" for name in WAIT_KINDS if account.waited[name]
        ),
        "tables": account_tables(account),
        "failures": _failure_rows(page),
        "attempts": _attempt_rows(page),
        "data": [
            (
                row.dataset,
                f"{row.weight:.4f}" if row.weight else "left",
                f"{row.samples:,}",
                format_optional(row.epochs, ".3f"),
            )
            for row in page.data
        ],
        "held_out": ", ".join(f"{name} {each.y[-1]:.4f}" for name, each in page.validation.items() if each.size),
        "overlaps": (text_of(page.run.overlap) or "").splitlines(),
        "evaluations": _evaluation_rows(page),
        "saves": _saves(page),
        "checkpoints": _checkpoint_rows(page),
        "changes": page.changes,
    }


def _facts(page: RunReportData) -> list[tuple[str, str, str]]:
    """Return the main figures: name, value and unit."""
    account, last = page.account, page.last
    steps = page.plan.end_iteration
    durable = page.checkpoints[-1].iteration if page.checkpoints else 0
    figures = [
        ("state", page.status.state),
        ("iteration", f"{last.get('iteration', 0):,.0f}" + (f" of {steps:,}" if steps else "")),
        ("loss", format_optional(last.get("loss"), ".4f")),
        ("saved", f"{durable:,}"),
        ("goodput", f"{account.goodput:.1%}"),
        ("effective training time", f"{account.effective_training_time:.1%}"),
        ("allocated", format_node_time(account.allocated) + cost_words(account.node_hours, page.plan)),
        ("since the first submission", format_duration(account.elapsed)),
        ("tokens a node hour", format_optional(account.tokens_per_node_hour, ",.0f")),
        ("MFU, all allocated time", format_optional(account.mfu, ".1%")),
    ]
    return [(name, *text.partition(" ")[::2]) for name, text in figures if text]


def loss_charts(title: str, drawn: Sequence[ChartLine], *, marks: Sequence[ChartMark] = ()) -> list[Chart | None]:
    """Return a chart of losses, and a second chart of the last three quarters, on a scale of their own."""
    charts = [chart.line_chart(title, drawn, marks=marks, unit="nats per token")]
    long = [line.series.x for line in drawn if line.series.size >= 100]
    if long:
        first, last = min(float(x[0]) for x in long), max(float(x[-1]) for x in long)
        begin = round(first + (last - first) / 4)
        later = [replace(line, series=line.series.after(begin)) for line in drawn]
        title = f"{title} from iteration {begin:,} on"
        charts.append(chart.line_chart(title, later, marks=marks, unit="nats per token"))
    return charts


def attempt_marks(page: RunReportData) -> list[ChartMark]:
    """Return marks for the newest attempts, except the first, and restarts."""
    marks = []
    before: AllocationAccount | None = None
    for each, row in zip(page.account.allocations, page.rows, strict=True):
        steps = None if row is None else row.steps
        if steps is not None and before is not None:
            kind = "attempt" if before.cause in PLANNED_CAUSES else "failed"
            words = f"attempt {each.attempt} from iteration {steps[0]}; the one before: {before.cause}"
            marks.append(ChartMark(x=steps[0], words=words, kind=kind))
        marks += [
            ChartMark(x=failed.next_iteration, words=failed.told, kind="restart") for failed in failed_restarts(each)
        ]
        if steps is not None or each.cause not in (*PLANNED_CAUSES, "running"):
            before = each
    return marks[-MOST_MARKS:]


def _attempt_rows(page: RunReportData) -> list[tuple[str, ...]]:
    return [
        (
            "–" if each.attempt is None else str(each.attempt),
            format_time(each.start),
            format_exact_seconds(each.end - each.start),
            "" if each.allocation.facts is None else each.allocation.facts.begin.nodes,
            "none" if row is None or row.steps is None else f"{row.steps[0]:,}–{row.steps[1]:,}",
            "" if row is None or row.durable_iteration is None else f"{row.durable_iteration:,}",
            each.cause,
            each.allocation.reason,
        )
        for each, row in zip(page.account.allocations, page.rows, strict=True)
    ]


def failed_restarts(each: AllocationAccount) -> list[FailedRestart]:
    """Return the failures of an allocation's attempt after which ranks were started again."""
    found = each.allocation.facts
    return [] if found is None else [one for one in found.failed_restarts if one.again]


def _failure_rows(page: RunReportData) -> list[tuple[str, ...]]:
    """Return the unplanned ends of attempts and of ranks, with the nodes to which they are attributed."""
    rows: list[tuple[str, ...]] = []
    for each in page.account.allocations:
        rows += [
            (str(each.attempt), format_time(failed.time), "ranks started again", failed.node, failed.told)
            for failed in failed_restarts(each)
        ]
        if each.cause in (*PLANNED_CAUSES, "running"):
            continue
        found = each.allocation.facts
        at = each.end if found is None else found.failure_time or (found.hang.time if found.hang else each.end)
        number = "–" if each.attempt is None else str(each.attempt)
        rows.append((number, format_time(at), each.cause, ", ".join(each.blamed), each.allocation.reason))
    return rows


def _evaluation_rows(page: RunReportData) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for result in page.evaluations:
        values = [f"{task} {name} {value:.4g}" for task, each in result.results.items() for name, value in each.items()]
        rows.append((f"{result.iteration:,}", result.status, result.error or "; ".join(values)))
    return rows


def _saves(page: RunReportData) -> str:
    """Return the number of checkpoints that count, and the duration of their saves."""
    seconds = [commit.seconds for commit in page.checkpoints if commit.seconds > 0]
    words = f"{len(page.checkpoints):,} in all"
    if seconds:
        words += f"; a save takes {np.median(seconds):.1f} s at the median, {max(seconds):.1f} s at most"
    return words


def _checkpoint_rows(page: RunReportData) -> list[tuple[str, ...]]:
    """Return the newest checkpoints that count."""
    return [
        (
            f"{commit.iteration:,}",
            format_time(commit.time),
            f"{commit.seconds:.1f} s",
            f"{sum(commit.files.values()) / 1e9:,.3f} GB" if commit.files else "",
            commit.path,
        )
        for commit in page.checkpoints[-10:]
    ]
