"""The lines of metrics.jsonl as columns of numbers, read fast: a run may have a million lines.

A program writes its lines in one format. The first parsed line gives a pattern, which splits a block of lines into
numbers and the rest: evaluations, rollbacks, torn lines. Only the rest is parsed as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relayrun.control.rundir.restarts import METRICS_CHUNK, resets_iteration
from relayrun.files import parse_record
from relayrun.progress import count

Column = npt.NDArray[np.float64]
_NUMBER = rb"[-+0-9.eE]++"
_OTHER = {dict: rb"\{[^{}\n]*+\}", list: rb"\[[^\[\]\n]*+\]", str: rb'"[^"\\\n]*+"', bool: rb"(?:true|false)"}


@dataclass(frozen=True, kw_only=True)
class MetricsBlock:
    """Consecutive lines of the metrics."""

    rows: int
    columns: Mapping[str, Column]
    """One number per line for each requested name; NaN if the line has none."""
    records: Mapping[int, Mapping[str, Any]]
    """Lines that were parsed as JSON, by their row."""

    def part(self, first: int, end: int) -> MetricsBlock:
        """Return rows `first` to `end`, exclusive."""
        return MetricsBlock(
            rows=end - first,
            columns={name: column[first:end] for name, column in self.columns.items()},
            records={row - first: record for row, record in self.records.items() if first <= row < end},
        )


@dataclass(frozen=True)
class _LineForm:
    """A line format: a pattern that matches whole lines, with a group for each requested number."""

    pattern: re.Pattern[bytes]
    numbers: Sequence[str]


def read_metrics_blocks(path: Path, names: Sequence[str]) -> Iterator[MetricsBlock]:
    """Yield the lines of an attempt's metrics, oldest first; nothing for a missing file. `names`: the requested
    numbers. Lines that are not a whole JSON object are skipped: a killed writer leaves them."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return
    form: _LineForm | None = None
    with file:
        while lines := file.readlines(METRICS_CHUNK):
            count(sum(map(len, lines)))
            if not lines[-1].endswith(b"\n"):
                lines.pop()
            if form is None:
                form = _first_line_form(lines, names)
            block, odd = _block(lines, form, names)
            if 2 * odd > block.rows:  # the program has changed its format
                form = _first_line_form(lines[::-1], names)
            if block.rows:
                yield block


def _block(lines: Sequence[bytes], form: _LineForm | None, names: Sequence[str]) -> tuple[MetricsBlock, int]:
    """A block of lines, and the number of lines that were parsed as JSON."""
    if form is None:
        pieces: list[bytes] = [b"".join(lines)]
        stride = 1
    else:
        pieces = form.pattern.split(b"".join(lines))
        stride = len(form.numbers) + 1
    between = pieces[::stride]  # text before, between and after lines of this format
    records: dict[int, dict[str, Any]] = {}
    places = []
    row = 0
    for number, text in enumerate(between):
        if text:
            for line in text.splitlines():
                if (record := parse_record(line)) is not None:
                    records[row] = record
                    row += 1
        if number + 1 < len(between):
            places.append(row)
            row += 1
    columns = {name: np.full(row, np.nan) for name in names}
    at = np.array(places, dtype=np.intp)
    for number, name in enumerate(form.numbers if form is not None else (), start=1):
        columns[name][at] = np.fromiter(map(float, pieces[number::stride]), dtype=np.float64, count=len(places))
    for place, record in records.items():
        for name in names:
            value = record.get(name)
            if type(value) in (int, float):
                columns[name][place] = value
    return MetricsBlock(rows=row, columns=columns, records=records), len(records)


def _first_line_form(lines: Sequence[bytes], names: Sequence[str]) -> _LineForm | None:
    for line in lines[:10]:
        record = parse_record(line)
        if record is None or "evaluation_seconds" in record or resets_iteration(record):  # rare, and needed whole
            continue
        if (form := _line_form(line, record, names)) is not None:
            return form
    return None


def _line_form(line: bytes, record: Mapping[str, Any], names: Sequence[str]) -> _LineForm | None:
    """Format of a line; None if the pattern does not match it, or a requested value is not a number."""
    parts, numbers = [], []
    for name, value in record.items():
        key = re.escape(json.dumps(name, ensure_ascii=False).encode()) + rb": "
        kind = type(value)
        if value is None:
            parts.append(key + rb"null")
        elif kind in (int, float):
            numbers += [name] if name in names else []
            parts.append(key + (rb"(" + _NUMBER + rb")" if name in names else _NUMBER))
        elif name in names or kind not in _OTHER:
            return None
        else:
            parts.append(key + _OTHER[kind])
    pattern = re.compile(rb"^\{" + rb", ".join(parts) + rb"\}\n", re.M)
    if not numbers or pattern.fullmatch(line) is None:
        return None
    try:
        [float(value) for value in pattern.split(line)[1:-1]]
    except ValueError:
        return None
    return _LineForm(pattern, tuple(numbers))
