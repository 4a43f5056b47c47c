"""A datatrove reader that takes file names literally.

datatrove's own readers go through fsspec, which gives `::`, `*`, blanks at the ends of a line and
undecodable bytes a meaning of their own. Here a name is opened as it stands. Rows keep their order, and
task r of n reads files r, r + n, r + 2n, ... as datatrove's readers do.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from relayrun.errors import InputError
from relayrun.tokenization.metadata import printable

ROWS_PER_BATCH = 256
"""Rows that are decoded at a time: bounds memory where documents are long."""


class LiteralPathsReader(PipelineStep):  # type: ignore[misc]  # datatrove is untyped
    """Yields the documents of parquet and jsonl(.gz, .zst) files; drops null documents and counts them.

    `files` are paths below `folder`, `column` is the name of the text column (parquet) or key (jsonl).
    Raises InputError naming the file if it is missing, torn, or has no such column of text.
    """

    name = "Literal paths"
    type = "Reader"

    def __init__(self, folder: str, files: Sequence[str], column: str = "text") -> None:
        super().__init__()
        self.folder = folder
        self.files = list(files)
        self.column = column

    def run(self, data: Iterator[Document] | None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        if data:
            yield from data
        for file in self.files[rank::world_size]:
            path = os.path.join(self.folder, file)
            nulls = 0
            for row, text in enumerate(read_texts(path, self.column)):
                if text is None:
                    nulls += 1
                else:
                    yield Document(text=text, id=f"{file}/{row}")
            self.stat_update("files")
            if nulls:
                self.stat_update("null documents", value=nulls, unit="file")


def read_texts(path: str, column: str) -> Iterator[str | None]:
    """The text of every row of a file, in order; None for a null. The kind of file is known by its suffix."""
    name = path.lower()
    try:
        if name.endswith(".parquet"):
            yield from _read_parquet(path, column)
        else:
            compression = "gzip" if name.endswith(".gz") else "zstd" if name.endswith(".zst") else None
            yield from _read_jsonl(path, column, compression)
    except FileNotFoundError:
        raise InputError("this file of the dump is missing", where=printable(path),
                         hint="run prepare_dumps.py again if the dataset has changed") from None  # fmt: skip
    except (pa.ArrowException, OSError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise InputError(f"cannot be read, it may be torn: {lines[0]}", where=printable(path),
                         hint="fetch the file again, then run again: what is done is kept") from None  # fmt: skip


def _read_parquet(path: str, column: str) -> Iterator[str | None]:
    with open(path, "rb") as raw, pq.ParquetFile(raw) as file:
        schema = file.schema_arrow
        if column not in schema.names:
            raise _no_column(path, column, schema.names)
        kind = schema.field(column).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
            raise InputError(f"column {column!r} holds {kind}, not text", where=printable(path))
        # one thread: the workers share the cores already
        for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=[column], use_threads=False):
            for value in batch.column(column):  # one by one: a list would hold every text twice
                yield value.as_py()


def _read_jsonl(path: str, column: str, compression: str | None) -> Iterator[str | None]:
    with open(path, "rb") as raw:
        lines: BinaryIO | io.BufferedReader = raw
        if compression is not None:  # Arrow notices a truncated stream, the zstandard package does not
            lines = io.BufferedReader(pa.CompressedInputStream(raw, compression))
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            where = f"{printable(path)}:{number}"
            try:
                row: Any = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise InputError(f"this line is not JSON: {error}", where=where) from None
            if not isinstance(row, dict):
                raise InputError("this line is no JSON object", where=where)
            if column not in row:
                raise _no_column(where, column, list(row))
            text = row[column]
            if text is not None and not isinstance(text, str):
                raise InputError(f"{column!r} holds {type(text).__name__}, not text", where=where)
            yield text


def _no_column(where: str, column: str, columns: Sequence[str]) -> InputError:
    return InputError(f"no column {column!r}; there are: {', '.join(columns)}", where=printable(where),
                      hint="name the column of the text with --column")  # fmt: skip
