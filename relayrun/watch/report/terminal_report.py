"""The report of a run: a table of its attempts, the loss curve in the terminal, attempts and loss as PNG."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.control.rundir import merged_metrics
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from relayrun.progress import Progress, counted
from relayrun.publishing import published_file
from relayrun.terminal import terminal_width
from relayrun.watch.goodput.facts import AttemptFacts, NodeAllocation, read_run_facts
from relayrun.watch.goodput.tables import AccountTable
from relayrun.watch.status.summary import PLANNED_CAUSES

_TIME_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    """One attempt. `tokens` includes tokens that were computed again later."""

    number: int
    cause: str
    reason: str
    first_iteration: int
    last_iteration: int
    durable_iteration: int | None
    tokens: int
    seconds: float | None
    tokens_per_second: float | None
    """Mean speed over the attempt's iterations, weighted by tokens."""
    trained: bool = True
    """False if it ended before its first iteration; `first_iteration` and `last_iteration` are then its base."""
    start_time: float = 0.0
    """Seconds since 1970."""
    commits: tuple[tuple[float, int], ...] = ()
    """(time in seconds since 1970, iteration) of each durable checkpoint."""


@dataclass(frozen=True, kw_only=True)
class AttemptsAndLosses:
    """The attempts and losses of a run."""

    run: Run
    attempts: list[AttemptRow]
    iterations: list[int]
    losses: list[float]
    validation: dict[str, list[tuple[int, float]]]
    """(iteration, mean loss in nats per token) for each validation set, oldest first."""


def read_attempts_report(run: Run) -> AttemptsAndLosses:
    """Read a run's records; the scheduler knows the ends that no job could record. Raises RunDirError if no attempt has
    begun."""
    with Progress("reading metrics", None, "lines"):
        lines = list(counted(merged_metrics.valid_lines(run)))
        found = read_run_facts(run).allocations
        attempts = [_attempt_row(each, each.facts) for each in found if each.facts is not None]
    steps = [line for line in lines if "loss" in line]
    validation: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, loss in line.get("validation", {}).items():
            validation.setdefault(name, []).append((line["iteration"], loss))
    return AttemptsAndLosses(
        run=run,
        attempts=attempts,
        iterations=[line["iteration"] for line in steps],
        losses=[line["loss"] for line in steps],
        validation=validation,
    )


def _attempt_row(allocation: NodeAllocation, facts: AttemptFacts) -> AttemptRow:
    attempt, begin, end = facts.attempt, facts.begin, facts.end
    steps: list[dict[str, Any]] = [line for line in counted(read_json_lines(attempt.metrics)) if "loss" in line]
    seconds = sum(line.get("step_seconds", 0.0) for line in steps)  # optional for a foreign program
    tokens = round(sum(line.get("tokens_per_second", 0.0) * line.get("step_seconds", 0.0) for line in steps))
    return AttemptRow(
        number=attempt.number,
        cause=allocation.cause,
        reason=allocation.reason,
        first_iteration=steps[0]["iteration"] if steps else begin.base_iteration,
        last_iteration=steps[-1]["iteration"] if steps else begin.base_iteration,
        durable_iteration=end.durable_iteration if end else None,
        tokens=tokens,
        seconds=max(0.0, (end.end_time if end else allocation.end) - begin.start_time) if allocation.ended else None,
        tokens_per_second=tokens / seconds if tokens and seconds else None,
        trained=bool(steps),
        start_time=begin.start_time,
        commits=tuple((commit.time, commit.iteration) for commit in facts.commits),
    )


def attempts_table(report: AttemptsAndLosses) -> AccountTable:
    """Return a table of the attempts with cause of end, iterations, tokens and tokens/s."""
    columns = ("attempt|n", "ended", "why", "iterations|n", "saved|n", "tokens|n", "wall s|n", "tokens/s|n")
    rows = [
        (
            str(row.number),
            row.cause,
            row.reason,
            f"{row.first_iteration}–{row.last_iteration}" if row.trained else "none",
            "" if row.durable_iteration is None else str(row.durable_iteration),
            f"{row.tokens:,}",
            "" if row.seconds is None else f"{row.seconds:.0f}",
            "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        )
        for row in report.attempts
    ]
    return AccountTable(f"attempts of {report.run.path.name}", columns, rows)


def terminal_curve(report: AttemptsAndLosses, *, height: int = 20) -> str:
    """Return the loss curve as text, with a line at the begin of each attempt."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(90, terminal_width() or 90), height)
    plotext.plot(report.iterations, report.losses, marker="braille", label="training loss")
    for name, points in report.validation.items():
        plotext.scatter([point[0] for point in points], [point[1] for point in points], marker="o", label=name)
    for row in report.attempts[1:]:
        plotext.vline(row.first_iteration)
    plotext.xlabel("iteration")
    plotext.ylabel("nats per token")
    return str(plotext.uncolorize(plotext.build()))


def write_png(report: AttemptsAndLosses, path: Path) -> None:
    """Write a PNG: a bar for each attempt with a point for each durable checkpoint, and the loss below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), dpi=130, layout="constrained")
    relay, loss = figure.subplots(2, 1, height_ratios=(min(3.0, 0.6 + 0.3 * len(report.attempts)), 3.0))
    _draw_relay(report, relay)
    loss.plot(report.iterations, report.losses, linewidth=1.1, label="training loss")
    for name, points in report.validation.items():
        loss.plot([point[0] for point in points], [point[1] for point in points], "o-", markersize=4, label=name)
    for row in filter(lambda row: row.trained, report.attempts):
        left, right = row.first_iteration - 0.5, row.last_iteration + 0.5
        loss.axvspan(left, right, color=attempt_colour(row), alpha=0.12, linewidth=0, zorder=0)
    loss.set(xlabel="iteration", ylabel="nats per token")
    loss.legend(loc="upper right")
    with published_file(path) as temporary:
        FigureCanvasAgg(figure).print_png(temporary)


def _draw_relay(report: AttemptsAndLosses, axes: Any) -> None:
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
