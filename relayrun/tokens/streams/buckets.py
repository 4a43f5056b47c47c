"""Tables of fragments put together into tables of a wanted size, and these into batches: fairseq2's bucketing.

A table is closed when it has reached its target and has at least `min_fragment_number` fragments, or when it has
`max_fragment_number`. What is left at the end of an epoch is a table too: no shuffle mixes rows of two epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from relayrun.config.sections.base import Positive, Section


class Bucketing(Section):
    """How tables of fragments become batches. Without any target each fragment is a table."""

    target_table_size: Positive | None = None
    """Rows of a table, at least."""
    target_table_memory: Positive | None = None
    """Megabytes (10^6) of a table in memory, at least."""
    target_total_length: Positive | None = None
    """Sum of the lengths of a table's rows, at least; see `length_columns`."""
    length_columns: list[str] = Field(default_factory=list)
    """Columns of text (in characters) or lists (in items) whose lengths make a row's; default: all such columns."""
    min_fragment_number: Positive = 1
    """Fragments of a table, at least."""
    max_fragment_number: Positive | None = None
    """Fragments of a table, at most."""
    combine_chunks: bool = True
    """The columns of a table become one piece of memory each."""
    shuffle: bool = False
    """The rows of a table are shuffled."""
    seed: int = 0
    """Seed of the shuffle."""
    batch_size: Positive | None = None
    """Rows of a batch; default: a table is one batch."""
    total_batch_length: Positive | None = None
    """A batch has rows of this length together, at most, in place of a number of rows."""
    order_by_length: bool = False
    """The rows of a table come from short to long, so that a batch has rows of like length."""
    drop_long_seq: bool = True
    """Rows that are longer than `total_batch_length` are left out; else each is a batch."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        targets = [name for name in type(self).model_fields if name.startswith("target_") and getattr(self, name)]
        if len(targets) > 1:
            raise ValueError(f"{' and '.join(targets)} are two sizes of one table; give one of them")
        if self.batch_size is not None and self.total_batch_length is not None:
            raise ValueError("batch_size and total_batch_length are two sizes of one batch; give one of them")
        if self.max_fragment_number is not None and self.max_fragment_number < self.min_fragment_number:
            raise ValueError("max_fragment_number is below min_fragment_number")
        return self


def bucket_batches(tables: Iterable[tuple[int, pa.Table]], bucketing: Bucketing) -> Iterator[pa.Table]:
    """Put tables, that come with their epochs, together and cut them into batches.

    Raises KeyError for a length column that is not there.
    """
    together = (
        table
        for _, of_epoch in groupby(tables, key=itemgetter(0))
        for table in fill_buckets((table for _, table in of_epoch), bucketing)
    )
    for number, table in enumerate(together):
        yield from _cut(table, bucketing, number)


def fill_buckets(tables: Iterable[pa.Table], bucketing: Bucketing) -> Iterator[pa.Table]:
    """Put tables together until they have reached the target."""
    together: list[pa.Table] = []
    cost = 0.0
    for table in tables:
        together.append(table)
        cost += _cost(table, bucketing)
        reached = cost >= _target(bucketing) and len(together) >= bucketing.min_fragment_number
        if reached or len(together) == bucketing.max_fragment_number:
            yield _joined(together, bucketing)
            together, cost = [], 0.0
    if together:
        yield _joined(together, bucketing)


def row_lengths(table: pa.Table, columns: Sequence[str]) -> npt.NDArray[np.int64]:
    """Length of each row, int64 [rows]: over these columns, or all of text or lists."""
    found = np.zeros(len(table), np.int64)
    for name in columns or [field.name for field in table.schema if _has_length(field.type)]:
        kind = table.schema.field(name).type
        measure = pc.utf8_length if pa.types.is_string(kind) or pa.types.is_large_string(kind) else pc.list_value_length
        found += np.asarray(pc.fill_null(measure(table[name]), 0), np.int64)
    return found


def _has_length(kind: pa.DataType) -> bool:
    of_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(of_text or pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _target(bucketing: Bucketing) -> float:
    megabytes = None if bucketing.target_table_memory is None else bucketing.target_table_memory * 1e6
    return bucketing.target_table_size or bucketing.target_total_length or megabytes or 0


def _cost(table: pa.Table, bucketing: Bucketing) -> float:
    if bucketing.target_total_length is not None:
        return float(row_lengths(table, bucketing.length_columns).sum())
    return float(table.nbytes if bucketing.target_table_memory is not None else len(table))


def _joined(tables: list[pa.Table], bucketing: Bucketing) -> pa.Table:
    table = pa.concat_tables(tables, promote_options="permissive")
    return table.combine_chunks() if bucketing.combine_chunks else table


def _cut(table: pa.Table, bucketing: Bucketing, number: int) -> Iterator[pa.Table]:
    order = np.arange(len(table))
    if bucketing.shuffle:
        np.random.default_rng([bucketing.seed, number]).shuffle(order)
    lengths = row_lengths(table, bucketing.length_columns)
    if bucketing.order_by_length:
        order = order[np.argsort(lengths[order], kind="stable")]
    if bucketing.total_batch_length is not None:
        for rows in _by_length(order, lengths, bucketing.total_batch_length, drop=bucketing.drop_long_seq):
            yield table.take(pa.array(rows))
        return
    if bucketing.shuffle or bucketing.order_by_length:
        table = table.take(pa.array(order))
    size = bucketing.batch_size or max(1, len(table))
    for first in range(0, len(table), size):
        yield table.slice(first, size)


def _by_length(
    order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], most: int, *, drop: bool
) -> Iterator[list[int]]:
    """Rows of each batch: as many as fit, in order."""
    rows: list[int] = []
    total = 0
    for row in order.tolist():
        length = int(lengths[row])
        if length > most and drop:
            continue
        if rows and total + length > most:
            yield rows
            rows, total = [], 0
        rows.append(row)
        total += length
    if rows:
        yield rows
