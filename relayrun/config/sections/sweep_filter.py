"""Conditions on the settings of a sweep's runs: `optimizer.lr * training.global_batch_size <= 0.02`.

    condition := condition and condition  |  condition or condition  |  not condition  |  test
    test      := value COMPARE value ...  |  value in [constant, ...]  |  value not in [constant, ...]
    value     := SECTION.SETTING  |  constant  |  value + - * / value

Parsed into a tree of Python's, which is walked here and never executed: there are no calls, no names but settings'.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

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
    """One condition.

    Args:
        text: as in the file. Raises ValueError, saying what in it cannot be understood.
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
        """Whether it holds for a run; `setting(name)` gives its settings, and raises ValueError where there is none.

        Raises ValueError where values cannot be compared.
        """
        return self._condition(self._tree, setting)

    def _check(self, node: ast.expr) -> None:
        """Raise ValueError for what is no condition, whatever the settings are."""
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
                        raise _wrong(right, "is no list of constants")
            case _:
                raise _wrong(node, "is no condition")

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
    raise _wrong(node, "is no setting and no constant")


def _wrong(node: ast.expr, what: str) -> ValueError:
    return ValueError(f"`{ast.unparse(node)}` {what}; {_SWEEP_EXAMPLE}")
