"""The rows of a fragment: its texts, and the columns that a filter looks at."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from relayrun.config import row_filter
from relayrun.config.streams import Stream
from relayrun.data.streams.conditions import compiled
from relayrun.data.streams.fragments import Fragment
from relayrun.errors import FatalTrainingError, InputError
from relayrun.shards.manifest import FileEntry
from relayrun.tokenization.readers import stores
from relayrun.tokenization.readers.columns import read_column
from relayrun.tokenization.readers.faults import LineFaults
from relayrun.tokenization.readers.formats import kind_of
from relayrun.tokenization.readers.rows import opened_parquet
from relayrun.tokenization.readers.rowtext import find_field, row_name, text_of, valid

TEXT = "__text"
"""The column of the text, whatever the files call it."""
_ROW = "__row"
_BATCH_BYTES = 4_000_000
_MOST_ROWS = 1024


class FragmentReader:
    """Reads fragments of the files of a stream, and says which of their rows are samples."""

    def __init__(self, files: Sequence[FileEntry], stream: Stream) -> None:
        self._files = files
        self._stream = stream
        condition = None if stream.filters is None else row_filter.parse(stream.filters)
        self._filter = None if condition is None else compiled(condition)
        looked_at = [] if condition is None else row_filter.columns(condition)
        self._columns = list(dict.fromkeys([*looked_at, *stream.extra_columns]))

    def read(self, fragment: Fragment, start: int) -> Iterator[pa.RecordBatch]:
        """The rows of a fragment from row `start` on: `TEXT` (large_string, may be null) and the filter's columns.

        Raises InputError for a file that is away, has changed or cannot be read, and naming a text that is not UTF-8.
        """
        entry = self._files[fragment.file]
        left = None if fragment.rows is None else fragment.rows - start
        if left is not None and left <= 0:
            return
        for batch in self._read(entry, fragment, start):
            yield batch.slice(0, left)
            if left is not None:
                left -= len(batch)
                if left <= 0:
                    return

    def keep(self, rows: pa.Table) -> npt.NDArray[np.int64]:
        """Numbers of the rows that are samples, rising, int64: those that no option of the stream leaves out.

        Raises FatalTrainingError for a text that is missing where none may be.
        """
        chosen = rows.append_column(_ROW, pa.array(np.arange(len(rows))))
        if self._filter is not None:
            chosen = chosen.filter(self._filter)
        texts = chosen[TEXT]
        if texts.null_count:
            if not self._stream.drop_null:
                raise FatalTrainingError(
                    f"a row has no text in the column {self._stream.column!r}", hint="set stream.drop_null=true"
                )
            chosen = chosen.filter(texts.is_valid())
        if self._stream.min_len or self._stream.max_len is not None:
            lengths = np.asarray(pc.utf8_length(chosen[TEXT]))
            fits = lengths >= self._stream.min_len
            if self._stream.max_len is not None:
                fits &= lengths <= self._stream.max_len
            chosen = chosen.filter(pa.array(fits))
        return np.sort(np.asarray(chosen[_ROW], np.int64))  # Arrow promises no order

    def texts(self, rows: pa.Table) -> tuple[pa.Array, npt.NDArray[np.int64]]:
        """The texts of a table that are trained on (large_string, without nulls), and the numbers of their rows.

        Raises FatalTrainingError as `keep`, and where a user's own function raises or returns no text.
        """
        kept = self.keep(rows)
        if self._stream.map is None:
            return rows[TEXT].take(pa.array(kept)).combine_chunks(), kept
        mapped = self._mapped
        given = rows.take(pa.array(kept)).select([TEXT, *self._stream.extra_columns])
        named = given.rename_columns([self._stream.column, *self._stream.extra_columns]).to_pylist()
        found = [mapped(row) for row in named]
        made = np.array([text is not None for text in found], np.bool_)
        return pa.array([text for text in found if text is not None], pa.large_string()), kept[made]

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

    def _read(self, entry: FileEntry, fragment: Fragment, start: int) -> Iterator[pa.RecordBatch]:
        path = entry.path
        size = stores.stat(path)[0] if stores.is_url(path) else os.path.getsize(path) if os.path.isfile(path) else None
        if size != entry.size:
            what = "is missing" if size is None else f"has {size:,} bytes, had {entry.size:,} when the run began"
            raise InputError(f"this file {what}", where=path, hint="put it back as it was")
        if kind_of(path) == "parquet":
            yield from self._parquet(path, fragment.group, start)
        else:
            yield from self._texts(path, start)

    def _texts(self, path: str, start: int) -> Iterator[pa.RecordBatch]:
        for array in read_column(path, self._stream.column, batch_bytes=_BATCH_BYTES):
            if start < len(array):
                yield pa.record_batch([array.slice(start).cast(pa.large_string())], [TEXT])
            start = max(0, start - len(array))

    def _parquet(self, path: str, group: int | None, start: int) -> Iterator[pa.RecordBatch]:
        with opened_parquet(path) as file:
            fields = find_field(file.schema_arrow, path, self._stream.column)
            wanted = [".".join(fields), *(name for name in self._columns if name != ".".join(fields))]
            for number in range(file.metadata.num_row_groups) if group is None else [group]:
                part = file.metadata.row_group(number)
                if start >= part.num_rows:
                    start -= part.num_rows
                    continue
                most = int(max(1, min(_MOST_ROWS, _BATCH_BYTES * part.num_rows / max(part.total_byte_size, 1))))
                first = 0
                # one thread: ranks share the cores already
                for batch in file.iter_batches(most, [number], wanted, use_threads=False):
                    if start < len(batch):
                        yield self._named(batch.slice(start), fields, path, number, first + start)
                    start = max(0, start - len(batch))
                    first += len(batch)

    def _named(self, batch: pa.RecordBatch, fields: list[str], path: str, group: int, first: int) -> pa.RecordBatch:
        texts = valid(text_of(batch, fields), LineFaults(), row_name(path, group, first))
        columns = {TEXT: texts.cast(pa.large_string())}
        columns |= {name: batch.column(batch.schema.get_field_index(name)) for name in self._columns}
        return pa.record_batch(columns)
