"""Conditions on the rows of a stream, which a config states as text.

    stream.filters   pc.field("split") == "train" and score > 0.5

`parse_row_condition` walks Python's syntax tree and never executes it; `relayrun.tokens.streams.row_filters` evaluates
conditions on rows.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

Constant = str | int | float | bool | None


@dataclass(frozen=True)
class Variable:
    """A column of a row."""

    name: str


@dataclass(frozen=True)
class TextLength:
    """The number of characters of a row's text in a column."""

    of: Variable


ConditionOperand = Variable | TextLength | Constant


@dataclass(frozen=True)
class Compare:
    """`left operator right`."""

    left: ConditionOperand
    operator: str
    right: ConditionOperand


@dataclass(frozen=True)
class InList:
    """True if a value is in the list."""

    item: ConditionOperand
    values: tuple[Constant, ...]


@dataclass(frozen=True)
class IsNull:
    """True if a value is null."""

    item: Variable


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


Condition = Compare | InList | IsNull | Not | Both


def parse_row_condition(text: str) -> Condition:
    """Return the condition on rows in a text. Raises ValueError for text that is not a condition."""
    return _Parser().parse(text)


def condition_columns(condition: Condition | None) -> list[str]:
    """Return the names of the columns in a condition, sorted; empty for None."""
    return sorted({*_variables(condition)})


def _variables(part: Condition | ConditionOperand) -> Iterator[str]:
    match part:
        case Variable(name):
            yield name
        case TextLength(inner) | InList(inner) | IsNull(inner) | Not(inner):
            yield from _variables(inner)
        case Compare(left, _, right) | Both(left, _, right):
            yield from _variables(left)
            yield from _variables(right)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""Functions of the operators in `Compare`."""


_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


class _Parser:
    """Turns Python's syntax tree into a condition. Raises ValueError with an example for everything else."""

    example = 'write, for example: pc.field("split") == "train" and score > 0.5'

    def parse(self, text: str) -> Condition:
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"{text[:80]!r} is no condition; {self.example}") from None
        return self.condition(tree.body)

    def condition(self, node: ast.expr) -> Condition:
        match node:
            case ast.BoolOp(op, values):
                sign = "and" if isinstance(op, ast.And) else "or"
                return reduce(lambda left, right: Both(left, sign, right), map(self.condition, values))
            case ast.BinOp(left, ast.BitAnd() | ast.BitOr() as op, right):
                return Both(self.condition(left), "and" if isinstance(op, ast.BitAnd) else "or", self.condition(right))
            case ast.UnaryOp(ast.Not() | ast.Invert(), inner):
                return Not(self.condition(inner))
            case ast.Compare(left, operators, others):
                pairs = zip([left, *others], operators, others, strict=False)
                return reduce(lambda left, right: Both(left, "and", right), (self.comparison(*pair) for pair in pairs))
            case ast.Call(ast.Attribute(inner, "isin"), [ast.List(values) | ast.Tuple(values)], []):
                return InList(self.variable(inner), tuple(map(self.constant, values)))
            case ast.Call(ast.Attribute(inner, "is_null" | "is_valid" as name), [], []):
                null = IsNull(self.variable(inner))
                return null if name == "is_null" else Not(null)
        raise self.wrong(node, "is no condition")

    def comparison(self, left: ast.expr, sign: ast.cmpop, right: ast.expr) -> Condition:
        found = self.compared(left, sign, right)
        if not condition_columns(found):
            raise self.wrong(left, "is compared with a constant; name a column")
        return found

    def compared(self, left: ast.expr, sign: ast.cmpop, right: ast.expr) -> Condition:
        if isinstance(sign, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                raise self.wrong(right, "is no list of constants")
            inside = InList(self.operand(left), tuple(map(self.constant, right.elts)))
            return inside if isinstance(sign, ast.In) else Not(inside)
        if (name := _COMPARISONS.get(type(sign))) is None:
            raise ValueError(f"`is` compares no values; {self.example}")
        return Compare(self.operand(left), name, self.operand(right))

    def operand(self, node: ast.expr) -> ConditionOperand:
        match node:
            case ast.Call(ast.Attribute(ast.Name("pc"), "utf8_length") | ast.Name("utf8_length"), [inner], []):
                return TextLength(self.variable(inner))
            case ast.Constant() | ast.UnaryOp(ast.USub()):
                return self.constant(node)
        return self.variable(node)

    def variable(self, node: ast.expr) -> Variable:
        match node:
            case ast.Name(name):
                return Variable(name)
            case ast.Call(
                ast.Name("field") | ast.Attribute(ast.Name("pc" | "ds"), "field"), [ast.Constant(str() as name)], []
            ):
                return Variable(name)
        raise self.wrong(node, "is no column and no constant")

    def constant(self, node: ast.expr) -> Constant:
        match node:
            case ast.Constant(str() | bool() | int() | float() | None as value):
                return value
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if not isinstance(value, bool):
                return -value
        raise self.wrong(node, "is no constant")

    def wrong(self, node: ast.expr, what: str) -> ValueError:
        return ValueError(f"`{ast.unparse(node):.80}` {what}; {self.example}")
