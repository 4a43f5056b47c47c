"""Elements of HTML and SVG. Whatever is no markup already is escaped: a run's name is text, whatever it holds."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is markup: `tag` makes it, and escapes all other text."""

    __slots__ = ()


VOID_ELEMENTS = frozenset({"meta", "line", "path", "rect", "br"})
"""Elements without content."""


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """Return an element. Attributes that are None are left out; `class_` is `class`, and `_` in names is `-`."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID_ELEMENTS and not children:
        return Markup(f"<{name}{given}>" if name in ("meta", "br") else f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{join_markup(children)}</{name}>")


def join_markup(parts: Iterable[str | None]) -> Markup:
    """Return the parts one behind the other, with text escaped; None is nothing."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts if part is not None))
