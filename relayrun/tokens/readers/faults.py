"""Lines and rows whose text cannot be read: the first one is an error that names it, or all are counted by reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relayrun.errors import InputError
from relayrun.tokens.stores.stores import printable

MAX_EXAMPLES = 5
"""Lines that are named, of those that were left out."""


def describe_bad_lines(counts: Mapping[str, int]) -> str:
    """How many lines were left out, for a message: `3 lines (2 not UTF-8, 1 not JSON)`."""
    total = sum(counts.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items(), key=lambda each: -each[1]))
    return f"{total:,} line{'s' if total != 1 else ''} ({reasons})"


class BadLine(Exception):
    """A line has no text: a `reason` of few words, which is counted, and the whole `message`."""

    def __init__(self, reason: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.reason, self.message, self.hint = reason, message, hint


class LineFaults:
    """What becomes of bad lines and rows."""

    def __init__(self, *, skip: bool = False, keep: bool = False) -> None:
        """`skip`: leave them out and count them; else the first one is an InputError.

        `keep`: a row without a text stays in the place of each, so that rows keep their numbers; see `take_marks`.
        """
        self._skip = skip
        self.keep = keep
        self._marks: list[tuple[int, str]] = []
        self.counts: dict[str, int] = {}
        """Lines that were left out, by reason."""
        self.examples: list[str] = []
        """The first of them, each with its place."""

    def add(self, bad: BadLine, where: str) -> None:
        """Count the line at `where` as left out. Raises InputError naming it where none may be left out."""
        error = InputError(printable(bad.message), where=printable(where), hint=bad.hint)
        if not self._skip:
            raise error from None
        self.counts[bad.reason] = self.counts.get(bad.reason, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{error.where}: {error.message}")

    def look(self, row: Mapping[str, Any], long: Mapping[str, Any]) -> None:
        """Look at the object of a line before its text is taken; raise BadLine to leave it out.

        `long`: the long strings of the line, which have names in their place (`jsonlines`).
        """

    def mark(self, row: int, reason: str) -> None:
        """Remember why row number `row` of the array that is read has no text."""
        self._marks.append((row, reason))

    def take_marks(self) -> list[tuple[int, str]]:
        """Return the rows of the array that was read last that were kept without a text, and why; forget them."""
        marks, self._marks = self._marks, []
        return marks
