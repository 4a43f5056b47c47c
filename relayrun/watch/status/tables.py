"""Lines about runs: a table of many runs, one line of a log, and the last cron check."""

from __future__ import annotations

from collections.abc import Sequence

from relayrun.terminal import format_table, terminal_width
from relayrun.watch.status.cron_check_record import LastCronCheck
from relayrun.watch.status.summary import DamagedRun, RunSummary
from relayrun.watch.text import format_optional, format_seconds

FIGURE_COLUMNS = ("attempt|n", "iteration", "left|n", "loss|n", "tokens/s|n", "saved|n", "age|n")
RUN_COLUMNS = ("run", "state", *FIGURE_COLUMNS, "the last end")


def runs_table(found: Sequence[RunSummary | DamagedRun]) -> str:
    """Return a table of runs that fits the terminal; a damaged run shows its error."""
    return format_table(RUN_COLUMNS, map(run_cells, found), width=terminal_width())


def run_cells(entry: RunSummary | DamagedRun) -> list[str]:
    """Return the columns `RUN_COLUMNS` of a run."""
    if isinstance(entry, DamagedRun):
        return ["/".join(entry.path.split("/")[-2:]), "damaged", *[""] * 7, " ".join(entry.error.split())]
    return [
        entry.run,
        entry.state,
        str(entry.attempt or ""),
        f"{max(entry.iteration, entry.durable_iteration or 0)}/{entry.total_steps or '?'}",
        format_remaining(entry),
        format_optional(entry.loss, ".4f"),
        format_optional(entry.tokens_per_second, ",.0f"),
        "none whole" if entry.durable_iteration is None else str(entry.durable_iteration),
        format_seconds(entry.durable_age),
        (entry.stop or entry.broken or "; ".join(entry.pending.values()) or entry.last_end or "").partition("\n")[0],
    ]


def run_log_line(entry: RunSummary | DamagedRun) -> str:
    """Return one line about a run for a log."""
    if isinstance(entry, DamagedRun):
        return f"{'/'.join(entry.path.split('/')[-2:])}: damaged: {entry.error}"
    parts = [
        f"{entry.run}: {entry.state}",
        f"attempt {entry.attempt}" if entry.attempt is not None else "",
        f"iteration {entry.iteration}" + (f" of {entry.total_steps}" if entry.total_steps else ""),
        f"loss {format_optional(entry.loss, '.4f')}" if entry.loss is not None else "",
        f"saved {entry.durable_iteration}" if entry.durable_iteration is not None else "no whole checkpoint",
        f"left {left}" if (left := format_remaining(entry)) else "",
        (entry.stop or entry.broken or "").partition("\n")[0],
    ]
    return ", ".join(filter(None, parts))


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
    looks = {each.sentinel.folder: each.sentinel for each in found if isinstance(each, RunSummary) and each.sentinel}
    return [f"sentinel: {cron_check_line(look, now=now)}" for look in looks.values()]


def format_remaining(status: RunSummary) -> str:
    """Return the remaining time and node hours for a column; empty if unknown."""
    left = status.remaining
    return f"{format_seconds(left.seconds)}, {left.node_hours:,.1f} node h" if left and left.iterations else ""
