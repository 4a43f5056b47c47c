"""The page of a drill for the operations team: as text, as JSON, as Markdown and as a self-contained HTML file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from relayrun.lab.faults.result import Result
from relayrun.lab.faults.session import Session
from relayrun.lab.faults.site import REFERENCE
from relayrun.watch.report.markup import Markup, tag
from relayrun.watch.report.shell import html

COLUMNS = ("fault", "what happened", "how attempts ended", "seconds lost", "steps lost", "bit for bit", "verdict")


def as_json(session: Session) -> dict[str, Any]:
    """Return all of a drill as plain values."""
    results, waiting = session.results(), session.to_do()
    return {
        "cluster": session.site.cluster.get("name", ""),
        "nodes": session.site.nodes,
        "directory": str(session.folder),
        "passed": passed(results),
        "rows": [asdict(result) for result in results],
        "left_out": session.skipped,
        "not_done": waiting,
    }


def passed(results: Sequence[Result]) -> bool:
    """Whether no row that is done failed."""
    return all(result.passed for result in results)


def table(session: Session) -> Table:
    """Return a drill as a table for a terminal."""
    found = Table(title=headline(session), box=None, title_justify="left", padding=(0, 2, 0, 0))
    for name in COLUMNS:
        found.add_column(name, justify="right" if name.endswith("lost") else "left", overflow="fold")
    for cells in rows(session):
        found.add_row(*map(escape, cells))
    return found


def markdown(session: Session) -> str:
    """Return a drill as Markdown."""
    lines = [f"# {headline(session)}", "", *(f"{fact}  " for fact in facts(session)), ""]
    lines += [_row(COLUMNS), _row(["---"] * len(COLUMNS)), *(_row(cells) for cells in rows(session))]
    for result in failures(session):
        lines += ["", f"## {result.name}", "", *(f"- {_cell(words)}" for words in result.wrong)]
        lines += ["", f"Run directory: `{result.run_dir}`"]
    return "\n".join(lines) + "\n"


def document(session: Session) -> str:
    """Return a drill as one HTML file."""
    head = tag("tr", *(tag("th", name) for name in COLUMNS))
    body = [tag("tr", *(tag("td", cell) for cell in cells)) for cells in rows(session)]
    return html(
        headline(session),
        tag("h1", headline(session)),
        *(tag("p", fact) for fact in facts(session)),
        tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide"),
        *(_failure(result) for result in failures(session)),
    )


def headline(session: Session) -> str:
    """Return what a drill came to, in a line."""
    done = [result for result in session.results() if result.name != REFERENCE]
    good = sum(result.passed for result in done)
    return f"drill on {session.site.cluster.get('name', 'a cluster')}: {good} of {len(done)} faults passed"


def facts(session: Session) -> list[str]:
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


def failures(session: Session) -> list[Result]:
    """Return the rows that failed."""
    return [result for result in session.results() if not result.passed]


def rows(session: Session) -> list[list[str]]:
    """Return the cells of the table."""
    return [_cells(result) for result in session.results()] + _left_out(session.skipped)


def _cells(result: Result) -> list[str]:
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


def _left_out(skipped: Mapping[str, str]) -> list[list[str]]:
    return [[name, reason, "–", "–", "–", "–", "left out"] for name, reason in skipped.items()]


def _failure(result: Result) -> Markup:
    return tag(
        "section",
        tag("h2", result.name),
        tag("ul", *(tag("li", words) for words in result.wrong)),
        tag("p", f"Run directory: {result.run_dir}"),
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Text that keeps within a cell of a table, whatever it holds."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
