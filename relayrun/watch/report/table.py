"""Tables of a page, and times in them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from relayrun.watch.report.markup import Markup, join_markup, tag

MAX_TABLE_ROWS = 200
"""A table has so many rows at most, the newest; a line says how many there are."""


def html_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """Return a table; `|n` behind a name makes it a column of numbers. Of many rows the newest are shown.

    On a narrow screen a row of more than four columns is a list, in which each value stands behind its column's name.
    """
    heads = [(name.removesuffix("|n"), "n" if name.endswith("|n") else None) for name in names]
    body = [
        tag("tr", *(tag("td", text, class_=css, data_name=name) for text, (name, css) in zip(row, heads, strict=True)))
        for row in rows[-MAX_TABLE_ROWS:]
    ]
    head = tag("thead", tag("tr", *(tag("th", name, class_=css) for name, css in heads)))
    more = (
        tag("p", f"The newest {MAX_TABLE_ROWS} of {len(rows):,}.", class_="soft")
        if len(rows) > MAX_TABLE_ROWS
        else None
    )
    return join_markup([tag("table", head, tag("tbody", *body), class_="many" if len(names) > 4 else None), more])


def format_time(seconds: float) -> str:
    """A time for people, in this machine's zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
