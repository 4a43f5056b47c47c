"""Rows and files of a stream that are left out: by a condition, or because of a fault in their content.

Arrow computes conditions on tables; `row_fulfils` decides alike for a row of JSON. A row that is left out keeps its
position in its file, so blocks and cursors do not depend on it. A file is left out whole: it is read once to its end
before its first row is given, and its bytes alone decide, so all ranks and attempts decide alike. An error of the file
system or the store, a missing file and a changed file are no faults of the content: they end the run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from relayrun.config.sections import conditions
from relayrun.config.sections.conditions import (
    Both,
    Column,
    Compare,
    Condition,
    ConditionOperand,
    In,
    IsNull,
    Not,
    TextLength,
)
from relayrun.errors import InputError
from relayrun.tokens.readers.inputs import BadLine, LineFaults
from relayrun.tokens.readers.texts import LongText
from relayrun.tokens.stores.urls import MissingInput

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
}


def arrow_expression(condition: Condition) -> pc.Expression:
    """The expression of a condition."""
    match condition:
        case Compare(left, sign, right) | Both(left, sign, right):
            return _OPERATORS[sign](_arrow_operand(left), _arrow_operand(right))
        case In(column, values):
            return _arrow_operand(column).isin(pa.array(values))
        case IsNull(column):
            return _arrow_operand(column).is_null()
        case Not(inner):
            return ~arrow_expression(inner)


def _arrow_operand(part: Condition | ConditionOperand) -> pc.Expression:
    match part:
        case Column(name):
            return pc.field(name)
        case TextLength(column):
            return pc.utf8_length(_arrow_operand(column))
        case Compare() | Both() | In() | IsNull() | Not():
            return arrow_expression(part)
        case _:
            return pc.scalar(part)


class ConditionMisfit(Exception):
    """A value of a row is of another kind than the condition compares it with."""


def row_fulfils(condition: Condition, row: Mapping[str, Any]) -> bool | None:
    """Whether a row of JSON fulfils a condition, as Arrow decides it of a table: None where a null leaves it open.

    A name that the row lacks is null. Raises Misfit.
    """
    match condition:
        case Compare(left, sign, right):
            return _compare_values(_operand_value(left, row), sign, _operand_value(right, row))
        case Both(left, "and", right):
            both = row_fulfils(left, row), row_fulfils(right, row)
            return False if False in both else None if None in both else True
        case Both(left, _, right):
            both = row_fulfils(left, row), row_fulfils(right, row)
            return True if True in both else None if None in both else False
        case In(column, values):
            value = row.get(column.name)
            return any(_value_kind(value) == _value_kind(other) and value == other for other in values)
        case IsNull(column):
            return row.get(column.name) is None
        case Not(inner):
            opposite = row_fulfils(inner, row)
            return None if opposite is None else not opposite


def _compare_values(left: Any, sign: str, right: Any) -> bool | None:
    if left is None or right is None:
        return None
    if _value_kind(left) != _value_kind(right):
        raise ConditionMisfit(
            f"{left!r:.40} {sign} {right!r:.40} compares {_value_kind(left)} with {_value_kind(right)}"
        )
    return bool(_OPERATORS[sign](left, right))


def _operand_value(part: ConditionOperand, row: Mapping[str, Any]) -> Any:
    match part:
        case Column(name):
            return row.get(name)
        case TextLength(column):
            text = row.get(column.name)
            if text is not None and not isinstance(text, str):
                raise ConditionMisfit(f"{column.name!r} holds {_value_kind(text)}, not text")
            return None if text is None else len(text)
        case constant:
            return constant


def _value_kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    return "text" if isinstance(value, str) else "null" if value is None else f"a {type(value).__name__}"


FILTER_REASON = "stream.filters"
"""The reason of a row that does not fulfil the condition."""


class RowFaults(LineFaults):
    """What becomes of the bad rows of a file, and of lines of JSON that a filter leaves out: their places stay."""

    def __init__(self, condition: conditions.Condition | None, *, skip: bool) -> None:
        """`condition`: what lines of JSON are asked; `skip`: bad rows are left out, else the first is an InputError."""
        super().__init__(skip=skip, keep=True)
        self._condition = condition
        self._columns = [] if condition is None else conditions.condition_columns(condition)
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
