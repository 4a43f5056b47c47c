"""Filters and faults: the rows and files that a stream leaves out.

Arrow evaluates conditions on tables; `row_fulfils` decides the same for a row of JSON. A skipped row keeps its position
in its file, so blocks and cursors do not depend on filters. A file is left out as a whole: it is read to its end before
its first row is used. Its bytes alone decide, so all ranks and attempts agree. An error of the file system or the
store, a missing file and a changed file end the run instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from relayrun.config.sections.conditions import (
    OPERATORS,
    Both,
    Compare,
    Condition,
    ConditionOperand,
    InList,
    IsNull,
    Not,
    TextLength,
    Variable,
    condition_columns,
    parse_row_condition,
)
from relayrun.config.sections.data import StreamSection
from relayrun.errors import InputError
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.readers.texts import LongText
from relayrun.tokens.stores.urls import MissingInput

if TYPE_CHECKING:
    import pyarrow.compute as pc


def arrow_expression(condition: Condition, schema: pa.Schema) -> pc.Expression:
    """Return a condition for tables of `schema`. Numbers are compared as decimals and doubles: Arrow refuses integers
    above 2^24 beside floats of 32 bits, and above 2^63 beside int64. Raises ArrowException for too large constants."""
    import pyarrow.compute as pc  # its import takes as long as that of Arrow

    match condition:
        case Compare(left, sign, right):
            return OPERATORS[sign](_arrow_operand(left, schema), _arrow_operand(right, schema))
        case Both(left, "and", right):
            return arrow_expression(left, schema) & arrow_expression(right, schema)
        case Both(left, _, right):
            return arrow_expression(left, schema) | arrow_expression(right, schema)
        case InList(item, values):
            inside, to = _arrow_operand(item, schema), _number_type(item, schema)
            if to is None:
                return inside.isin(pa.array(values))
            to = pa.float64() if float in map(type, values) else to
            return inside.cast(to).isin(pa.array(values, to))
        case IsNull(item):
            return pc.field(item.name).is_null()
        case Not(inner):
            return ~arrow_expression(inner, schema)


def _number_type(part: ConditionOperand, schema: pa.Schema) -> pa.DataType | None:
    """Return the type in which to compare a number; None for other columns."""
    kind = schema.field(part.name).type if isinstance(part, Variable) else pa.int32()
    return pa.float64() if pa.types.is_floating(kind) else pa.decimal128(20, 0) if pa.types.is_integer(kind) else None


def _arrow_operand(part: ConditionOperand, schema: pa.Schema) -> pc.Expression:
    import pyarrow.compute as pc

    match part:
        case Variable(name):
            to = _number_type(part, schema)
            return pc.field(name) if to is None else pc.field(name).cast(to)
        case TextLength(column):
            return pc.utf8_length(pc.field(column.name))
        case int() if not isinstance(part, bool):
            return pc.scalar(pa.scalar(Decimal(part)))
    return pc.scalar(part)


class ConditionMisfit(Exception):
    """A value and its operand in the condition have different types."""


def row_fulfils(condition: Condition, row: Mapping[str, Any]) -> bool | None:
    """Return Arrow's decision for a row of JSON; None if a missing value leaves it open. Raises ConditionMisfit."""
    match condition:
        case Compare(left, sign, right):
            first, second = _operand_value(left, row), _operand_value(right, row)
            if first is None or second is None:
                return None
            if (kind := _value_kind(first)) != (other := _value_kind(second)):
                raise ConditionMisfit(f"{first!r:.40} {sign} {second!r:.40} compares {kind} with {other}")
            return bool(OPERATORS[sign](first, second))
        case Both(left, "and", right):
            both = row_fulfils(left, row), row_fulfils(right, row)
            return False if False in both else None if None in both else True
        case Both(left, _, right):
            both = row_fulfils(left, row), row_fulfils(right, row)
            return True if True in both else None if None in both else False
        case InList(item, values):
            value = _operand_value(item, row)
            return any(_value_kind(value) == _value_kind(other) and value == other for other in values)
        case IsNull(column):
            return row.get(column.name) is None
        case Not(inner):
            opposite = row_fulfils(inner, row)
            return None if opposite is None else not opposite


def _operand_value(part: ConditionOperand, row: Mapping[str, Any]) -> Any:
    match part:
        case Variable(name):
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
"""Reason of a row that does not fulfil the condition."""


def stream_filter(stream: StreamSection) -> Condition | None:
    return None if stream.filters is None else parse_row_condition(stream.filters)


class RowFaults(LineFaults):
    """Counts the bad rows of a file and skips JSON lines by the filter; skipped rows keep their positions."""

    def __init__(self, condition: Condition | None, *, skip: bool) -> None:
        """`condition`: checked for lines of JSON. `skip`: skip bad rows; otherwise the first one raises InputError."""
        super().__init__(skip=skip, keep=True)
        self._condition = condition
        self._columns = condition_columns(condition)
        self.seen: set[str] = set()
        """Columns of the condition that occurred in a line."""

    def look(self, row: Mapping[str, Any], long: Mapping[str, LongText | None]) -> None:
        """Raise BadLine for a row that does not fulfil the condition or that the condition does not fit."""
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
        """Count a bad row; see `LineFaults.add`. A row skipped by the filter does not count."""
        if bad.reason != FILTER_REASON:
            super().add(bad, where)


def is_content_fault(error: InputError) -> bool:
    """True if the bytes of the file are at fault, which are equal for all readers."""
    cause = error.__context__
    known = (PermissionError, FileNotFoundError, ConnectionError, TimeoutError)
    of_the_system = isinstance(cause, known) or (isinstance(cause, OSError) and cause.errno is not None)
    return not (of_the_system or isinstance(error, MissingInput))


def _whole_value(value: Any, long: Mapping[str, LongText | None]) -> Any:
    """Return a value of a line, reading long strings back from where they were spilled."""
    if not isinstance(value, str) or value not in long:
        return value
    spilled = long[value]
    return None if spilled is None else spilled.text()[0].as_py()
