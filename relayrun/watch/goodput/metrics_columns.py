"""The lines of metrics.jsonl as columns of numbers, and the lines besides steps: evaluations, rollbacks, restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relayrun.control.rundir.restarts import metrics_chunks, resets_iteration
from relayrun.files import parse_record
from relayrun.progress import count

Column = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MetricsBlock:
    """Consecutive lines of the metrics."""

    rows: int
    columns: Mapping[str, Column]
    """One number per line for each requested name; NaN if the line has none."""
    records: Mapping[int, Mapping[str, Any]]
    """Lines of no step, by their row."""

    def part(self, first: int, end: int) -> MetricsBlock:
        """Return rows `first` to `end`, exclusive."""
        return MetricsBlock(
            rows=end - first,
            columns={name: column[first:end] for name, column in self.columns.items()},
            records={row - first: record for row, record in self.records.items() if first <= row < end},
        )


def read_metrics_blocks(path: Path | str, names: Sequence[str]) -> Iterator[MetricsBlock]:
    """Yield the lines of an attempt's metrics, oldest first; nothing for a missing file. `names`: the requested
    numbers. Lines that are not a whole JSON object are skipped: a killed writer leaves them."""
    for lines in metrics_chunks(path):
        count(sum(map(len, lines)))
        if found := _records([line for line in lines if line.endswith(b"\n")]):
            others = {n: each for n, each in enumerate(found) if "loss" not in each or resets_iteration(each)}
            columns = {name: _column(found, name) for name in names}
            yield MetricsBlock(rows=len(found), columns=columns, records=others)


def _records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")  # twice as fast as line by line
    except ValueError:
        found = [parse_record(line) for line in lines]
    return [record for record in found if isinstance(record, dict)]


def _column(records: Sequence[Mapping[str, Any]], name: str) -> Column:
    values = (record.get(name) for record in records)
    numbers = (value if type(value) in (int, float) else np.nan for value in values)
    return np.fromiter(numbers, dtype=np.float64, count=len(records))
