"""Text for terminals: control characters that came from a file, a log or a job are shown as visible escapes.

A name with an escape sequence could recolour, hide or overwrite what a command prints. `run_main` puts an `InertStream`
over standard output and standard error, so one place holds for every program. Standard library alone.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from typing import Any, TextIO, cast

_ACTIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls but tab and newline, 8-bit controls, marks of direction, line separators, and lone surrogates."""


def inert(text: str) -> str:
    r"""Return the text with every active character as `\u001b`, which JSON reads as the same character."""
    return _ACTIVE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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
