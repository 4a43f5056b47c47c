"""Conditions on rows (`relayrun.config.sections.row_filter`), as Arrow computes them, and on rows of JSON."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from relayrun.config.sections.row_filter import (
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
