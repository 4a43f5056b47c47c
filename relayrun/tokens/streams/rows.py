"""The rows of a fragment: its texts, and the columns that a filter looks at."""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from relayrun.config.sections import row_filter
from relayrun.config.sections.streams import StreamSection
from relayrun.errors import FatalTrainingError, InputError
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.formats import file_kind
from relayrun.tokens.readers.rows import open_parquet
from relayrun.tokens.readers.rowtext import find_field, keep_utf8, row_namer, text_array
from relayrun.tokens.readers.texts import large_strings
from relayrun.tokens.shards.manifest import FileEntry
from relayrun.tokens.stores import stores
from relayrun.tokens.stores.checksum import file_checksum
from relayrun.tokens.stores.stores import MissingInput
from relayrun.tokens.streams.conditions import arrow_expression
from relayrun.tokens.streams.faults import FILTER_REASON, RowFaults, is_content_fault
from relayrun.tokens.streams.fragments import Fragment

log = logging.getLogger(__name__)

TEXT_COLUMN = "__text"
"""The column of the text, whatever the files call it."""
_REASON_COLUMN = "__reason"
_ROW_COLUMN = "__row"
_READ_BATCH_BYTES = 4_000_000
_MAX_BATCH_ROWS = 1024


class FragmentReader:
    """Reads fragments of the files of a stream, and says which of their rows are samples."""

    def __init__(self, files: Sequence[FileEntry], stream: StreamSection) -> None:
        self._files = files
        self._stream = stream
        self._condition = None if stream.filters is None else row_filter.parse_row_condition(stream.filters)
        self._by_line = any(file_kind(file.path) == "json lines" for file in files)
        """Whether the condition is asked of each line as it is read, and not of tables."""
        self._filter = None if self._condition is None or self._by_line else arrow_expression(self._condition)
        looked_at = [] if self._condition is None else row_filter.condition_columns(self._condition)
        self._columns = [] if self._by_line else list(dict.fromkeys([*looked_at, *stream.extra_columns]))
        self._left_out: dict[int, str | None] = {}
        self._same: dict[str, int] = {}
        """Times of change at which files were found to hold what they held, by path."""
        # `Schema.empty_table` would import pandas
        self.no_rows = pa.Table.from_batches(
            [], pa.schema([(TEXT_COLUMN, pa.large_string()), (_REASON_COLUMN, pa.string())])
        )
        """A table without a row, of which `texts` makes no text."""

    def read(self, fragment: Fragment, start: int) -> Iterator[pa.RecordBatch]:
        """The rows of a fragment from row `start` on: `TEXT` (large_string, may be null), why a row is left out as it
        is read (null: it is not), and the columns of filter and map.

        Raises InputError for a file that is away or has changed, and, where `stream.on_error` does not leave it out,
        for one that cannot be read, and naming a text that is not UTF-8.
        """
        entry = self._files[fragment.file]
        self._check(entry)
        left = None if fragment.rows is None else fragment.rows - start
        if left is not None and left <= 0:
            return
        for batch in self._read(entry, fragment, start):
            yield batch.slice(0, left)
            if left is not None:
                left -= len(batch)
                if left <= 0:
                    return

    def why_left_out(self, number: int) -> str | None:
        """Why a file is left out whole; None: it is read. Looked at once, for which it is read to its end.

        Raises InputError for a file that is away or has changed, and StoreError for a store that does not answer.
        """
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
        """Numbers of the rows that are samples, rising, int64, and how many of the others there are by reason.

        No text is copied. Raises FatalTrainingError for a text that is missing where none may be, and for columns that
        the filter does not fit.
        """
        reasons, texts = rows[_REASON_COLUMN], rows[TEXT_COLUMN]
        found: Counter[str] = Counter(reasons.drop_null().to_pylist())
        chosen = np.arange(len(rows))
        if found:
            chosen = chosen[_arrow_bools(reasons.is_null())]
        if self._filter is not None and len(chosen):
            asked = rows.select(self._columns).append_column(_ROW_COLUMN, arrow_integers(np.arange(len(rows))))
            try:
                kept = asked.take(arrow_integers(chosen)).filter(self._filter)[_ROW_COLUMN]
            except pa.ArrowException as error:
                raise FatalTrainingError(
                    f"stream.filters does not fit the columns of some files: {str(error).splitlines()[0]}",
                    hint="write the columns alike in all files, or mend the filter",
                ) from None
            found[FILTER_REASON] += len(chosen) - len(kept)
            chosen = np.sort(np.asarray(kept, np.int64))  # Arrow promises no order
        if texts.null_count:
            there = _arrow_bools(texts.is_valid())[chosen]
            if not self._stream.drop_null and not there.all():
                raise FatalTrainingError(
                    f"a row has no text in the column {self._stream.column!r}", hint="set stream.drop_null=true"
                )
            found["no text"] += int((~there).sum())
            chosen = chosen[there]
        if self._stream.min_len or self._stream.max_len is not None:
            lengths = np.asarray(pc.fill_null(pc.utf8_length(texts), 0))[chosen]
            fits = lengths >= self._stream.min_len
            if self._stream.max_len is not None:
                fits &= lengths <= self._stream.max_len
            found["min_len, max_len"] += int((~fits).sum())
            chosen = chosen[fits]
        return chosen, found

    def texts(self, rows: pa.Table) -> tuple[pa.Array, npt.NDArray[np.int64], Counter[str]]:
        """The texts of a table that are trained on (large_string, without nulls), and the numbers of their rows; and
        how many of the others there are by reason.

        Raises FatalTrainingError as `keep`, and where a user's own function raises or returns no text.
        """
        kept, left_out = self.keep(rows)
        if self._stream.map is None or not len(kept):
            texts = rows[TEXT_COLUMN] if len(kept) == len(rows) else rows[TEXT_COLUMN].take(arrow_integers(kept))
            return texts.combine_chunks(), kept, left_out
        mapped = self._mapped
        given = rows.take(arrow_integers(kept)).select([TEXT_COLUMN, *self._stream.extra_columns])
        named = given.rename_columns([self._stream.column, *self._stream.extra_columns]).to_pylist()
        found = [mapped(row) for row in named]
        made = np.array([text is not None for text in found], np.bool_)
        left_out["stream.map"] += int((~made).sum())
        return large_strings([text for text in found if text is not None]), kept[made], left_out

    @cached_property
    def _mapped(self) -> Callable[[dict[str, Any]], str | None]:
        """What a user's own function makes of a row."""
        path = self._stream.map
        assert path is not None
        module, _, name = path.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
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

    def _check(self, entry: FileEntry) -> None:
        """Raise InputError for a file that is not what it was."""
        path, local = entry.path, not stores.is_url(entry.path)
        what = None
        try:
            size, changed = _local_path(path) if local else stores.stat_url(path)
            if size != entry.size:
                what = f"has {size:,} bytes, had {entry.size:,} when the run began"
            elif 0 not in (changed, entry.changed) and changed not in (entry.changed, self._same.get(path)):
                if local and entry.content and file_checksum(path) == entry.content:
                    self._same[path] = changed
                else:
                    what = f"was changed: {entry.other_time()}"
        except (MissingInput, FileNotFoundError, NotADirectoryError):
            what = "is missing"
        if what is not None:
            raise InputError(f"this file {what}", where=path, hint="put it back as it was")

    def _read(self, entry: FileEntry, fragment: Fragment, start: int) -> Iterator[pa.RecordBatch]:
        faults = RowFaults(self._condition if self._by_line else None, skip=self._stream.on_error == "skip-line")
        if file_kind(entry.path) == "parquet":
            yield from self._parquet(entry.path, fragment.group, start, faults)
        else:
            yield from self._texts(entry.path, start, faults)

    def _texts(self, path: str, start: int, faults: RowFaults) -> Iterator[pa.RecordBatch]:
        for array in read_column(path, self._stream.column, batch_bytes=_READ_BATCH_BYTES, faults=faults):
            reasons = _fault_reasons(len(array), faults)
            if start < len(array):
                texts = array.slice(start).cast(pa.large_string())
                yield pa.record_batch([texts, reasons.slice(start)], [TEXT_COLUMN, _REASON_COLUMN])
            start = max(0, start - len(array))

    def _parquet(self, path: str, group: int | None, start: int, faults: RowFaults) -> Iterator[pa.RecordBatch]:
        with open_parquet(path) as file:
            fields = find_field(file.schema_arrow, path, self._stream.column)
            if missing := [name for name in self._columns if name not in file.schema_arrow.names]:
                raise InputError(
                    f"no column {missing[0]!r}; there are: {', '.join(file.schema_arrow.names)}", where=path
                )
            wanted = [".".join(fields), *(name for name in self._columns if name != ".".join(fields))]
            for number in range(file.metadata.num_row_groups) if group is None else [group]:
                part = file.metadata.row_group(number)
                if start >= part.num_rows:
                    start -= part.num_rows
                    continue
                most = int(
                    max(1, min(_MAX_BATCH_ROWS, _READ_BATCH_BYTES * part.num_rows / max(part.total_byte_size, 1)))
                )
                first = 0
                # one thread: ranks share the cores already
                for batch in file.iter_batches(most, [number], wanted, use_threads=False):
                    if start < len(batch):
                        yield self._named(batch.slice(start), fields, row_namer(path, number, first + start), faults)
                    start = max(0, start - len(batch))
                    first += len(batch)

    def _named(
        self, batch: pa.RecordBatch, fields: list[str], where: Callable[[int], str], faults: RowFaults
    ) -> pa.RecordBatch:
        texts = keep_utf8(text_array(batch, fields), faults, where)
        columns = {TEXT_COLUMN: texts.cast(pa.large_string()), _REASON_COLUMN: _fault_reasons(len(batch), faults)}
        columns |= {name: batch.column(batch.schema.get_field_index(name)) for name in self._columns}
        return pa.record_batch(columns)


def arrow_integers(numbers: npt.NDArray[np.int64]) -> pa.Array:
    """The same integers for Arrow, not copied. `pa.array` would import pandas, which takes half a second."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


def _arrow_bools(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    return np.asarray(column, np.bool_)


def _local_path(path: str) -> tuple[int, int]:
    """Bytes of a file, and when it was changed last, in ns."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _fault_reasons(rows: int, faults: RowFaults) -> pa.Array:
    """Why each row of the array that was read last is left out; null: it is not."""
    marks = dict(faults.take_marks())
    return pa.array([marks.get(row) for row in range(rows)], pa.string()) if marks else pa.nulls(rows, pa.string())
