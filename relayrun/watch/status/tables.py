"""Tables with one line per run, and printing of tables on a terminal or into a file.

Functions that build a table import rich themselves: its import takes as long as a hundred summaries.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len

from relayrun.watch.status.cron_check_record import LastCronCheck
from relayrun.watch.status.summary import DamagedRun, RunSummary

if TYPE_CHECKING:
    from rich.table import Table

RUN_COLUMNS = ("run", "state", "attempt", "iteration", "left", "loss", "tokens/s", "durable", "age", "the last end")
"""Columns of the table of many runs."""
NUMBER_COLUMNS = frozenset({"attempt", "left", "loss", "tokens/s", "durable", "age"})
"""Columns with numbers."""
MAX_FOLDED_ROWS = 200
"""Largest table that is folded to the width of a terminal: a thousand rows take a second."""


def print_runs(found: Sequence[RunSummary | DamagedRun]) -> None:
    """Print one line per run."""
    if sys.stdout.isatty() and len(found) <= MAX_FOLDED_ROWS:
        print_table(runs_table(found))
        return
    rows = [list(RUN_COLUMNS), *map(_run_cells, found)]
    widths = [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]
    print("\n".join("  ".join(map(_padded, row, widths, RUN_COLUMNS)).rstrip() for row in rows))


def _padded(text: str, width: int, column: str) -> str:
    space = " " * (width - cell_len(text))
    return space + text if column in NUMBER_COLUMNS else text + space


def runs_table(found: Sequence[RunSummary | DamagedRun]) -> Table:
    """Return a table with one line per run; a damaged run shows its error."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in RUN_COLUMNS:
        table.add_column(name, justify="right" if name in NUMBER_COLUMNS else "left")
    for entry in found:
        table.add_row(*map(escape, _run_cells(entry)))
    return table


def _run_cells(entry: RunSummary | DamagedRun) -> list[str]:
    if isinstance(entry, DamagedRun):
        return ["/".join(entry.path.split("/")[-2:]), "damaged", *[""] * 7, " ".join(entry.error.split())]
    return [
        entry.run,
        entry.state,
        str(entry.attempt or ""),
        f"{entry.iteration}/{entry.total_steps or '?'}",
        format_remaining(entry),
        format_loss(entry.loss),
        format_speed(entry.tokens_per_second),
        "none whole" if entry.durable_iteration is None else str(entry.durable_iteration),
        format_seconds(entry.durable_age),
        (entry.stop or entry.broken or entry.last_end or "").partition("\n")[0],
    ]


def run_line(entry: RunSummary | DamagedRun) -> str:
    """Return one line about a run for a log."""
    if isinstance(entry, DamagedRun):
        return f"{'/'.join(entry.path.split('/')[-2:])}: damaged: {entry.error}"
    parts = [
        f"{entry.run}: {entry.state}",
        f"attempt {entry.attempt}" if entry.attempt is not None else "",
        f"iteration {entry.iteration}" + (f" of {entry.total_steps}" if entry.total_steps else ""),
        f"loss {format_loss(entry.loss)}" if entry.loss is not None else "",
        f"durable {entry.durable_iteration}" if entry.durable_iteration is not None else "no whole checkpoint",
        f"left {left}" if (left := format_remaining(entry)) else "",
        (entry.stop or entry.broken or "").partition("\n")[0],
    ]
    return ", ".join(filter(None, parts))


def format_seconds(seconds: float | None) -> str:
    """Return a duration for people: `45 s`, `12 min`, `3.4 h`, `2.1 days`."""
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def cron_check_line(look: LastCronCheck, *, now: float) -> str:
    """Return when the last cron check ran, and a warning if it is late."""
    if look.time is None:
        return f"nobody knows when it last looked: its record in {look.folder} cannot be read"
    whose = f"{look.folder}, by {look.user} on {look.host}"
    words = f"looked {format_seconds(now - look.time)} ago ({whose})"
    if not look.late:
        return words
    every = f" and every {format_seconds(look.period)} before" if look.period else ""
    return f"dead or late: {words}{every}; nobody looks: see `crontab -l` there"


def cron_check_lines(found: Sequence[RunSummary | DamagedRun], *, now: float) -> list[str]:
    """Return one line per folder whose cron check covers some of these runs."""
    known = [status.sentinel for status in found if isinstance(status, RunSummary) and status.sentinel is not None]
    looks = {look.folder: look for look in known}
    return [f"sentinel: {cron_check_line(look, now=now)}" for look in looks.values()]


def format_remaining(status: RunSummary) -> str:
    """Return the remaining time and node hours for a column; empty if unknown."""
    left = status.remaining
    return (
        f"{format_seconds(left.seconds)}, {left.node_hours:,.1f} node h" if left is not None and left.iterations else ""
    )


def format_loss(value: float | None) -> str:
    """Return a loss in nats per token for people; empty for None."""
    return "" if value is None else f"{value:.4f}"


def format_speed(value: float | None) -> str:
    """Return tokens per second for people; empty for None."""
    return "" if value is None else f"{value:,.0f}"


def print_table(table: Table) -> None:
    """Print a table; into a file or pipe without folding at a terminal's width."""
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=400)
    with console.capture() as text:
        console.print(table)
    for line in text.get().splitlines():
        print(line.rstrip())
