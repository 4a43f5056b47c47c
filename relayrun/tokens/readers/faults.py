"""Lines and rows that cannot be read: the first raises an error that names it, or all are counted by reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relayrun.errors import InputError
from relayrun.tokens.stores.urls import printable

MAX_EXAMPLES = 5
"""Skipped lines that are quoted, at most."""


def describe_bad_lines(counts: Mapping[str, int]) -> str:
    """Describe the number of skipped lines for a message: `3 lines (2 not UTF-8, 1 not JSON)`."""
    total = sum(counts.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items(), key=lambda each: -each[1]))
    return f"{total:,} line{'s' if total != 1 else ''} ({reasons})"


class BadLine(Exception):
    """A line without a usable text: a `reason` of few words, which is counted, and the whole `message`."""

    def __init__(self, reason: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.reason, self.message, self.hint = reason, message, hint


class LineFaults:
    """Policy for bad lines and rows: raise, or skip and count."""

    whole_rows = False
    """Whether readers show the other columns of each row, too, with `look`."""

    def __init__(self, *, skip: bool = False, keep: bool = False) -> None:
        """`skip`: leave bad lines out and count them; else the first one raises InputError. `keep`: keep a null in
        place of each bad row, so that rows keep their numbers; see `marks`."""
        self._skip = skip
        self.keep = keep
        self.marks: dict[int, str] = {}
        """Reasons for the nulls in the array being read, by row; the reader of the array empties it."""
        self.counts: dict[str, int] = {}
        """Skipped lines by reason."""
        self.examples: list[str] = []
        """The first skipped lines, each with its file and line."""

    def add(self, bad: BadLine, where: str) -> None:
        """Count the line at `where` as skipped. Raises InputError that names it unless lines may be skipped."""
        error = InputError(printable(bad.message), where=printable(where), hint=bad.hint)
        if not self._skip:
            raise error from None
        self.counts[bad.reason] = self.counts.get(bad.reason, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{error.where}: {error.message}")

    def look(self, row: Mapping[str, Any], long: Mapping[str, Any]) -> None:
        """Inspect the object of a JSON line before its text is taken; overrides raise BadLine to skip the line. `long`:
        the long strings of the line, by the placeholders that replace them (`json_csv`)."""
