"""A page about one run, or about several side by side: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import relayrun
from relayrun.watch.goodput import tables
from relayrun.watch.report import sections
from relayrun.watch.report.chart import ChartLine
from relayrun.watch.report.markup import Markup, tag
from relayrun.watch.report.report_data import RunReportData
from relayrun.watch.report.series import EMPTY_SERIES, Series
from relayrun.watch.report.shell import html_page
from relayrun.watch.report.table import format_time, html_table


def report_page(
    pages: Sequence[RunReportData], *, now: float, home: str | None = None, refresh: int | None = None
) -> str:
    """Return the HTML of a page about these runs.

    Args:
        pages: the runs.
        now: seconds since 1970, which it names as its time.
        home: where a list of all runs stands, relative to the page.
        refresh: after so many seconds a browser asks for it again.
    """
    names = ", ".join(page.name for page in pages)
    made = f"As it was at {format_time(now)}; relayrun {relayrun.__version__}."
    above = tag("nav", tag("a", "all runs", href=home)) if home else None
    if len(pages) == 1:
        return html_page(names, above, _run_sections(pages[0], made), refresh=refresh)
    top = [tag("h1", f"{len(pages)} runs"), tag("p", made, class_="soft"), _side_by_side(pages)]
    return html_page(names, above, *top, *(_run_sections(page, None) for page in pages), refresh=refresh)


def _run_sections(page: RunReportData, made: str | None) -> Markup:
    state = f"The chain has ended: {page.stop.partition(chr(10))[0]}" if page.stop else "The chain has not ended."
    return tag(
        "main",
        tag("h1", page.name),
        tag("p", str(page.run.path), class_="soft"),
        tag("p", state),
        tag("p", made, class_="soft") if made else None,
        sections.facts_section(page),
        *(part(page) for part in sections.SECTIONS),
    )


def _side_by_side(pages: Sequence[RunReportData]) -> Markup:
    rows = [
        (
            page.name,
            f"{page.last.get('iteration', 0):,.0f}",
            f"{page.last['loss']:.4f}" if "loss" in page.last else "",
            ", ".join(f"{name} {series.y[-1]:.4f}" for name, series in page.validation.items() if series.size),
            f"{page.account.goodput:.1%}",
            tables.format_node_time(page.account.allocated),
            f"{rate:,.0f}" if (rate := page.account.tokens_per_node_hour) is not None else "",
            str(len(page.account.stays)),
        )
        for page in pages
    ]
    names = (
        "run",
        "iteration|n",
        "loss|n",
        "held-out loss",
        "goodput|n",
        "allocated|n",
        "tokens a node hour|n",
        "jobs|n",
    )
    drawn = [
        ChartLine(name=page.name, series=page.series.get("loss", EMPTY_SERIES), colour=number)
        for number, page in enumerate(pages)
    ]
    return sections.section("Side by side", html_table(names, rows), sections.loss_charts("training loss", drawn))


def report_as_json(page: RunReportData) -> dict[str, Any]:
    """Return what a page shows as plain values; of many points the least and the greatest of each pixel."""
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
                "attempt": stay.attempt,
                "start_time": stay.start,
                "end_time": stay.end,
                "cause": stay.cause,
                "reason": stay.reason,
                "blamed": list(stay.blamed),
                "iterations": None if trained is None else [trained.first, trained.last],
            }
            for stay, trained in zip(page.account.stays, page.trained, strict=True)
            if stay.attempt is not None
        ],
        "jobs_without_attempt": [
            {"job_id": stay.stay.job_id, "start_time": stay.start, "end_time": stay.end, "why": stay.reason}
            for stay in page.account.stays
            if stay.attempt is None
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
