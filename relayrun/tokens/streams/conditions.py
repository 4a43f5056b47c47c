"""Conditions on rows (`relayrun.config.sections.row_filter`), as Arrow computes them, and on rows of JSON."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from relayrun.config.sections.row_filter import Both, Column, Compare, Condition, In, IsNull, Length, Not, Value

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


def compiled(condition: Condition) -> pc.Expression:
    """The expression of a condition."""
    match condition:
        case Compare(left, sign, right) | Both(left, sign, right):
            return _OPERATORS[sign](_part(left), _part(right))
        case In(column, values):
            return _part(column).isin(pa.array(values))
        case IsNull(column):
            return _part(column).is_null()
        case Not(inner):
            return ~compiled(inner)


def _part(part: Condition | Value) -> pc.Expression:
    match part:
        case Column(name):
            return pc.field(name)
        case Length(column):
            return pc.utf8_length(_part(column))
        case Compare() | Both() | In() | IsNull() | Not():
            return compiled(part)
        case _:
            return pc.scalar(part)


class Misfit(Exception):
    """A value of a row is of another kind than the condition compares it with."""


def fulfils(condition: Condition, row: Mapping[str, Any]) -> bool | None:
    """Whether a row of JSON fulfils a condition, as Arrow decides it of a table: None where a null leaves it open.

    A name that the row lacks is null. Raises Misfit.
    """
    match condition:
        case Compare(left, sign, right):
            return _compared(_value(left, row), sign, _value(right, row))
        case Both(left, "and", right):
            both = fulfils(left, row), fulfils(right, row)
            return False if False in both else None if None in both else True
        case Both(left, _, right):
            both = fulfils(left, row), fulfils(right, row)
            return True if True in both else None if None in both else False
        case In(column, values):
            value = row.get(column.name)
            return any(_kind(value) == _kind(other) and value == other for other in values)
        case IsNull(column):
            return row.get(column.name) is None
        case Not(inner):
            opposite = fulfils(inner, row)
            return None if opposite is None else not opposite


def _compared(left: Any, sign: str, right: Any) -> bool | None:
    if left is None or right is None:
        return None
    if _kind(left) != _kind(right):
        raise Misfit(f"{left!r:.40} {sign} {right!r:.40} compares {_kind(left)} with {_kind(right)}")
    return bool(_OPERATORS[sign](left, right))


def _value(part: Value, row: Mapping[str, Any]) -> Any:
    match part:
        case Column(name):
            return row.get(name)
        case Length(column):
            text = row.get(column.name)
            if text is not None and not isinstance(text, str):
                raise Misfit(f"{column.name!r} holds {_kind(text)}, not text")
            return None if text is None else len(text)
        case constant:
            return constant


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    return "text" if isinstance(value, str) else "null" if value is None else f"a {type(value).__name__}"
