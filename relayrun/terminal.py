"""Text for terminals: inert text, and tables that fit. Standard library alone.

Control characters that came from a file, a log or a job are shown as visible escapes: a name with an escape sequence
could recolour, hide or overwrite what a command prints. `run_main` puts an `InertStream` over standard output and
standard error, so one place holds for every program.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from io import TextIOWrapper
from itertools import zip_longest
from operator import le
from typing import Any, TextIO, cast

_ACTIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+")
"""Controls but tab and newline, 8-bit controls, marks of direction, line separators, and lone surrogates."""


def inert(text: str) -> str:
    r"""Return the text with every active character as `\u001b`, which JSON reads as the same character."""
    return text if text.isprintable() else _ACTIVE.sub(_escapes, text)


def _escapes(run: re.Match[str]) -> str:
    """Return the characters' four hexadecimal digits: a hole of a file has hundreds of thousands of them."""
    return "\\u" + run[0].encode("utf-16-be", "surrogatepass").hex(" ", 2).replace(" ", "\\u")


def one_line(text: str, most: int = 500) -> str:
    """Return the text in one line of at most `most` characters, of a longer one without its middle."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most // 2 - 3]}...{text[-(most // 2) :]}"


class InertStream:
    """A text stream that writes `inert` text to the stream `inner`, and is like `inner` in everything else."""

    def __init__(self, inner: TextIO) -> None:
        self.inner = inner

    def write(self, text: str) -> int:
        """Write the text. A leading carriage return stays: progress bars begin with it, at the cursor's own line."""
        start = len(text) - len(text.lstrip("\r"))
        self.inner.write(text[:start] + inert(text[start:]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream below an `InertStream`: for output that a program reads, and for colours of our own."""
    return stream.inner if isinstance(stream, InertStream) else stream


@contextlib.contextmanager
def inert_output() -> Iterator[None]:
    """Make standard output and standard error inert. After an exception they stay so: its traceback may repeat text.
    A character that the terminal lacks is shown as an escape too."""
    streams = sys.stdout, sys.stderr
    for stream in map(raw_stream, streams):
        if isinstance(stream, TextIOWrapper) and stream.errors != "backslashreplace":
            with contextlib.suppress(OSError):  # it asks for a position, which not every stream has
                stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (cast(TextIO, InertStream(raw_stream(stream))) for stream in streams)
    yield
    sys.stdout, sys.stderr = streams


MIN_WORDS = 30
"""Narrowest column in which text is folded, and widest first column that stays in its row at all costs."""


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Print a table that fits the terminal; one line a row in a file or pipe."""
    print(format_table(columns, rows, title=title, width=terminal_width()))


def terminal_width() -> int | None:
    """Return the columns of the terminal on standard output; None for a file or pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def show_in_place(text: str, before: int) -> int:
    """Show as much of a text as fits the terminal in place of `before` lines; return its number of lines."""
    size = shutil.get_terminal_size()
    lines = [inert(line)[: size.columns] for line in text.split("\n")[: size.lines - 1]]
    up = f"\033[{before}A\033[J" if before else ""
    print(up + "\n".join(lines), file=raw_stream(sys.stdout), flush=True)
    return len(lines)


def parse_column_header(name: str) -> tuple[str, bool]:
    """Return a column's name, and True if `|n` after it marks a column of numbers."""
    return name.removesuffix("|n"), name.endswith("|n")


def format_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", width: int | None = None
) -> str:
    """Return a table as lines of at most `width` columns; `|n` after a column's name marks a column of numbers.

    In a table that is too wide, text is folded inside its column. Where that leaves too little room, the widest columns
    move below each row, and the first column moves above it.
    """
    names, numeric = zip(*map(parse_column_header, columns), strict=True)
    table = [row if "".join(row).isprintable() else [*map(inert, row)] for row in rows]
    contents = ["\n".join(texts).split("\n") for texts in zip(names, *table, strict=True)]
    kept, widths, narrow = list(range(len(names))), [*map(_widest, contents)], False

    def excess() -> float:
        return sum(widths[at] + 2 for at in kept) - 2 * (0 in kept) - (width or math.inf)

    while (over := excess()) > 0:
        widest = max(kept, key=lambda at: widths[at] if at or widths[at] > MIN_WORDS else 0)
        if widest and not numeric[widest] and widths[widest] - over >= MIN_WORDS:
            widths[widest] -= int(over)
        elif not narrow:  # names of columns are folded
            widths, narrow = [_widest((*name.split(), *texts)) for name, *texts in contents], True
        else:
            kept.remove(widest)
    indent = "" if 0 in kept else "  "
    lines = [title] if title else []
    plain = "  ".join(f"{{:{'>' if right else '<'}{width}}}" for right, width in zip(numeric, widths, strict=True))
    for row in (names, *table) if any(names) else table:
        text = "".join(row)
        if len(kept) == len(row) and text.isascii() and text.isprintable() and all(map(le, map(len, row), widths)):
            lines.append(plain.format(*map(str.rstrip, row)).rstrip())  # most of thousands of rows
            continue
        if indent and row is not names:
            lines += _folded(row[0], width)
        folded = [_folded(row[at], widths[at]) or [""] for at in kept]
        for texts in zip_longest(*folded, fillvalue=""):
            cells = (_padded(text, widths[at], numeric[at]) for at, text in zip(kept, texts, strict=True))
            lines.append((indent + "  ".join(cells)).rstrip())
        below = (f"{names[at]}: {row[at]}".lstrip(": ") for at in range(1, len(names)) if at not in kept and row[at])
        lines += _folded("; ".join(below), width, "  ") if row is not names else []
    return "\n".join(lines)


def _folded(text: str, width: int | None, indent: str = "") -> list[str]:
    if text.isprintable() and (width is None or len(indent + text) <= width):
        return [indent + text.rstrip()] if text.strip() else []
    fold = textwrap.TextWrapper(max(width or len(text), 1), indent, indent, break_on_hyphens=False)
    return [line for part in text.split("\n") for line in fold.wrap(part)]


def _padded(text: str, width: int, is_number: bool) -> str:
    fill = " " * (width - _cells(text))
    return fill + text if is_number else text + fill


def _widest(texts: Sequence[str]) -> int:
    return max(map(len if "".join(texts).isascii() else _cells, texts))


def _cells(text: str) -> int:
    """Return the columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)
