"""A data set of parquet files as tables and batches of tables, for a notebook or a program of the user's own.

Buckets put tables of fragments together to a wanted size and cut batches from them, as fairseq2's bucketing does.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, groupby, islice
from operator import itemgetter
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, ValidationError, model_validator

from relayrun.config.sections import conditions
from relayrun.config.sections.base import Section
from relayrun.config.sections.data import DataSource, StreamSection
from relayrun.config.sections.plain import Positive
from relayrun.errors import ConfigError, InputError
from relayrun.tokens.order.prefetcher import Prefetcher
from relayrun.tokens.readers.columns import open_parquet
from relayrun.tokens.stores.urls import printable
from relayrun.tokens.streams.files import find_text_files
from relayrun.tokens.streams.fragments import Fragment, FragmentOrder
from relayrun.tokens.streams.row_filters import arrow_expression


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


_OF_STREAM = (
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
    """Give the rows of parquet files, fragment by fragment, as tables.

    Parameters
    ----------
    path: as in a mixture: folders, files, patterns, URLs.
    columns: names of columns, or new names with those in the files; None: all. `filters` know the names in the files.
    extra_columns: columns that keep their names.
    drop_null: leave out rows with a null in one of the columns.
    add_fragment_traces: add `__filename`, `__fragment_index` (the row group; -1: the whole file) and
        `__index_in_fragment`, by which a row can be found again.
    num_parallel_fragments: fragments that are read at a time, each by a thread; their order stays.
    cache_dir: a folder of files, deleted at once, through which tables are mapped into memory: what is not used of a
        large table can leave it again.
    rank, world_size: of `world_size` readers this one gets every fragment whose number is `rank` modulo `world_size`;
        with `files_circular_shift` a run of the files, as many as the others or one more.
    options: `split_to_row_groups`, `fragment_shuffle_window`, `files_circular_shift`, `seed`, `nb_epochs` (None: for
        ever), `partition_filters`, `filters`, `limit` and `nb_prefetch` as of `stream`; those of `Bucketing`.

    Raises ConfigError for an option that is wrong, InputError as a submit does.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"there is no rank {rank} of {world_size}")
    if num_parallel_fragments < 1:
        raise ConfigError(f"num_parallel_fragments is at least 1, not {num_parallel_fragments}")
    try:
        stream = StreamSection.model_validate({name: options.pop(name) for name in _OF_STREAM if name in options})
        bucketing = Bucketing.model_validate({"seed": stream.seed or 0, **options})
        paths = path if isinstance(path, str) else list(path)
        source = DataSource.model_validate({"path": paths, "weight": 1.0, "source": "parquet", "stream": stream})
    except ValidationError as error:
        first = error.errors()[0]
        words = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{'.'.join(map(str, first['loc'])) or 'options'}: {words}") from None
    named = columns if isinstance(columns, Mapping) else None if columns is None else {name: name for name in columns}
    if named is not None:
        named = {**named, **{name: name for name in extra_columns}}
    files = find_text_files(source, "streams.open")
    groups = world_size if stream.files_circular_shift else 1
    if groups > len(files):
        raise ConfigError(
            f"files_circular_shift gives each of {groups} readers files of its own, and {len(files)} files are there"
        )
    order = FragmentOrder(files, stream, name=_NAME, seed=stream.seed or 0, groups=groups)
    reader = _Reader(
        [file.path for file in files],
        named,
        stream,
        drop_null=drop_null,
        traces=add_fragment_traces,
        cache_dir=cache_dir,
    )
    epochs = count() if stream.nb_epochs is None else range(stream.nb_epochs)
    group = rank if stream.files_circular_shift else 0
    fragments = ((epoch, fragment) for epoch in epochs for fragment in order.epoch_fragments(epoch, group))
    mine = fragments if stream.files_circular_shift else islice(fragments, rank, None, world_size)
    tables = _ahead(_parallel(reader.table, mine, num_parallel_fragments), stream.nb_prefetch)
    return bucket_batches(tables, bucketing)


def _parallel(
    read: Callable[[Fragment], pa.Table], fragments: Iterator[tuple[int, Fragment]], number: int
) -> Iterator[tuple[int, pa.Table]]:
    """Epochs, and tables of their fragments, in their order; some are read at a time."""
    with ThreadPoolExecutor(number) as pool:
        waiting = deque((epoch, pool.submit(read, fragment)) for epoch, fragment in islice(fragments, number))
        while waiting:
            epoch, table = waiting.popleft()
            found = epoch, table.result()
            waiting.extend((after, pool.submit(read, fragment)) for after, fragment in islice(fragments, 1))
            yield found


def _ahead(tables: Iterator[tuple[int, pa.Table]], depth: int) -> Iterator[tuple[int, pa.Table]]:
    """Tables that are read ahead, until nobody wants any more."""
    ahead = Prefetcher(tables, depth, name=_NAME)
    try:
        yield from ahead
    finally:
        ahead.close()


class _Reader:
    """Fragments as tables."""

    def __init__(
        self,
        paths: Sequence[str],
        columns: Mapping[str, str] | None,
        stream: StreamSection,
        *,
        drop_null: bool,
        traces: bool,
        cache_dir: str | None,
    ) -> None:
        """`columns`: new names, with those in the files; None: all."""
        self._paths = paths
        self._columns = columns
        condition = None if stream.filters is None else conditions.parse_row_condition(stream.filters)
        self._filter = None if condition is None else arrow_expression(condition)
        self._looked_at = [] if condition is None else conditions.condition_columns(condition)
        self._drop_null = drop_null
        self._traces = traces
        self._cache_dir = cache_dir

    def table(self, fragment: Fragment) -> pa.Table:
        """Return the rows of a fragment."""
        path = self._paths[fragment.file]
        with open_parquet(path) as file:
            wanted = self._wanted(file.schema_arrow.names, path)
            groups = range(file.metadata.num_row_groups) if fragment.group is None else [fragment.group]
            # one thread: it may be one of many
            table = file.read_row_groups([*groups], wanted, use_threads=False).slice(0, fragment.rows)
        if self._traces or self._filter is not None:  # Arrow promises no order
            table = table.append_column("__index_in_fragment", pa.array(np.arange(len(table))))
        if self._filter is not None:
            table = table.filter(self._filter).sort_by("__index_in_fragment")
        if self._columns is not None:
            names = list(self._columns.values())
            kept = ["__index_in_fragment"] if self._traces else []
            table = table.select([*names, *kept]).rename_columns([*self._columns, *kept])
        elif not self._traces and self._filter is not None:
            table = table.drop_columns("__index_in_fragment")
        if self._traces:
            group = -1 if fragment.group is None else fragment.group
            table = table.append_column("__filename", pa.array([path] * len(table), pa.string()))
            table = table.append_column("__fragment_index", pa.array(np.full(len(table), group)))
        table = table.drop_null() if self._drop_null else table
        return table if self._cache_dir is None else _mapped(table, self._cache_dir)

    def _wanted(self, names: Sequence[str], path: str) -> list[str]:
        """The columns of a file that are read."""
        wanted = list(dict.fromkeys([*(names if self._columns is None else self._columns.values()), *self._looked_at]))
        if missing := [name for name in wanted if name not in names]:
            raise InputError(f"no column {missing[0]!r}; there are: {', '.join(names)}", where=printable(path))
        return wanted


def _mapped(table: pa.Table, folder: str) -> pa.Table:
    """The same table, in a file that is mapped and has no name any more."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".arrow") as file:
        with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return pa.ipc.open_file(pa.memory_map(file.name)).read_all()
