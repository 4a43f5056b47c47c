"""What stands around every page: its head, its style, and a policy that keeps it from scripts and from the network."""

from __future__ import annotations

from relayrun.watch.report.markup import Markup, tag
from relayrun.watch.report.style import STYLE_SHEET

CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(title: str, *children: str | None, refresh: int | None = None) -> str:
    """Return a page. `refresh`: after so many seconds a browser asks for it again."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=CONTENT_POLICY),
        tag("meta", http_equiv="refresh", content=str(refresh)) if refresh else None,
        tag("title", f"{title} – relayrun"),
        tag("style", Markup(STYLE_SHEET)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *children), lang='en')}\n"
