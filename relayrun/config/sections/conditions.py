"""Conditions that a config states as text: on rows of a stream, and on the settings of a sweep's runs.

    stream.filters   pc.field("split") == "train" and score > 0.5
    sweep.filters    optimizer.lr * training.global_batch_size <= 0.02

Both are parsed into Python's syntax tree, which is walked here and never executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Constant = str | int | float | bool | None
_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_ROW_EXAMPLE = 'write, for example: pc.field("split") == "train" and score > 0.5'


@dataclass(frozen=True)
class Column:
    """The value of a column in a row."""

    name: str


@dataclass(frozen=True)
class TextLength:
    """The number of characters of a row's text in a column."""

    of: Column


ConditionOperand = Column | TextLength | Constant


@dataclass(frozen=True)
class Compare:
    """`left operator right`."""

    left: ConditionOperand
    operator: str
    right: ConditionOperand


@dataclass(frozen=True)
class In:
    """True if a column holds a constant of the list."""

    column: Column
    values: tuple[Constant, ...]


@dataclass(frozen=True)
class IsNull:
    """True if a column is null."""

    column: Column


@dataclass(frozen=True)
class Not:
    """The negation of a condition."""

    of: Condition


@dataclass(frozen=True)
class Both:
    """`and` or `or` of two conditions."""

    left: Condition
    operator: str
    right: Condition


Condition = Compare | In | IsNull | Not | Both


def parse_row_condition(text: str) -> Condition:
    """Return the condition in a text. Raises ValueError for text that is not a condition."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no condition; {_ROW_EXAMPLE}") from None
    return _parsed_condition(tree.body)


def condition_columns(condition: Condition) -> list[str]:
    """Return the names of the columns in a condition, sorted."""
    return sorted({*_columns(condition)})


def _columns(part: Condition | ConditionOperand) -> Iterator[str]:
    match part:
        case Column(name):
            yield name
        case TextLength(column) | In(column) | IsNull(column):
            yield column.name
        case Not(inner):
            yield from _columns(inner)
        case Compare(left, _, right) | Both(left, _, right):
            yield from _columns(left)
            yield from _columns(right)


def _parsed_condition(node: ast.expr) -> Condition:
    match node:
        case ast.BoolOp(op, values):
            joined = [_parsed_condition(value) for value in values]
            found = joined[0]
            for other in joined[1:]:
                found = Both(found, "and" if isinstance(op, ast.And) else "or", other)
            return found
        case ast.BinOp(left, ast.BitAnd() | ast.BitOr() as op, right):
            return Both(
                _parsed_condition(left), "and" if isinstance(op, ast.BitAnd) else "or", _parsed_condition(right)
            )
        case ast.UnaryOp(ast.Not() | ast.Invert(), inner):
            return Not(_parsed_condition(inner))
        case ast.Compare(left, operators, others):
            return _parsed_comparison([left, *others], operators)
        case ast.Call(ast.Attribute(inner, "isin"), [ast.List(values) | ast.Tuple(values)], []):
            return In(_parsed_column(inner), tuple(map(_parsed_constant, values)))
        case ast.Call(ast.Attribute(inner, "is_null" | "is_valid" as name), [], []):
            null = IsNull(_parsed_column(inner))
            return null if name == "is_null" else Not(null)
    raise _wrong_row_filter(node, "is no condition")


def _parsed_comparison(nodes: list[ast.expr], operators: list[ast.cmpop]) -> Condition:
    found: Condition | None = None
    for left, sign, right in zip(nodes, operators, nodes[1:], strict=False):
        if isinstance(sign, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                raise _wrong_row_filter(right, "is no list of constants")
            inside = In(_parsed_column(left), tuple(map(_parsed_constant, right.elts)))
            one: Condition = inside if isinstance(sign, ast.In) else Not(inside)
        elif (comparison := _COMPARISONS.get(type(sign))) is not None:
            one = Compare(_parsed_operand(left), comparison, _parsed_operand(right))
            if not {*_columns(one)}:
                raise _wrong_row_filter(left, "is compared with a constant; name a column")
        else:
            raise ValueError(f"`is` compares no rows; {_ROW_EXAMPLE}")
        found = one if found is None else Both(found, "and", one)
    assert found is not None
    return found


def _parsed_operand(node: ast.expr) -> ConditionOperand:
    match node:
        case ast.Call(ast.Attribute(ast.Name("pc"), "utf8_length") | ast.Name("utf8_length"), [inner], []):
            return TextLength(_parsed_column(inner))
        case ast.Constant() | ast.UnaryOp(ast.USub()):
            return _parsed_constant(node)
    return _parsed_column(node)


def _parsed_column(node: ast.expr) -> Column:
    match node:
        case ast.Name(name):
            return Column(name)
        case ast.Call(
            ast.Name("field") | ast.Attribute(ast.Name("pc" | "ds"), "field"), [ast.Constant(str() as name)], []
        ):
            return Column(name)
    raise _wrong_row_filter(node, "is no column and no constant")


def _parsed_constant(node: ast.expr) -> Constant:
    match node:
        case ast.Constant(str() | bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if not isinstance(value, bool):
            return -value
    raise _wrong_row_filter(node, "is no constant")


def _wrong_row_filter(node: ast.expr, what: str) -> ValueError:
    return ValueError(f"`{ast.unparse(node)}` {what}; {_ROW_EXAMPLE}")


_SWEEP_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_SWEEP_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SWEEP_EXAMPLE = "write, for example: optimizer.lr * training.global_batch_size <= 0.02"
_MAX_FILTER_LENGTH = 1000


class SweepFilter:
    """A condition on settings.

    Args:
        text: as in the file. Raises ValueError for text that is not a condition.
    """

    def __init__(self, text: str) -> None:
        try:
            if len(text) > _MAX_FILTER_LENGTH:
                raise ValueError
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"{text[:80]!r} is no condition; {_SWEEP_EXAMPLE}") from None
        self._check(self._tree)

    def holds(self, setting: Callable[[str], Any]) -> bool:
        """True if a run fulfils the condition; `setting(name)` returns its settings or raises ValueError.

        Raises ValueError for values that cannot be compared.
        """
        return self._condition(self._tree, setting)

    def _check(self, node: ast.expr) -> None:
        """Raise ValueError for text that is not a condition for any settings."""
        match node:
            case ast.BoolOp(_, parts):
                for part in parts:
                    self._check(part)
            case ast.UnaryOp(ast.Not(), inner):
                self._check(inner)
            case ast.Compare(left, operators, others):
                self._check_value(left)
                for sign, right in zip(operators, others, strict=True):
                    if isinstance(sign, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple):
                        for each in right.elts:
                            self._check_value(each)
                    elif type(sign) in _SWEEP_COMPARISONS:
                        self._check_value(right)
                    else:
                        raise _wrong_sweep_filter(right, "is no list of constants")
            case _:
                raise _wrong_sweep_filter(node, "is no condition")

    def _check_value(self, node: ast.expr) -> None:
        match node:
            case ast.BinOp(left, sign, right) if type(sign) in _SWEEP_OPERATORS:
                self._check_value(left)
                self._check_value(right)
            case ast.UnaryOp(ast.USub(), inner):
                self._check_value(inner)
            case ast.Constant(str() | bool() | int() | float() | None):
                pass
            case _:
                _setting_name(node)

    def _condition(self, node: ast.expr, setting: Callable[[str], Any]) -> bool:
        match node:
            case ast.BoolOp(ast.And(), parts):
                return all(self._condition(part, setting) for part in parts)
            case ast.BoolOp(_, parts):
                return any(self._condition(part, setting) for part in parts)
            case ast.UnaryOp(_, inner):
                return not self._condition(inner, setting)
        assert isinstance(node, ast.Compare)
        left = self._value(node.left, setting)
        for sign, other in zip(node.ops, node.comparators, strict=True):
            if isinstance(other, ast.List | ast.Tuple):
                values = [self._value(each, setting) for each in other.elts]
                held, right = (left in values) == isinstance(sign, ast.In), None
            else:
                right = self._value(other, setting)
                try:
                    held = _SWEEP_COMPARISONS[type(sign)](left, right)
                except TypeError:
                    raise ValueError(f"{left!r} and {right!r} cannot be compared: `{ast.unparse(node)}`") from None
            if not held:
                return False
            left = right
        return True

    def _value(self, node: ast.expr, setting: Callable[[str], Any]) -> Any:
        match node:
            case ast.Constant(value):
                return value
            case ast.UnaryOp(_, inner):
                return -self._number(inner, setting)
            case ast.BinOp(left, sign, right):
                values = self._number(left, setting), self._number(right, setting)
                try:
                    return _SWEEP_OPERATORS[type(sign)](*values)
                except (ZeroDivisionError, OverflowError) as error:
                    raise ValueError(f"`{ast.unparse(node)}`: {error}") from None
        return setting(_setting_name(node))

    def _number(self, node: ast.expr, setting: Callable[[str], Any]) -> int | float:
        value = self._value(node, setting)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"`{ast.unparse(node)}` is {value!r}, and no number")
        return value


def _setting_name(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(inner, name):
            return f"{_setting_name(inner)}.{name}"
    raise _wrong_sweep_filter(node, "is no setting and no constant")


def _wrong_sweep_filter(node: ast.expr, what: str) -> ValueError:
    return ValueError(f"`{ast.unparse(node)}` {what}; {_SWEEP_EXAMPLE}")
