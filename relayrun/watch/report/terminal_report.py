"""The report of a run: a table of its attempts, the loss curve in the terminal, attempts and loss as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relayrun.publishing import published_file
from relayrun.terminal import terminal_width
from relayrun.watch.goodput.tables import AccountTable
from relayrun.watch.report.report_data import AttemptRow, RunReportData
from relayrun.watch.status.summary import PLANNED_CAUSES

_TIME_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


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


def terminal_curve(report: RunReportData, *, height: int = 20) -> str:
    """Return the loss curve as text, with a line at the begin of each attempt."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(90, terminal_width() or 90), height)
    loss = report.series["loss"]
    plotext.plot(loss.x.tolist(), loss.y.tolist(), marker="braille", label="training loss")
    for name, points in report.validation.items():
        plotext.scatter(points.x.tolist(), points.y.tolist(), marker="o", label=name)
    for row in report.attempts[1:]:
        if row.steps is not None:
            plotext.vline(row.steps[0])
    plotext.xlabel("iteration")
    plotext.ylabel("nats per token")
    return str(plotext.uncolorize(plotext.build()))


def write_png(report: RunReportData, path: Path) -> None:
    """Write a PNG: a bar for each attempt with a point for each durable checkpoint, and the loss below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), dpi=130, layout="constrained")
    relay, loss = figure.subplots(2, 1, height_ratios=(min(3.0, 0.6 + 0.3 * len(report.attempts)), 3.0))
    _draw_relay(report, relay)
    drawn = report.series["loss"]
    loss.plot(drawn.x, drawn.y, linewidth=1.1, label="training loss")
    for name, points in report.validation.items():
        loss.plot(points.x, points.y, "o-", markersize=4, label=name)
    for row in report.attempts:
        if row.steps is not None:
            left, right = row.steps[0] - 0.5, row.steps[1] + 0.5
            loss.axvspan(left, right, color=attempt_colour(row), alpha=0.12, linewidth=0, zorder=0)
    loss.set(xlabel="iteration", ylabel="nats per token")
    loss.legend(loc="upper right")
    with published_file(path) as temporary:
        FigureCanvasAgg(figure).print_png(temporary)


def _draw_relay(report: RunReportData, axes: Any) -> None:
    begin = min(row.start_time for row in report.attempts)
    ends = [row.start_time + (row.seconds or 0.0) for row in report.attempts]
    last = max(ends + [time for row in report.attempts for time, _ in row.commits])
    scale, unit = next((each for each in _TIME_UNITS if last - begin >= 2 * each[0]), (1.0, "seconds"))
    for place, row in enumerate(report.attempts):
        end = last if row.seconds is None else row.start_time + row.seconds
        left, width = (row.start_time - begin) / scale, (end - row.start_time) / scale
        axes.barh(place, width, left=left, height=0.55, color=attempt_colour(row), alpha=0.35)
        axes.text(left + width, place, f"  {row.number}: {row.cause}", va="center", fontsize=10)
        times = [(time - begin) / scale for time, _ in row.commits]
        axes.plot(times, [place] * len(times), "o", color=attempt_colour(row), markersize=4)
        if times and place + 1 < len(report.attempts):  # the next attempt starts from it
            start = (report.attempts[place + 1].start_time - begin) / scale
            axes.plot([times[-1], start], [place, place + 1], color="0.6", linewidth=0.8, zorder=0)
    axes.set(xlabel=unit, yticks=[], ylim=(len(report.attempts) - 0.4, -0.6), xlim=(0, 1.1 * (last - begin) / scale))
    axes.set_title("attempts, and the checkpoints that they handed on", fontsize=11, loc="left")


def attempt_colour(row: AttemptRow) -> str:
    """Return matplotlib's colour of an attempt: red (C3) if it failed."""
    return f"C{(0, 1, 2, 4, 9)[row.number % 5] if row.cause in (*PLANNED_CAUSES, 'running') else 3}"
