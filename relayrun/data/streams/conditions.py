"""Conditions on rows (`relayrun.config.row_filter`) as Arrow computes them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from relayrun.config.row_filter import Both, Column, Compare, Condition, In, IsNull, Length, Not, Value

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
