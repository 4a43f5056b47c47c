"""Conditions that a config states as text: on rows of a stream, and on the settings of a sweep's runs.

    stream.filters   pc.field("split") == "train" and score > 0.5
    sweep.filters    optimizer.lr * training.global_batch_size <= 0.02

`parse_row_condition` and `SettingsCondition` walk Python's syntax tree and never execute it. They share the grammar of
conditions; operands differ. `relayrun.tokens.streams.row_filters` evaluates conditions on rows.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar

Constant = str | int | float | bool | None


@dataclass(frozen=True)
class Variable:
    """A column of a row, or a setting."""

    name: str


@dataclass(frozen=True)
class TextLength:
    """The number of characters of a row's text in a column."""

    of: Variable


@dataclass(frozen=True)
class Arithmetic:
    """`left operator right` of numbers."""

    left: ConditionOperand
    operator: str
    right: ConditionOperand
    text: str = field(compare=False)


ConditionOperand = Variable | TextLength | Arithmetic | Constant


@dataclass(frozen=True)
class Compare:
    """`left operator right`."""

    left: ConditionOperand
    operator: str
    right: ConditionOperand
    text: str = field(compare=False)


@dataclass(frozen=True)
class InList:
    """True if a value is in the list."""

    item: ConditionOperand
    values: tuple[ConditionOperand, ...]


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
    return _RowParser().parse(text)


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


class SettingsCondition:
    """A condition on settings.

    Args:
        text: as in the file. Raises ValueError for text that is not a condition.
    """

    def __init__(self, text: str) -> None:
        self._condition = _SweepParser().parse(text)

    def holds(self, setting: Callable[[str], Any]) -> bool:
        """True if a run fulfils the condition; `setting(name)` returns its settings or raises ValueError.

        Raises ValueError for values that cannot be compared.
        """
        return _holds(self._condition, setting)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
"""Functions of the operators in `Compare` and `Arithmetic`."""


def _holds(condition: Condition, setting: Callable[[str], Any]) -> bool:
    match condition:
        case Both(left, sign, right):
            return (all if sign == "and" else any)(_holds(part, setting) for part in (left, right))
        case Not(inner):
            return not _holds(inner, setting)
        case InList(item, values):
            return _value(item, setting) in [_value(value, setting) for value in values]
        case IsNull(item):
            return _value(item, setting) is None
        case Compare(left, sign, right, text):
            values = _value(left, setting), _value(right, setting)
            try:
                return bool(OPERATORS[sign](*values))
            except TypeError:
                raise ValueError(f"{values[0]!r} and {values[1]!r} cannot be compared: `{text}`") from None


def _value(part: ConditionOperand, setting: Callable[[str], Any]) -> Any:
    match part:
        case Variable(name):
            return setting(name)
        case Arithmetic(left, sign, right, text):
            try:
                return OPERATORS[sign](_number(left, setting, text), _number(right, setting, text))
            except (ZeroDivisionError, OverflowError) as error:
                raise ValueError(f"`{text}`: {error}") from None
    return part


def _number(part: ConditionOperand, setting: Callable[[str], Any], text: str) -> int | float:
    value = _value(part, setting)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"`{text}`: {value!r} is no number")
    return value


_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


class _Parser:
    """Turns Python's syntax tree into a condition. Raises ValueError with an example for everything else."""

    example: ClassVar[str]

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
                return InList(self.variable(inner), tuple(map(self.element, values)))
            case ast.Call(ast.Attribute(inner, "is_null" | "is_valid" as name), [], []):
                null = IsNull(self.variable(inner))
                return null if name == "is_null" else Not(null)
        raise self.wrong(node, "is no condition")

    def comparison(self, left: ast.expr, sign: ast.cmpop, right: ast.expr) -> Condition:
        if isinstance(sign, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                raise self.wrong(right, "is no list of constants")
            inside = InList(self.operand(left), tuple(map(self.element, right.elts)))
            return inside if isinstance(sign, ast.In) else Not(inside)
        if (name := _COMPARISONS.get(type(sign))) is None:
            raise ValueError(f"`is` compares no values; {self.example}")
        text = f"{ast.unparse(left)} {name} {ast.unparse(right)}"
        return Compare(self.operand(left), name, self.operand(right), text)

    def operand(self, node: ast.expr) -> ConditionOperand:
        raise NotImplementedError

    def element(self, node: ast.expr) -> ConditionOperand:
        return self.operand(node)

    def variable(self, node: ast.expr) -> Variable:
        raise NotImplementedError

    def constant(self, node: ast.expr) -> Constant:
        match node:
            case ast.Constant(str() | bool() | int() | float() | None as value):
                return value
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if not isinstance(value, bool):
                return -value
        raise self.wrong(node, "is no constant")

    def wrong(self, node: ast.expr, what: str) -> ValueError:
        return ValueError(f"`{ast.unparse(node):.80}` {what}; {self.example}")


class _RowParser(_Parser):
    """Operands: columns, lengths of texts and constants."""

    example = 'write, for example: pc.field("split") == "train" and score > 0.5'

    def comparison(self, left: ast.expr, sign: ast.cmpop, right: ast.expr) -> Condition:
        found = super().comparison(left, sign, right)
        if not condition_columns(found):
            raise self.wrong(left, "is compared with a constant; name a column")
        return found

    def operand(self, node: ast.expr) -> ConditionOperand:
        match node:
            case ast.Call(ast.Attribute(ast.Name("pc"), "utf8_length") | ast.Name("utf8_length"), [inner], []):
                return TextLength(self.variable(inner))
            case ast.Constant() | ast.UnaryOp(ast.USub()):
                return self.constant(node)
        return self.variable(node)

    def element(self, node: ast.expr) -> Constant:
        return self.constant(node)

    def variable(self, node: ast.expr) -> Variable:
        match node:
            case ast.Name(name):
                return Variable(name)
            case ast.Call(
                ast.Name("field") | ast.Attribute(ast.Name("pc" | "ds"), "field"), [ast.Constant(str() as name)], []
            ):
                return Variable(name)
        raise self.wrong(node, "is no column and no constant")


class _SweepParser(_Parser):
    """Operands: settings, arithmetic and constants."""

    example = "write, for example: optimizer.lr * training.global_batch_size <= 0.02"

    def operand(self, node: ast.expr) -> ConditionOperand:
        match node:
            case ast.BinOp(left, sign, right) if type(sign) in _ARITHMETIC:
                return Arithmetic(self.operand(left), _ARITHMETIC[type(sign)], self.operand(right), ast.unparse(node))
            case ast.UnaryOp(ast.USub(), inner) if not isinstance(inner, ast.Constant):
                return Arithmetic(0, "-", self.operand(inner), ast.unparse(node))
            case ast.Constant() | ast.UnaryOp(ast.USub()):
                return self.constant(node)
        return self.variable(node)

    def variable(self, node: ast.expr) -> Variable:
        match node:
            case ast.Name(name):
                return Variable(name)
            case ast.Attribute(inner, name):
                return Variable(f"{self.variable(inner).name}.{name}")
        raise self.wrong(node, "is no setting and no constant")
