"""Conditions on rows: `pc.field("split") == "train" and score > 0.5`. Parsed into a tree, never evaluated as Python.

    condition := condition and|& condition  |  condition or|'|' condition  |  not|~ condition  |  test
    test      := value COMPARE value ...  |  column in [constant, ...]  |  column not in [...]
              |  column.isin([constant, ...])  |  column.is_null()  |  column.is_valid()
    value     := column  |  pc.utf8_length(column)  |  constant
    column    := NAME  |  field("NAME")  |  pc.field("NAME")

So fairseq2's `partition_filters` and `filters` are taken as they are. A row whose condition is null is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

Constant = str | int | float | bool | None
_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_ROW_EXAMPLE = 'write, for example: pc.field("split") == "train" and score > 0.5'


@dataclass(frozen=True)
class Column:
    """The value of a row in a column."""

    name: str


@dataclass(frozen=True)
class TextLength:
    """Characters of a row's text in a column."""

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
    """Whether a column holds one of some constants."""

    column: Column
    values: tuple[Constant, ...]


@dataclass(frozen=True)
class IsNull:
    """Whether a column holds nothing."""

    column: Column


@dataclass(frozen=True)
class Not:
    """The opposite of a condition."""

    of: Condition


@dataclass(frozen=True)
class Both:
    """`and` of two conditions, or `or`."""

    left: Condition
    operator: str
    right: Condition


Condition = Compare | In | IsNull | Not | Both


def parse_row_condition(text: str) -> Condition:
    """The condition that a text means. Raises ValueError saying what in it cannot be understood."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no condition; {_ROW_EXAMPLE}") from None
    return _parsed_condition(tree.body)


def condition_columns(condition: Condition) -> list[str]:
    """Names of the columns that a condition looks at, sorted."""
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
    raise _wrong(node, "is no condition")


def _parsed_comparison(nodes: list[ast.expr], operators: list[ast.cmpop]) -> Condition:
    found: Condition | None = None
    for left, operator, right in zip(nodes, operators, nodes[1:], strict=False):
        if isinstance(operator, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                raise _wrong(right, "is no list of constants")
            inside = In(_parsed_column(left), tuple(map(_parsed_constant, right.elts)))
            one: Condition = inside if isinstance(operator, ast.In) else Not(inside)
        elif (sign := _COMPARISONS.get(type(operator))) is not None:
            one = Compare(_parsed_operand(left), sign, _parsed_operand(right))
            if not {*_columns(one)}:
                raise _wrong(left, "is compared with a constant; name a column")
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
    raise _wrong(node, "is no column and no constant")


def _parsed_constant(node: ast.expr) -> Constant:
    match node:
        case ast.Constant(str() | bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if not isinstance(value, bool):
            return -value
    raise _wrong(node, "is no constant")


def _wrong(node: ast.expr, what: str) -> ValueError:
    return ValueError(f"`{ast.unparse(node)}` {what}; {_ROW_EXAMPLE}")
