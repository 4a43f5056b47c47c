"""The page of a drill for the operations team: as text, as JSON, as Markdown and as a self-contained HTML file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from relayrun.lab.faults.result import FaultResult
from relayrun.lab.faults.session import DrillSession
from relayrun.lab.faults.small_run import UNDISTURBED_RUN
from relayrun.watch.report.markup import Markup, tag
from relayrun.watch.report.shell import html_page

TABLE_COLUMNS = ("fault", "what happened", "how attempts ended", "seconds lost", "steps lost", "bit for bit", "verdict")


def session_as_json(session: DrillSession) -> dict[str, Any]:
    """Return all of a drill as plain values."""
    results, waiting = session.results(), session.to_do()
    return {
        "cluster": session.site.cluster.get("name", ""),
        "nodes": session.site.nodes,
        "directory": str(session.folder),
        "passed": all_passed(results),
        "rows": [asdict(result) for result in results],
        "left_out": session.skipped,
        "not_done": waiting,
    }


def all_passed(results: Sequence[FaultResult]) -> bool:
    """Whether no row that is done failed."""
    return all(result.passed for result in results)


def terminal_table(session: DrillSession) -> Table:
    """Return a drill as a table for a terminal."""
    found = Table(title=session_headline(session), box=None, title_justify="left", padding=(0, 2, 0, 0))
    for name in TABLE_COLUMNS:
        found.add_column(name, justify="right" if name.endswith("lost") else "left", overflow="fold")
    for cells in table_rows(session):
        found.add_row(*map(escape, cells))
    return found


def markdown_report(session: DrillSession) -> str:
    """Return a drill as Markdown."""
    lines = [f"# {session_headline(session)}", "", *(f"{fact}  " for fact in session_facts(session)), ""]
    lines += [
        _markdown_row(TABLE_COLUMNS),
        _markdown_row(["---"] * len(TABLE_COLUMNS)),
        *(_markdown_row(cells) for cells in table_rows(session)),
    ]
    for result in failed_results(session):
        lines += ["", f"## {result.name}", "", *(f"- {_markdown_cell(words)}" for words in result.wrong)]
        lines += ["", f"Run directory: `{result.run_dir}`"]
    return "\n".join(lines) + "\n"


def html_report(session: DrillSession) -> str:
    """Return a drill as one HTML file."""
    head = tag("tr", *(tag("th", name) for name in TABLE_COLUMNS))
    body = [tag("tr", *(tag("td", cell) for cell in cells)) for cells in table_rows(session)]
    return html_page(
        session_headline(session),
        tag("h1", session_headline(session)),
        *(tag("p", fact) for fact in session_facts(session)),
        tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide"),
        *(_failure_section(result) for result in failed_results(session)),
    )


def session_headline(session: DrillSession) -> str:
    """Return what a drill came to, in a line."""
    done = [result for result in session.results() if result.name != UNDISTURBED_RUN]
    good = sum(result.passed for result in done)
    return f"drill on {session.site.cluster.get('name', 'a cluster')}: {good} of {len(done)} faults passed"


def session_facts(session: DrillSession) -> list[str]:
    """Return what else a reader should know, a sentence each."""
    results = session.results()
    found = [
        f"{time.strftime('%Y-%m-%d %H:%M')}; jobs of {session.site.nodes} nodes with {session.site.ranks} ranks; "
        f"{sum(result.node_seconds for result in results) / 60:.1f} node minutes were used.",
        "Seconds lost are those of a node: lost work, later starts, and the waits before them, the queue included.",
    ]
    if waiting := session.to_do():
        found.append(f"Not done yet: {', '.join(waiting)}.")
    return found


def failed_results(session: DrillSession) -> list[FaultResult]:
    """Return the rows that failed."""
    return [result for result in session.results() if not result.passed]


def table_rows(session: DrillSession) -> list[list[str]]:
    """Return the cells of the table."""
    return [_result_cells(result) for result in session.results()] + _skipped_cells(session.skipped)


def _result_cells(result: FaultResult) -> list[str]:
    same = {True: "yes", False: "NO", None: "–"}[result.bit_for_bit]
    verdict = "passed" if result.passed else "FAILED"
    return [
        result.name,
        result.what,
        ", ".join(result.seen) or "–",
        f"{result.seconds_lost:.0f}",
        str(result.steps_lost),
        same,
        verdict,
    ]


def _skipped_cells(skipped: Mapping[str, str]) -> list[list[str]]:
    return [[name, reason, "–", "–", "–", "–", "left out"] for name, reason in skipped.items()]


def _failure_section(result: FaultResult) -> Markup:
    return tag(
        "section",
        tag("h2", result.name),
        tag("ul", *(tag("li", words) for words in result.wrong)),
        tag("p", f"Run directory: {result.run_dir}"),
    )


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_markdown_cell, cells))} |"


def _markdown_cell(text: str) -> str:
    """Text that keeps within a cell of a table, whatever it holds."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
