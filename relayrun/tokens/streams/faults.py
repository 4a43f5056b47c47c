"""Rows and files of a stream that are left out because of what they hold, and why.

A row that is left out keeps its place among the rows of its file, so that blocks, cursors and the names of rows do not
depend on it. A file is left out whole, as tokenization does: it is read once to its end before its first row is given.
Whether it is left out is decided by its bytes alone, so every rank and every attempt decides alike. What a file system
or a store fails to do is no fault of a file, and neither is a file that is away or has changed: these end the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relayrun.config.sections import row_filter
from relayrun.errors import InputError
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.readers.spill import LongText
from relayrun.tokens.stores.stores import MissingInput
from relayrun.tokens.streams.conditions import ConditionMisfit, row_fulfils

FILTER_REASON = "stream.filters"
"""The reason of a row that does not fulfil the condition."""


class RowFaults(LineFaults):
    """What becomes of the bad rows of a file, and of lines of JSON that a filter leaves out: their places stay."""

    def __init__(self, condition: row_filter.Condition | None, *, skip: bool) -> None:
        """`condition`: what lines of JSON are asked; `skip`: bad rows are left out, else the first is an InputError."""
        super().__init__(skip=skip, keep=True)
        self._condition = condition
        self._columns = [] if condition is None else row_filter.condition_columns(condition)
        self.seen: set[str] = set()
        """Columns of the condition that a line had."""

    def look(self, row: Mapping[str, Any], long: Mapping[str, LongText | None]) -> None:
        """Raise BadLine for a row that the condition leaves out, or that it does not fit."""
        if self._condition is None:
            return
        values = {name: _whole_value(row.get(name), long) for name in self._columns}
        self.seen.update(name for name in self._columns if name in row)
        try:
            fits = row_fulfils(self._condition, values)
        except ConditionMisfit as error:
            raise BadLine(
                "misfit", f"{FILTER_REASON} does not fit: {error}", hint="mend the line or the filter"
            ) from None
        if not fits:
            raise BadLine(FILTER_REASON, "")

    def add(self, bad: BadLine, where: str) -> None:
        """Count a bad row; see `LineFaults.add`. A row that a filter leaves out is none."""
        if bad.reason != FILTER_REASON:
            super().add(bad, where)


def is_content_fault(error: InputError) -> bool:
    """Whether a file cannot be read because of its bytes, which are the same for everybody who reads it."""
    cause = error.__context__
    known = (PermissionError, FileNotFoundError, ConnectionError, TimeoutError)
    of_the_system = isinstance(cause, known) or (isinstance(cause, OSError) and cause.errno is not None)
    return not (of_the_system or isinstance(error, MissingInput))


def _whole_value(value: Any, long: Mapping[str, LongText | None]) -> Any:
    """A value of a line; a long string has a name in its place."""
    if not isinstance(value, str) or value not in long:
        return value
    spilled = long[value]
    return None if spilled is None else spilled.text()[0].as_py()
