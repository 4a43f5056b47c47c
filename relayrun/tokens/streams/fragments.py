"""Fragments of a stream's files: their order in each epoch, and their rows.

A fragment is a row group of a parquet file, or a whole file. Each file of an epoch is dealt to one group of lanes. The
number of groups leaves each at least `MIN_FILES_PER_GROUP` files; with few files all lanes share all files. Groups do
not depend on the number of ranks. The order is a pure function of names, sizes and seed. Footers are read when an epoch
reaches their file; a shuffle over all fragments (`fragment_shuffle_window: -1`) needs all footers first.
"""

from __future__ import annotations

import logging
import pkgutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relayrun.config.sections.conditions import condition_columns
from relayrun.config.sections.data import StreamSection
from relayrun.errors import FatalTrainingError, InputError
from relayrun.tokens.order.permutation import Permutation, permutation_key
from relayrun.tokens.readers.arrow_files import open_parquet, read_batches
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.inputs import PARQUET, file_format
from relayrun.tokens.readers.texts import (
    MAX_ROWS,
    as_large_strings,
    find_field,
    keep_utf8,
    large_strings,
    missing_column_error,
    text_array,
)
from relayrun.tokens.shards.manifest import TextFileEntry
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.direct_io import file_checksum
from relayrun.tokens.stores.urls import MissingInput
from relayrun.tokens.streams.row_filters import (
    FILTER_REASON,
    RowFaults,
    arrow_expression,
    is_content_fault,
    stream_filter,
)

MIN_FILES_PER_GROUP = 8
"""Minimum files of a group of lanes, if there are several groups. Part of the order."""
_FOOTERS_READ_AT_ONCE = 16


@dataclass(frozen=True)
class Fragment:
    """A piece of a file that is read at once."""

    file: int
    """Number of the file in the manifest."""
    group: int | None
    """Number of the row group; None: the whole file."""
    rows: int | None = None
    """Number of leading rows to read; None: all."""


def group_count(files: int, lanes: int) -> int:
    """Return the number of groups for the given files and lanes, a divisor of `lanes`."""
    most = max(1, files // MIN_FILES_PER_GROUP)
    return max(groups for groups in range(1, min(lanes, most) + 1) if lanes % groups == 0)


class FragmentOrder:
    """The order of fragments in each epoch for each group of lanes."""

    def __init__(
        self, files: Sequence[TextFileEntry], stream: StreamSection, *, name: str, seed: int, groups: int
    ) -> None:
        self.files = files
        self.groups = groups
        self._stream = stream
        self._name = name
        self._seed = seed
        self._file_fragments = lru_cache(None)(self._fragments_of)
        self._all = lru_cache(1)(self._every_fragment)
        self._lock = threading.Lock()

    def epoch_fragments(self, epoch: int, group: int) -> Iterator[Fragment]:
        """Yield the fragments of a group in their order. Raises InputError for a file that cannot be opened."""
        window = self._stream.fragment_shuffle_window
        if window == -1:
            yield from self._all_shuffled(epoch, group)
            return
        count = len(self.files)
        files = range(count) if window == 0 else self._permutation(count, "files", epoch)
        fragments = (fragment for file in self._share(files, group) for fragment in self._file_fragments(file))
        if window < 2:
            yield from fragments
            return
        chunk = 0
        while together := [*islice(fragments, window)]:
            order = self._permutation(len(together), f"{group}/{chunk}", epoch)
            yield from (together[i] for i in order)
            chunk += 1

    def _share(self, numbers: Sequence[int], group: int) -> Sequence[int]:
        if self._stream.files_circular_shift:
            count = len(numbers)
            return numbers[group * count // self.groups : (group + 1) * count // self.groups]
        return numbers[group :: self.groups]

    def _all_shuffled(self, epoch: int, group: int) -> Iterator[Fragment]:
        with self._lock:  # each group has a thread
            every = self._all()
        for number in self._share(self._permutation(len(every), "fragments", epoch), group):
            file, fragment = every[number].tolist()
            yield self._file_fragments(file)[fragment]

    def _every_fragment(self) -> npt.NDArray[np.int64]:
        """Return file and fragment number in the file of all fragments, int64 [fragments, 2]."""
        with ThreadPoolExecutor(_FOOTERS_READ_AT_ONCE) as pool:
            counts = np.array([*map(len, pool.map(self._file_fragments, range(len(self.files))))])
        files = np.repeat(np.arange(len(counts)), counts)
        return np.stack([files, np.arange(len(files)) - np.repeat(np.cumsum(counts) - counts, counts)], axis=1)

    def _permutation(self, count: int, what: str, epoch: int) -> list[int]:
        """Return a permutation of range(count) for `what` and epoch."""
        key = permutation_key(self._seed, f"{self._name}/{what}", epoch)
        return list(Permutation(count, key).map(np.arange(count)).tolist()) if count else []

    def _fragments_of(self, number: int) -> list[Fragment]:
        entry = self.files[number]
        if file_format(entry.path) is not PARQUET or not self._stream.split_to_row_groups:
            return [Fragment(number, None, entry.rows)]
        try:
            with open_parquet(entry.path) as file:
                sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        except InputError as error:
            if self._stream.on_error == "fail" or not is_content_fault(error):
                raise
            return [Fragment(number, None)]  # `why_left_out` skips this file
        found, left = [], entry.rows
        for group, rows in enumerate(sizes[: entry.fragments]):
            if left is None:
                found.append(Fragment(number, group))
            elif left > 0:
                found.append(Fragment(number, group, left if left < rows else None))
                left -= rows
        return found


log = logging.getLogger(__name__)

TEXT_COLUMN = "__text"
"""Column of the text in the batches of `FragmentReader`, independent of its name in the files."""
_REASON_COLUMN = "__reason"
_ROW_COLUMN = "__row"
_READ_BATCH_BYTES = 4_000_000
_ALL_ROWS = 1 << 62


class FragmentReader:
    """Reads fragments of the files of a stream and selects the rows for training."""

    def __init__(self, files: Sequence[TextFileEntry], stream: StreamSection) -> None:
        self._files = files
        self._stream = stream
        self._condition = stream_filter(stream)
        self._by_line = any(file_format(file.path).by_line for file in files)
        """True if the condition is checked while lines are parsed, not on tables."""
        self._filter = None if self._by_line else self._condition
        columns = dict.fromkeys([*condition_columns(self._condition), *stream.extra_columns])
        self._columns = [] if self._by_line else [*columns]
        self._left_out: dict[int, str | None] = {}
        self._same: dict[str, int] = {}
        """Latest time of change of files with verified content, by path."""

    def read(self, fragment: Fragment, start: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of a fragment from row `start` on: `TEXT_COLUMN` (large_string, nullable), the reason why a row
        is skipped while reading (null: kept), and the columns for filter and map.

        Raises InputError for a missing or changed file and, unless `stream.on_error` covers it, for an unreadable file
        or a text that is not UTF-8.
        """
        entry = self._files[fragment.file]
        self._check(entry)
        left = _ALL_ROWS if fragment.rows is None else fragment.rows - start
        batches = self._read(entry, fragment, start)
        while left > 0 and (batch := next(batches, None)) is not None:
            yield batch.slice(0, left)
            left -= len(batch)

    def why_left_out(self, number: int) -> str | None:
        """Return why a whole file is left out; None: it is read. The first call for a file reads it to its end. Raises
        InputError for a missing or changed file, and StoreError for a store that does not answer."""
        if self._stream.on_error == "fail":
            return None
        if number not in self._left_out:
            entry = self._files[number]
            self._check(entry)
            self._left_out[number] = None
            try:
                for _ in self._read(entry, Fragment(number, None), 0):
                    pass
            except InputError as error:
                if not is_content_fault(error):
                    raise
                log.warning("a file is left out of its stream: %s: %s", error.where, error.message)
                self._left_out[number] = error.message
        return self._left_out[number]

    def keep(self, rows: pa.Table) -> tuple[npt.NDArray[np.int64], Counter[str]]:
        """Return the indices of rows to train on (ascending int64), and the number of skipped rows by reason. Raises
        FatalTrainingError for a missing text without `drop_null`, and for columns that the filter does not fit."""
        reasons, texts = rows[_REASON_COLUMN], rows[TEXT_COLUMN]
        found = Counter[str](reasons.drop_null().to_pylist() if reasons.null_count < len(rows) else ())
        chosen = np.arange(len(rows))
        if found:
            chosen = chosen[np.asarray(reasons.is_null(), np.bool_)]
        if self._filter is not None and len(chosen):
            asked = rows.select(self._columns).append_column(_ROW_COLUMN, integers_to_arrow(np.arange(len(rows))))
            try:
                condition = arrow_expression(self._filter, asked.schema)
                kept = asked.take(integers_to_arrow(chosen)).filter(condition)[_ROW_COLUMN]
            except (pa.ArrowException, OverflowError) as error:
                raise FatalTrainingError(
                    f"stream.filters does not fit the columns of some files: {str(error).splitlines()[0]}",
                    hint="write the columns alike in all files, or mend the filter",
                ) from None
            found[FILTER_REASON] += len(chosen) - len(kept)
            chosen = np.sort(np.asarray(kept, np.int64))  # Arrow does not promise an order
        if texts.null_count:
            there = np.asarray(texts.is_valid(), np.bool_)[chosen]
            if not self._stream.drop_null and not there.all():
                raise FatalTrainingError(
                    f"a row has no text in the column {self._stream.column!r}", hint="set stream.drop_null=true"
                )
            found["no text"] += int((~there).sum())
            chosen = chosen[there]
        if self._stream.min_len or self._stream.max_len is not None:
            import pyarrow.compute as pc

            lengths = np.asarray(pc.fill_null(pc.utf8_length(texts), 0))[chosen]
            fits = lengths >= self._stream.min_len
            if self._stream.max_len is not None:
                fits &= lengths <= self._stream.max_len
            found["min_len, max_len"] += int((~fits).sum())
            chosen = chosen[fits]
        return chosen, found

    def texts(self, rows: pa.Table) -> tuple[pa.ChunkedArray, npt.NDArray[np.int64], Counter[str]]:
        """Return the texts to train on (large_string, without nulls), their row indices, and skipped rows by reason.
        Raises FatalTrainingError like `keep`, if the user's `stream.map` raises, and if it returns no text."""
        kept, left_out = self.keep(rows)
        if self._stream.map is None or not len(kept):
            texts = rows[TEXT_COLUMN] if len(kept) == len(rows) else rows[TEXT_COLUMN].take(integers_to_arrow(kept))
            return texts, kept, left_out
        mapped = self._mapped
        given = rows.take(integers_to_arrow(kept)).select([TEXT_COLUMN, *self._stream.extra_columns])
        named = given.rename_columns([self._stream.column, *self._stream.extra_columns]).to_pylist()
        found = [mapped(row) for row in named]
        made = np.array([text is not None for text in found], np.bool_)
        left_out["stream.map"] += int((~made).sum())
        texts = large_strings([text for text in found if text is not None])
        return pa.chunked_array([texts]), kept[made], left_out

    @cached_property
    def _mapped(self) -> Callable[[dict[str, Any]], str | None]:
        """Return the user's `stream.map` with checks of its result."""
        path = self._stream.map
        assert path is not None
        try:
            function = pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            raise FatalTrainingError(
                f"stream.map {path!r} cannot be imported: {error}", hint="put its folder on PYTHONPATH of the ranks"
            ) from None

        def call(row: dict[str, Any]) -> str | None:
            try:
                text = function(row)
                if text is None or (isinstance(text, str) and text.encode() is not None):
                    return text
                what = f"returned {type(text).__name__}, and no text"
            except Exception as error:
                what = f"raised {type(error).__name__}: {error}"
            raise FatalTrainingError(f"stream.map {path!r} {what}, for the row that begins {str(row)[:80]!r}")

        return call

    def _check(self, entry: TextFileEntry) -> None:
        path, what = entry.path, None
        try:
            size, changed = urls.stat_file(path)
            if size != entry.size:
                what = f"has {size:,} bytes, had {entry.size:,} when the run began"
            elif 0 not in (changed, entry.changed) and changed not in (entry.changed, self._same.get(path)):
                if entry.content and not urls.is_url(path) and file_checksum(path) == entry.content:
                    self._same[path] = changed
                else:
                    what = f"was changed: {entry.other_time()}"
        except MissingInput:
            what = "is missing"
        if what is not None:
            raise InputError(f"this file {what}", where=path, hint="put it back as it was")

    def _read(self, entry: TextFileEntry, fragment: Fragment, start: int) -> Iterator[pa.RecordBatch]:
        faults = RowFaults(self._condition if self._by_line else None, skip=self._stream.on_error == "skip-line")
        if file_format(entry.path) is PARQUET:
            yield from self._parquet(entry.path, fragment.group, start, faults)
            return
        for array in read_column(entry.path, self._stream.column, batch_bytes=_READ_BATCH_BYTES, faults=faults):
            reasons = _fault_reasons(len(array), faults)
            if start < len(array):
                texts = as_large_strings(array.slice(start))
                yield pa.record_batch([texts, reasons.slice(start)], [TEXT_COLUMN, _REASON_COLUMN])
            start = max(0, start - len(array))

    def _parquet(self, path: str, group: int | None, start: int, faults: RowFaults) -> Iterator[pa.RecordBatch]:
        def rows_at_once(part: Any) -> float:
            return float(min(MAX_ROWS, _READ_BATCH_BYTES * part.num_rows / max(part.total_byte_size, 1)))

        def take(batch: pa.RecordBatch, where: Callable[[int], str]) -> pa.RecordBatch:
            texts = keep_utf8(text_array(batch, fields), faults, where)
            columns = {TEXT_COLUMN: as_large_strings(texts), _REASON_COLUMN: _fault_reasons(len(batch), faults)}
            columns |= {name: batch.column(batch.schema.get_field_index(name)) for name in self._columns}
            return pa.record_batch(columns)

        with open_parquet(path) as file:
            fields = find_field(file.schema_arrow, path, self._stream.column)
            if missing := [name for name in self._columns if file.schema_arrow.names.count(name) != 1]:
                raise missing_column_error(path, missing[0], file.schema_arrow.names, hint=None)
            wanted = dict.fromkeys([".".join(fields), *self._columns])
            groups = range(file.metadata.num_row_groups) if group is None else [group]
            yield from read_batches(file, path, groups, [*wanted], rows_at_once, take, start)


def integers_to_arrow(numbers: npt.NDArray[np.int64]) -> pa.Array:
    """Return an Arrow array without a copy. `pa.array` would import pandas, which takes half a second."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


def _fault_reasons(rows: int, faults: RowFaults) -> pa.Array:
    """Return the reasons for skipping rows of the last array that was read; null: kept."""
    marks, faults.marks = faults.marks, {}
    return pa.array([marks.get(row) for row in range(rows)], pa.string()) if marks else pa.nulls(rows, pa.string())
