"""The report as one HTML file, about one run or about several side by side, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import relayrun
from relayrun.control.rundir import restarts
from relayrun.control.rundir.restarts import FailedRestart
from relayrun.watch.goodput import tables
from relayrun.watch.goodput.account import WAIT_KINDS, AllocationAccount
from relayrun.watch.goodput.tables import PART_COLUMNS, account_tables, format_duration, format_node_time
from relayrun.watch.report import chart
from relayrun.watch.report.chart import EMPTY_SERIES, ChartLine, ChartMark, Series, axis_ticks
from relayrun.watch.report.html import MAX_TABLE_ROWS, Markup, html_document, html_table, join_markup, tag
from relayrun.watch.report.report_data import RunReportData
from relayrun.watch.status.summary import PLANNED_CAUSES
from relayrun.watch.text import format_exact_seconds, format_time

PART_GROUPS: tuple[tuple[str, tuple[str, ...], str], ...] = tuple(
    (name, parts, f"g{number}") for number, (name, parts) in enumerate(PART_COLUMNS)
)
"""Parts of the node time with one colour, and their class."""

TIME_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
"""Units of a time axis, in seconds."""

METRIC_CHARTS = (
    ("lr", "learning rate", ""),
    ("tokens_per_second", "throughput", "tokens/s"),
    ("memory_bytes", "memory", "bytes, peak of rank 0"),
    ("grad_norm", "gradient norm", "before clipping"),
)


def facts_section(page: RunReportData) -> Markup:
    """Return the main figures."""
    account, last = page.account, page.last
    steps = page.plan.end_iteration
    durable = page.checkpoints[-1].iteration if page.checkpoints else 0
    figures = [
        ("iteration", f"{last.get('iteration', 0):,.0f}" + (f" of {steps:,}" if steps else "")),
        ("loss", f"{last['loss']:.4f}" if "loss" in last else None),
        ("durable", f"{durable:,}"),
        ("goodput", f"{account.goodput:.1%}"),
        ("effective training time", f"{account.effective_training_time:.1%}"),
        ("allocated", format_node_time(account.allocated)),
        ("since the first submission", format_duration(account.elapsed)),
        ("tokens a node hour", None if (rate := account.tokens_per_node_hour) is None else f"{rate:,.0f}"),
        ("MFU, all allocated time", None if account.mfu is None else f"{account.mfu:.1%}"),
    ]
    shown = [(name, *text.partition(" ")[::2]) for name, text in figures if text is not None]
    return tag(
        "div",
        *(tag("div", name, tag("b", value, tag("small", f" {unit}") if unit else None)) for name, value, unit in shown),
        class_="facts",
    )


def training_section(page: RunReportData) -> Markup:
    """Return the charts of the metrics, with the attempts marked."""
    marks = attempt_marks(page)
    loss = [ChartLine(name="training", series=page.series.get("loss", EMPTY_SERIES))]
    loss += [
        ChartLine(name=name, series=series, colour=number, dots=True)
        for number, (name, series) in enumerate(page.validation.items(), start=1)
    ]
    wide = loss_charts("loss", loss, marks=marks)
    smaller = []
    for name, title, unit in METRIC_CHARTS:
        drawn = [ChartLine(name=title, series=page.series.get(name, EMPTY_SERIES))]
        smaller.append(chart.line_chart(title, drawn, marks=marks, unit=unit, from_zero=True))
    left_out = page.series.get("loss", EMPTY_SERIES).left_out
    words = tag("p", f"{left_out:,} iterations have no finite loss, and are not drawn.", class_="bad")
    hint = tag(
        "p",
        "A dashed line is where an attempt began; red where the one before it failed; "
        "red and dotted where ranks were started again inside a job.",
        class_="soft",
    )
    others = tag("div", *filter(None, smaller), class_="charts")
    return section("Training", wide, words if left_out else None, others, hint if marks else None)


def loss_charts(title: str, drawn: Sequence[ChartLine], *, marks: Sequence[ChartMark] = ()) -> Markup:
    """Return a chart of losses, and a second chart of the last three quarters, on a scale of their own."""
    charts = [chart.line_chart(title, drawn, marks=marks, unit="nats per token")]
    long = [line.series.x for line in drawn if line.series.size >= 100]
    if long:
        first, last = min(float(x[0]) for x in long), max(float(x[-1]) for x in long)
        begin = round(first + (last - first) / 4)
        later = [replace(line, series=line.series.after(begin)) for line in drawn]
        title = f"{title} from iteration {begin:,} on"
        charts.append(chart.line_chart(title, later, marks=marks, unit="nats per token"))
    return tag("div", *filter(None, charts), class_="wide charts")


def attempt_marks(page: RunReportData) -> list[ChartMark]:
    """Return marks for the newest attempts, except the first, and restarts."""
    marks = []
    before: AllocationAccount | None = None
    for each, trained in zip(page.account.allocations, page.trained, strict=True):
        if trained is not None and before is not None:
            kind = "attempt" if before.cause in PLANNED_CAUSES else "failed"
            words = f"attempt {each.attempt} from iteration {trained.first}; the one before: {before.cause}"
            marks.append(ChartMark(x=trained.first, words=words, kind=kind))
        marks += [
            ChartMark(x=failed.next_iteration, words=failed.told, kind="restart")
            for failed in failed_restarts(each)
            if failed.again
        ]
        if trained is not None or each.cause not in (*PLANNED_CAUSES, "running"):
            before = each
    return marks[-MAX_TABLE_ROWS:]


def goodput_section(page: RunReportData) -> Markup:
    """Return the node time: as a sum, over time, by part, by attempt, by cause of loss."""
    account = page.account
    total = max(1, account.allocated)
    sums = [(name, css, sum(account.parts[part] for part in parts) / total) for name, parts, css in PART_GROUPS]
    waits = ", ".join(f"{name} {format_duration(account.waited[name])}" for name in WAIT_KINDS if account.waited[name])
    note = "Evaluations have jobs of their own, which are not in these figures." if account.evaluated_outside else None
    key = [tag("span", tag("i", class_=css), f"{name} {share:.1%}") for name, css, share in sums if share]
    parts, *others = account_tables(account)
    return section(
        "Goodput",
        chart.bar_chart(sums),
        tag("div", *key, class_="key"),
        tag("p", f"Without nodes: {waits}.") if waits else None,
        tag("p", note, class_="soft") if note else None,
        tag("div", _part_band(page), class_="wide"),
        html_table(parts.columns, parts.rows),
        *(join_markup([tag("h3", each.title.capitalize()), html_table(each.columns, each.rows)]) for each in others),
    )


def _part_band(page: RunReportData) -> Markup:
    columns = [
        {name: sum(shares.get(part, 0.0) for part in parts) for name, parts, _ in PART_GROUPS} for shares in page.band
    ]
    length = len(columns) * page.band_seconds
    unit, seconds = next((each for each in TIME_UNITS if length >= 3 * each[1]), TIME_UNITS[-1])
    ticks = axis_ticks(0.0, length / seconds, 5) if length else []
    labels = [(at * seconds / length, f"{at:g} {unit}") for at in ticks]
    return chart.band_chart("over time", columns, [(name, css) for name, _, css in PART_GROUPS], labels)


def attempts_section(page: RunReportData) -> Markup:
    """Return a table of the attempts: begin, nodes, iterations, and end."""
    rows = []
    for each, trained in zip(page.account.allocations, page.trained, strict=True):
        found = each.allocation.facts
        end = None if found is None else found.end
        rows.append(
            (
                "–" if each.attempt is None else str(each.attempt),
                format_time(each.start),
                format_exact_seconds(each.end - each.start),
                "" if found is None else found.begin.nodes,
                "none" if trained is None else f"{trained.first:,}–{trained.last:,}",
                "" if end is None else f"{end.durable_iteration:,}",
                each.cause,
                each.reason,
            )
        )
    names = ("attempt|n", "began", "had nodes for|n", "nodes", "iterations that count|n", "durable|n", "ended", "why")
    return section("Attempts", html_table(names, rows))


def failed_restarts(each: AllocationAccount) -> list[FailedRestart]:
    """Return the failures of the ranks of an allocation's attempt."""
    found = each.allocation.facts
    return [] if found is None else restarts.read_failed_restarts(found.attempt)


def failures_section(page: RunReportData) -> Markup:
    """Return a table of the unplanned ends of attempts and of ranks, with the nodes to which they are attributed."""
    rows = []
    for each in page.account.allocations:
        rows += [
            (str(each.attempt), format_time(failed.time), "ranks started again", failed.node, failed.told)
            for failed in failed_restarts(each)
            if failed.again
        ]
        if each.cause in (*PLANNED_CAUSES, "running"):
            continue
        found = each.allocation.facts
        at = each.end if found is None else found.failure_time or (found.hang.time if found.hang else each.end)
        number = "–" if each.attempt is None else str(each.attempt)
        rows.append((number, format_time(at), each.cause, ", ".join(each.blamed), each.reason))
    names = ("attempt|n", "when", "cause", "nodes blamed", "in words")
    return section("Failures", html_table(names, rows) if rows else tag("p", "There was none."))


def data_section(page: RunReportData) -> Markup:
    """Return the samples read of each data set, up to the durable checkpoint."""
    if page.data_missing:
        return section("Data", tag("p", f"Not known: {page.data_missing}", class_="soft"))
    rows = []
    for row in page.data:
        weight = f"{row.weight:.4f}" if row.weight else "left"
        epochs = "" if row.epochs is None else f"{row.epochs:.3f}"
        rows.append((row.dataset, weight, f"{row.samples:,}", epochs))
    return section("Data", html_table(("data set", "weight|n", "samples read|n", "epochs|n"), rows))


def evaluation_jobs_section(page: RunReportData) -> Markup:
    """Return the results of evaluation jobs; losses on held-out text are in the chart."""
    rows = []
    for result in page.evaluations:
        values = [f"{task} {name} {value:.4g}" for task, each in result.results.items() for name, value in each.items()]
        words = result.error if result.error else "; ".join(values)
        rows.append((f"{result.iteration:,}", result.status, words or ""))
    last = [(name, f"{series.y[-1]:.4f}") for name, series in page.validation.items() if series.size]
    inside = tag("p", "Newest loss on held-out text: " + ", ".join(f"{name} {loss}" for name, loss in last) + ".")
    if not rows and not last:
        return section("Evaluations", tag("p", "There is none."))
    found = html_table(("iteration|n", "status", "results"), rows) if rows else None
    return section("Evaluations", inside if last else None, found)


def checkpoints_section(page: RunReportData) -> Markup:
    """Return a table of the newest checkpoints that count."""
    found = page.checkpoints
    if not found:
        return section("Checkpoints", tag("p", "There is none."))
    seconds = [commit.seconds for commit in found if commit.seconds > 0]
    words = f"{len(found):,} in all"
    if seconds:
        words += f"; a save takes {np.median(seconds):.1f} s at the median, {max(seconds):.1f} s at most"
    rows = [
        (
            f"{commit.iteration:,}",
            format_time(commit.time),
            f"{commit.seconds:.1f} s",
            f"{sum(commit.files.values()) / 1e9:,.3f} GB" if commit.files else "",
            commit.path,
        )
        for commit in found[-10:]
    ]
    names = ("iteration|n", "when", "took|n", "size|n", "folder")
    return section("Checkpoints", tag("p", f"{words}."), html_table(names, rows))


def configuration_section(page: RunReportData) -> Markup:
    """Return the settings that each submit changed, and all newest settings."""
    rows = [(str(change.revision), line) for change in page.changes for line in change.lines]
    once = tag("p", "It was submitted with one set of settings.")
    changes = html_table(("revision|n", "what changed"), rows) if rows else once
    heading = tag("h3", "All settings of the newest revision")
    return section("Configuration", changes, heading, tag("pre", page.config))


def section(title: str, *children: str | None) -> Markup:
    return tag("section", tag("h2", title), *children)


SECTIONS: tuple[Callable[[RunReportData], Markup], ...] = (
    training_section,
    goodput_section,
    failures_section,
    attempts_section,
    data_section,
    evaluation_jobs_section,
    checkpoints_section,
    configuration_section,
)
"""In display order."""


def report_page(pages: Sequence[RunReportData], *, now: float) -> str:
    """Return the HTML of a page about these runs, with the time `now` in seconds since 1970."""
    names = ", ".join(page.name for page in pages)
    made = f"As it was at {format_time(now)}; relayrun {relayrun.__version__}."
    if len(pages) == 1:
        return html_document(names, _run_sections(pages[0], made))
    top = [tag("h1", f"{len(pages)} runs"), tag("p", made, class_="soft"), _side_by_side(pages)]
    return html_document(names, *top, *(_run_sections(page, None) for page in pages))


def _run_sections(page: RunReportData, made: str | None) -> Markup:
    state = f"The chain has ended: {page.stop.partition(chr(10))[0]}" if page.stop else "The chain has not ended."
    return tag(
        "main",
        tag("h1", page.name),
        tag("p", str(page.run.path), class_="soft"),
        tag("p", state),
        tag("p", made, class_="soft") if made else None,
        facts_section(page),
        *(part(page) for part in SECTIONS),
    )


def _side_by_side(pages: Sequence[RunReportData]) -> Markup:
    rows = [
        (
            page.name,
            f"{page.last.get('iteration', 0):,.0f}",
            f"{page.last['loss']:.4f}" if "loss" in page.last else "",
            ", ".join(f"{name} {series.y[-1]:.4f}" for name, series in page.validation.items() if series.size),
            f"{page.account.goodput:.1%}",
            format_node_time(page.account.allocated),
            f"{rate:,.0f}" if (rate := page.account.tokens_per_node_hour) is not None else "",
            str(len(page.account.allocations)),
        )
        for page in pages
    ]
    figures = ("iteration|n", "loss|n", "held-out loss", "goodput|n", "allocated|n", "tokens a node hour|n", "jobs|n")
    drawn = [
        ChartLine(name=page.name, series=page.series.get("loss", EMPTY_SERIES), colour=number)
        for number, page in enumerate(pages)
    ]
    return section("Side by side", html_table(("run", *figures), rows), loss_charts("training loss", drawn))


def report_as_json(page: RunReportData) -> dict[str, Any]:
    """Return the data of a page as plain values; long series keep the minimum and maximum of each pixel."""
    return {
        "run": page.name,
        "path": str(page.run.path),
        "stopped": page.stop,
        "last": page.last,
        "goodput": tables.account_as_json(page.account),
        "series": {name: _series_points(series) for name, series in page.series.items() if series.size},
        "validation": {name: _series_points(series) for name, series in page.validation.items()},
        "band": {"start_time": page.band_start, "column_seconds": page.band_seconds, "shares": list(page.band)},
        "attempts": [
            {
                "attempt": each.attempt,
                "start_time": each.start,
                "end_time": each.end,
                "cause": each.cause,
                "reason": each.reason,
                "blamed": list(each.blamed),
                "iterations": None if trained is None else [trained.first, trained.last],
            }
            for each, trained in zip(page.account.allocations, page.trained, strict=True)
            if each.attempt is not None
        ],
        "jobs_without_attempt": [
            {"job_id": each.allocation.job_id, "start_time": each.start, "end_time": each.end, "why": each.reason}
            for each in page.account.allocations
            if each.attempt is None
        ],
        "data": [vars(row) for row in page.data],
        "data_missing": page.data_missing,
        "evaluations": [vars(result) for result in page.evaluations],
        "checkpoints": [
            {"iteration": commit.iteration, "time": commit.time, "seconds": commit.seconds, "path": commit.path}
            for commit in page.checkpoints
        ],
        "changes": [{"revision": change.revision, "lines": list(change.lines)} for change in page.changes],
    }


def _series_points(series: Series) -> list[list[float]]:
    return [list(point) for point in zip(series.x.tolist(), series.y.tolist(), strict=True)]
