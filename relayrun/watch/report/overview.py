"""The page that lists the runs of a folder, each with a link to its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from relayrun.watch.report.markup import Markup, join_markup, tag
from relayrun.watch.report.shell import html_page
from relayrun.watch.report.table import format_time, html_table
from relayrun.watch.status.standing import DamagedRun, RunSummary
from relayrun.watch.status.standing_view import cron_check_lines, format_remaining, format_seconds

STATE_CLASSES = {
    "running": "good",
    "queued": "good",
    "broken": "bad",
    "damaged": "bad",
    "unknown": "soft",
    "stopped": "soft",
}
"""Classes of the style sheet, by the state of a chain."""
NO_RUNS = "There is no run here yet."
REFRESH_SECONDS = 30
"""After so long a browser asks for the page again."""
OVERVIEW_COLUMNS = (
    "run",
    "state",
    "iteration|n",
    "left|n",
    "loss|n",
    "goodput|n",
    "durable|n",
    "last sign of life|n",
    "the last end",
)


def overview_page(
    folder: str,
    found: Sequence[tuple[str, RunSummary | DamagedRun]],
    goodput: Mapping[str, str],
    *,
    now: float,
    page: int = 1,
    pages: int = 1,
    of: int,
) -> str:
    """Return the HTML of a page of a list of runs.

    Args:
        folder: what they lie in or below.
        found: each run's path below the folder, and where it stands; in the order of the page.
        goodput: by path, as far as it is reckoned.
        now: seconds since 1970.
        page: number of this page of the list, from 1.
        pages: how many there are.
        of: how many runs there are on all pages.
    """
    states = [entry.state if isinstance(entry, RunSummary) else "damaged" for _, entry in found]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    newer = tag("a", "newer", href=f"?page={page - 1}") if page > 1 else None
    older = tag("a", "older", href=f"?page={page + 1}") if page < pages else None
    more = tag("nav", f"Page {page} of {pages}. ", newer, " ", older) if pages > 1 else None
    rows = [_run_row(name, entry, goodput.get(name), now) for name, entry in found]
    body = tag(
        "main",
        tag("h1", "Runs"),
        tag("p", folder, class_="soft"),
        tag("p", f"{of:,} runs{f'; the {len(found)} here' if pages > 1 else ''}: {counts}." if found else NO_RUNS),
        *(tag("p", line, class_="soft") for line in cron_check_lines([entry for _, entry in found], now=now)),
        tag("p", f"As it was at {format_time(now)}; looked at again every {REFRESH_SECONDS} s.", class_="soft"),
        more,
        html_table(OVERVIEW_COLUMNS, rows) if rows else None,
        more,
    )
    return html_page("Runs", body, refresh=REFRESH_SECONDS)


def report_path(name: str) -> str:
    """Return where the report of a run stands, relative to the list."""
    return f"run/{quote(name, safe='/')}"


def _run_row(name: str, entry: RunSummary | DamagedRun, goodput: str | None, now: float) -> tuple[str, ...]:
    link = tag("a", name, href=report_path(name), class_="run")
    if isinstance(entry, DamagedRun):
        return (link, _state_cell("damaged"), "", "", "", "", "", "", entry.error)
    why = (entry.stop or entry.broken or entry.last_end or "").partition("\n")[0]
    sign = f"{format_seconds(now - entry.updated)} ago" if entry.updated else ""
    total = f" of {entry.total_steps:,}" if entry.total_steps else ""
    return (
        link,
        _state_cell(entry.state),
        f"{entry.iteration:,}{total}" if entry.attempt is not None else "",
        format_remaining(entry),
        f"{entry.loss:.4f}" if entry.loss is not None else "",
        goodput or "",
        "none whole" if entry.durable_iteration is None else f"{entry.durable_iteration:,}",
        sign,
        why,
    )


def _state_cell(state: str) -> Markup:
    return tag("span", state, class_=f"state {STATE_CLASSES.get(state, 'soft')}")


def message_page(title: str, words: str) -> str:
    """Return the HTML of a page that says why there is no other one."""
    lines = join_markup(tag("p", line) for line in words.splitlines())
    return html_page(title, tag("main", tag("h1", title), lines))
