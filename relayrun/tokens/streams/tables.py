"""Parquet files as tables and batches of tables, for a notebook or a user's own program.

Buckets join the tables of fragments up to a target size and cut batches from them, as fairseq2's bucketing does.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import count, groupby, islice
from operator import itemgetter
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, ValidationError, model_validator

from relayrun.config.sections.base import Section
from relayrun.config.sections.conditions import Condition, condition_columns
from relayrun.config.sections.data import DataSource, StreamSection
from relayrun.config.sections.dataclass_section import Positive
from relayrun.errors import ConfigError
from relayrun.tokens.order.prefetcher import Prefetcher
from relayrun.tokens.readers.arrow_files import naming_row_group, open_parquet
from relayrun.tokens.readers.texts import TEXT_TYPES, missing_column_error
from relayrun.tokens.streams.files import find_text_files
from relayrun.tokens.streams.fragments import Fragment, FragmentOrder
from relayrun.tokens.streams.row_filters import arrow_expression, stream_filter


class Bucketing(Section):
    """The batches that are cut from fragments. Without a target, each fragment is a table."""

    target_table_size: Positive | None = None
    """Minimum rows of a table."""
    target_table_memory: Positive | None = None
    """Minimum megabytes (10^6) of a table in memory."""
    target_total_length: Positive | None = None
    """Minimum sum of the lengths of a table's rows; see `length_columns`."""
    length_columns: list[str] = Field(default_factory=list)
    """Columns of text (characters) or lists (items) whose lengths make a row's length; default: all such columns."""
    min_fragment_number: Positive = 1
    """Minimum fragments of a table."""
    max_fragment_number: Positive | None = None
    """Maximum fragments of a table."""
    combine_chunks: bool = True
    """Each column of a table is contiguous in memory."""
    shuffle: bool = False
    """Shuffle the rows of a table."""
    seed: int = 0
    """Seed of the shuffle."""
    batch_size: Positive | None = None
    """Rows of a batch; default: a table is one batch."""
    total_batch_length: Positive | None = None
    """Maximum sum of the lengths of a batch's rows, in place of `batch_size`."""
    order_by_length: bool = False
    """Sort the rows of a table from short to long, so that the rows of a batch have similar lengths."""
    drop_long_seq: bool = True
    """Skip rows longer than `total_batch_length`; otherwise each of them is a batch."""

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
    """Join `tables` (epochs and tables) of one epoch, and cut batches. Raises KeyError for a missing length column."""
    joined = (
        table
        for _, of_epoch in groupby(tables, key=itemgetter(0))
        for table in fill_buckets((table for _, table in of_epoch), bucketing)
    )
    for number, table in enumerate(joined):
        yield from _cut(table, bucketing, number)


def fill_buckets(tables: Iterable[pa.Table], bucketing: Bucketing) -> Iterator[pa.Table]:
    """Join tables until they reach the target."""
    megabytes = None if bucketing.target_table_memory is None else bucketing.target_table_memory * 1e6
    target = bucketing.target_table_size or bucketing.target_total_length or megabytes or 0
    waiting: list[pa.Table] = []
    size = 0
    for table in tables:
        waiting.append(table)
        if bucketing.target_total_length is not None:
            size += int(_row_lengths(table, bucketing.length_columns).sum())
        else:
            size += len(table) if megabytes is None else table.nbytes
        full = size >= target and len(waiting) >= bucketing.min_fragment_number
        if full or len(waiting) == bucketing.max_fragment_number:
            yield _joined(waiting, bucketing)
            waiting, size = [], 0
    if waiting:
        yield _joined(waiting, bucketing)


def _joined(tables: list[pa.Table], bucketing: Bucketing) -> pa.Table:
    table = pa.concat_tables(tables, promote_options="permissive")
    return table.combine_chunks() if bucketing.combine_chunks else table


def _row_lengths(table: pa.Table, columns: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the length of each row over these columns, or all of text or lists; int64 [rows]."""
    found = np.zeros(len(table), np.int64)
    for name in columns or table.schema.names:
        kind = table.schema.field(name).type
        if columns or kind in TEXT_TYPES or pa.types.is_list(kind) or pa.types.is_large_list(kind):
            measure = pc.utf8_length if kind in TEXT_TYPES else pc.list_value_length
            found += np.asarray(pc.fill_null(measure(table[name]), 0), np.int64)
    return found


def _cut(table: pa.Table, bucketing: Bucketing, number: int) -> Iterator[pa.Table]:
    order = np.arange(len(table))
    if bucketing.shuffle:
        np.random.default_rng([bucketing.seed, number]).shuffle(order)
    lengths = _row_lengths(table, bucketing.length_columns)
    if bucketing.order_by_length:
        order = order[np.argsort(lengths[order], kind="stable")]
    if bucketing.total_batch_length is not None:
        for rows in _rows_by_length(order, lengths, bucketing.total_batch_length, drop=bucketing.drop_long_seq):
            yield table.take(pa.array(rows))
        return
    if bucketing.shuffle or bucketing.order_by_length:
        table = table.take(pa.array(order))
    size = bucketing.batch_size or max(1, len(table))
    for first in range(0, len(table), size):
        yield table.slice(first, size)


def _rows_by_length(
    order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], most: int, *, drop: bool
) -> Iterator[list[int]]:
    """Yield the rows of each batch in `order`, as many as fit into a length of `most`."""
    rows: list[int] = []
    total = 0
    for row in order[lengths[order] <= most].tolist() if drop else order.tolist():
        length = int(lengths[row])
        if rows and total + length > most:
            yield rows
            rows, total = [], 0
        rows.append(row)
        total += length
    if rows:
        yield rows


_STREAM_OPTIONS = (
    "split_to_row_groups",
    "fragment_shuffle_window",
    "files_circular_shift",
    "seed",
    "nb_epochs",
    "partition_filters",
    "filters",
    "limit",
    "nb_prefetch",
)
_NAME = "tables"


def open_tables(
    path: str | Sequence[str],
    *,
    columns: Mapping[str, str] | Sequence[str] | None = None,
    extra_columns: Sequence[str] = (),
    drop_null: bool = True,
    add_fragment_traces: bool = False,
    num_parallel_fragments: int = 1,
    cache_dir: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    **options: Any,
) -> Iterator[pa.Table]:
    """Yield the rows of parquet files, fragment by fragment, as tables.

    Parameters
    ----------
    path: folders, files, patterns or URLs, as in a mixture.
    columns: names of columns, or their names in the files by new name; None: all. `filters` use the names in the files.
    extra_columns: columns that keep their names.
    drop_null: skip rows with a null in one of the columns.
    add_fragment_traces: add the columns `__filename`, `__fragment_index` (the row group; -1: the whole file) and
        `__index_in_fragment`.
    num_parallel_fragments: fragments that are read at a time, each by a thread; the order does not change.
    cache_dir: folder for files, deleted at once, that map tables into memory: the kernel can drop unused parts.
    rank, world_size: this reader gets every fragment whose number modulo `world_size` is `rank`; with
        `files_circular_shift`, a range of the files.
    options: `split_to_row_groups`, `fragment_shuffle_window`, `files_circular_shift`, `seed`, `nb_epochs` (None:
        endless), `partition_filters`, `filters`, `limit` and `nb_prefetch` as in `stream`; the fields of `Bucketing`.

    Raises ConfigError for a wrong option, InputError as a submit does.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"there is no rank {rank} of {world_size}")
    if num_parallel_fragments < 1:
        raise ConfigError(f"num_parallel_fragments is at least 1, not {num_parallel_fragments}")
    try:
        stream = StreamSection.model_validate({name: options.pop(name) for name in _STREAM_OPTIONS if name in options})
        bucketing = Bucketing.model_validate({"seed": stream.seed or 0, **options})
        paths = path if isinstance(path, str) else list(path)
        source = DataSource.model_validate({"path": paths, "weight": 1.0, "source": "parquet", "stream": stream})
    except ValidationError as error:
        first = error.errors()[0]
        words = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{'.'.join(map(str, first['loc'])) or 'options'}: {words}") from None
    named = None
    if columns is not None:
        named = {**(columns if isinstance(columns, Mapping) else {name: name for name in columns})}
        named |= {name: name for name in extra_columns}
    files = find_text_files(source, "streams.open")
    groups = world_size if stream.files_circular_shift else 1
    if groups > len(files):
        raise ConfigError(
            f"files_circular_shift gives each of {groups} readers files of its own, and {len(files)} files are there"
        )
    order = FragmentOrder(files, stream, name=_NAME, seed=stream.seed or 0, groups=groups)
    epochs = count() if stream.nb_epochs is None else range(stream.nb_epochs)
    group = rank if stream.files_circular_shift else 0
    fragments = ((epoch, fragment) for epoch in epochs for fragment in order.epoch_fragments(epoch, group))
    mine = fragments if stream.files_circular_shift else islice(fragments, rank, None, world_size)
    read = partial(
        _read_table,
        paths=[file.path for file in files],
        columns=named,
        condition=stream_filter(stream),
        drop_null=drop_null,
        traces=add_fragment_traces,
        cache_dir=cache_dir,
    )
    tables = _prefetched(_read_parallel(read, mine, num_parallel_fragments), stream.nb_prefetch)
    return bucket_batches(tables, bucketing)


def _read_parallel(
    read: Callable[[Fragment], pa.Table], fragments: Iterator[tuple[int, Fragment]], number: int
) -> Iterator[tuple[int, pa.Table]]:
    """Yield epochs, and tables of their fragments, in order; `number` fragments are read at a time."""
    started = ((epoch, Prefetcher(map(read, [fragment]), 1, name=_NAME)) for epoch, fragment in fragments)
    waiting = deque(islice(started, number))
    while waiting:
        epoch, table = waiting.popleft()
        found = epoch, next(table)
        waiting.extend(islice(started, 1))
        yield found


def _prefetched(tables: Iterator[tuple[int, pa.Table]], depth: int) -> Iterator[tuple[int, pa.Table]]:
    with closing(Prefetcher(tables, depth, name=_NAME)) as ahead:
        yield from ahead


def _read_table(
    fragment: Fragment,
    *,
    paths: Sequence[str],
    columns: Mapping[str, str] | None,
    condition: Condition | None,
    drop_null: bool,
    traces: bool,
    cache_dir: str | None,
) -> pa.Table:
    """Return the rows of a fragment. `columns`: names in the files by new name; None: all."""
    path, kept = paths[fragment.file], ["__index_in_fragment"] if traces else []
    with open_parquet(path) as file:
        known = file.schema_arrow.names
        names = known if columns is None else [*columns.values()]
        wanted = list(dict.fromkeys([*names, *condition_columns(condition)]))
        asked = wanted if columns is not None else condition_columns(condition)
        if missing := [name for name in asked if known.count(name) != 1]:
            raise missing_column_error(path, missing[0], known, hint=None)
        groups = range(file.metadata.num_row_groups) if fragment.group is None else [fragment.group]
        tables = [file.read_row_groups([], wanted)]  # of a file without rows
        for group in groups:
            with naming_row_group(path, group):  # one thread: this thread may be one of many
                tables.append(file.read_row_group(group, wanted, use_threads=False))
        table = pa.concat_tables(tables).slice(0, fragment.rows)
    table = table.append_column("__index_in_fragment", pa.array(np.arange(len(table))))
    if condition is not None:
        kept_rows = table.filter(arrow_expression(condition, table.schema))
        table = kept_rows.sort_by("__index_in_fragment")  # Arrow promises no order
    if columns is not None:
        table = table.select([*names, *kept]).rename_columns([*columns, *kept])
    elif not traces:
        table = table.drop_columns("__index_in_fragment")
    if traces:
        group = -1 if fragment.group is None else fragment.group
        table = table.append_column("__filename", pa.array([path] * len(table), pa.string()))
        table = table.append_column("__fragment_index", pa.array(np.full(len(table), group)))
    table = table.drop_null() if drop_null else table
    return table if cache_dir is None else _mapped(table, cache_dir)


def _mapped(table: pa.Table, folder: str) -> pa.Table:
    """Return the table in a memory-mapped file without a name."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".arrow") as file:
        with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return pa.ipc.open_file(pa.memory_map(file.name)).read_all()
