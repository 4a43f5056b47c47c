"""Steps of datatrove in the task of a shard: documents in, texts out, and the dropped documents with their reasons.

The bytes depend on the files and the steps alone. A task makes a shard from its first document, so the state that a
step keeps across documents begins anew with each shard, as with each task of datatrove. Random numbers begin anew with
each document: the seed is made of the document's id and the step's `seed`.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import hashlib
import json
import os
import random
import signal
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from relayrun.errors import InputError, RelayrunError
from relayrun.files import fsync_directory, fsync_file
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.contents import file_compression
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.readers.file_ranges import file_of_range
from relayrun.tokens.readers.json_csv import open_decompressed
from relayrun.tokens.readers.texts import MAX_ROWS, PackedTexts, large_strings
from relayrun.tokens.stores.direct_io import file_checksum
from relayrun.tokens.stores.urls import StoreError, join_path, open_input, printable
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.shard_folder import exclusion_file
from relayrun.tokens.tokenize.steps import build_step, name_and_arguments


class DocumentRows(LineFaults):
    """Keeps the other columns of each row for its document; a bad row keeps its place and its number."""

    whole_rows = True

    def __init__(self, options: TokenizeOptions) -> None:
        super().__init__(skip=options.skips_lines, keep=True)
        self._columns = {options.column, options.column.partition(".")[0]}
        self.nulls = 0
        """Rows without a text, bad ones aside."""
        self.others: deque[dict[str, Any]] = deque()
        """The other columns of the rows that have been read."""

    def add(self, bad: BadLine, where: str) -> None:
        super().add(bad, where)
        if bad.reason in ("not JSON", "no object"):
            self.others.append({})

    def look(self, row: Mapping[str, Any], long: Mapping[str, Any]) -> None:
        short = {name: value for name, value in row.items() if not long or str(value) not in long}
        self.others.append({name: value for name, value in short.items() if name not in self._columns})

    def end_array(self, array: pa.Array) -> pa.Array:
        """Count the nulls of an array that has just been read."""
        self.nulls += array.null_count - len(self.marks)
        self.marks.clear()
        return array


def read_texts(
    options: TokenizeOptions,
    dataset: str,
    name: str,
    *,
    batch_bytes: int | None = None,
    scratch: str | None = None,
    faults: LineFaults | None = None,
) -> Iterator[pa.Array]:
    """Yield the texts of file `name` below `dataset` as `read_column` does, or of the documents of the reader of
    `options`, whose id and metadata a `DocumentRows` gets as columns."""
    path, size = join_path(dataset, name), batch_bytes or options.batch_bytes
    if options.reader is None:
        yield from read_column(path, options.column, batch_bytes=size, scratch=scratch, faults=faults)
        return
    if file_of_range(name) != name:
        hint = "run `relayrun dumps prepare` again with --ending, which cuts no file"
        raise InputError("a reader of datatrove reads whole files, and this is a range", where=path, hint=hint)
    reader, texts, held = build_step(options.reader, "reader", dataset), list[bytes](), 0
    try:
        for document in reader.read_file(name):
            texts.append(document.text.encode())
            if isinstance(faults, DocumentRows):
                faults.others.append({"id": document.id, "metadata": document.metadata})
            held += len(texts[-1])
            if held >= size or len(texts) >= MAX_ROWS:
                yield large_strings(texts)
                texts, held = [], 0
        if file_compression(name):  # warcio takes a torn file for a whole one
            with open_input(path) as raw, open_decompressed(raw, path) as content:
                while content.read(1 << 20):
                    pass
    except StoreError:  # the file is not at fault
        raise
    except Exception as error:
        words = f"{type(reader).__name__} cannot read this file: {type(error).__name__}: {printable(str(error))}"
        hint = "is it the reader of such files? Fetch the file again, or leave it out with --filter-out"
        raise InputError(words, where=printable(path), hint=hint) from error
    yield large_strings(texts)


_TEXTS = "id", "file", "step", "reason", "scores", "text", "metadata"
_COLUMNS = pa.schema([*((name, pa.string()) for name in _TEXTS), ("row", pa.int64()), ("cut", pa.bool_())])
_TABLE_BYTES = 8 << 20
"""Bytes of a group of rows."""


class JsonLines:
    """A .jsonl.gz file that is being written, with a member of gzip for each input file. It holds no time: the same
    lines give the same bytes."""

    def __init__(self, path: str | os.PathLike[str], *, level: int = 6) -> None:
        self.path, self._level = Path(path), level
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._raw = open(path, "wb")  # noqa: SIM115 - closed by close
        self._member = self._begin()

    def _begin(self) -> gzip.GzipFile:
        self._start = self._raw.tell()
        return gzip.GzipFile(filename="", mode="wb", compresslevel=self._level, fileobj=self._raw, mtime=0)

    def begin_member(self) -> None:
        """Begin the next member; an empty one leaves no bytes."""
        if self._member.tell():
            self._member.close()
            self._member = self._begin()

    def write(self, line: bytes) -> None:
        self._member.write(line)

    def rollback(self) -> None:
        """Drop the lines since `begin_member`."""
        self._member.close()
        self._raw.seek(self._start)
        self._raw.truncate()
        self._member = self._begin()

    def close(self) -> None:
        """End the file; nothing is synced. `x.parquet` and `x.parquet.tmp` become a table of the lines."""
        if not self._raw.closed:
            self._member.close()
            self._raw.close()
            if ".parquet" in self.path.suffixes:
                self._make_table()

    def _make_table(self) -> None:
        from pyarrow import parquet  # on demand: most have no such table

        with open(self.path, "rb") as raw, gzip.open(raw) as lines:
            self.path.unlink()
            with parquet.ParquetWriter(self.path, _COLUMNS, compression="zstd") as table:
                while held := lines.readlines(_TABLE_BYTES):
                    rows = [{name: _cell(value) for name, value in json.loads(line).items()} for line in held]
                    table.write_batch(pa.RecordBatch.from_pylist(rows, _COLUMNS))


def _cell(value: Any) -> Any:
    """Return a value of a row: text that UTF-8 lacks has escapes, an object is JSON."""
    if isinstance(value, (int, bool)):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


def exclusion_line(document: Any, before: Mapping[str, Any], place: Mapping[str, Any]) -> bytes:
    """Return the record of a dropped document. Scores are the numbers and words of its metadata that `before` lacks."""
    known = {**before, "filter_reason": document.metadata.get("filter_reason")}
    scores = {
        name: value
        for name, value in document.metadata.items()
        if isinstance(value, (int, float, str)) and known.get(name) != value
    }
    record = {**place, "scores": scores, "text": document.text, "metadata": before}
    return (json.dumps(record, ensure_ascii=False, default=str) + "\n").encode("utf-8", "backslashreplace")


class _OutOfTime(BaseException):
    """No library catches this by chance."""


class ExtractionTimeout(Exception):
    """An extractor has taken longer than its `timeout`."""


@contextlib.contextmanager
def _processor_seconds(seconds: float) -> Iterator[None]:
    """Raise ExtractionTimeout after so much processor time of this process."""

    def end(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGPROF, end)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)  # again, if the first is caught
        yield
    except _OutOfTime:
        raise ExtractionTimeout(f"more than {seconds} seconds of processor time") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class _Step:
    """A step in a task, and what it did."""

    def __init__(self, number: int, entry: Any, shard: ShardSteps) -> None:
        from datatrove.pipeline.extractors.base import BaseExtractor  # on demand: datatrove takes seconds to import

        self.name, given = name_and_arguments(entry)
        self.step = build_step(entry)
        self.counts: dict[str, Any] = {
            "step": self.name,
            "in": 0,
            "out": 0,
            "bytes_in": 0,
            "bytes_out": 0,
            "dropped": {},
        }
        if hasattr(self.step, "exclusion_writer"):
            self.step.exclusion_writer = shard
        self._seed = f"{number} {given.get('seed')}"
        self._own = self.name == "lambda" or not type(self.step).__module__.startswith("datatrove.")
        self.run = self._extract if isinstance(self.step, BaseExtractor) else self.step.run
        holders = [getattr(value, "__self__", value) for value in vars(self.step).values()]
        self._generators = [each for each in holders if isinstance(each, (np.random.Generator, random.Random))]

    def _extract(self, documents: Iterator[Any]) -> Iterator[Any]:
        """Extract as `BaseExtractor.run`, but here: that starts a process for each call, and its clock counts what
        other processes take."""
        for document in documents:
            with _processor_seconds(self.step.timeout):
                document.text = self.step.extract(document.text) or ""
            if document.text:
                yield document

    def reseed(self, document_id: str) -> None:
        """Begin random numbers anew for a document: the step's own, and the global ones for code of the user."""
        if self._generators or self._own:
            text = f"{self._seed}\0{document_id}".encode("utf-8", "surrogatepass")
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
            for generator in self._generators:
                if isinstance(generator, random.Random):
                    generator.seed(seed)
                else:
                    generator.bit_generator.state = type(generator.bit_generator)(seed).state
            if self._own:
                random.seed(seed)
                np.random.seed(seed)


class ExclusionWriter:
    """A context for datatrove's filters, which enter and leave their `exclusion_writer`: it opens nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing ends."""


class ShardSteps(ExclusionWriter):
    """The steps of one shard, and its file of dropped documents."""

    def __init__(self, options: TokenizeOptions, *, output: str, shard: str, last: Sequence[Any] = ()) -> None:
        """`last`: steps behind those of the options. Raises InputError if a step cannot be made."""
        self._options = options
        self._steps = [_Step(number, entry, self) for number, entry in enumerate((*options.pipeline, *last))]
        self._refused: Any = None
        """The document that a filter has just dropped."""
        self._path = exclusion_file(output, shard, options.exclusions)
        self._lines = JsonLines(f"{self._path}.tmp")

    def begin_file(self, file: str) -> DocumentRows:
        """Begin a file; return the object that its reader fills."""
        self._lines.begin_member()
        self._before = copy.deepcopy([each.counts for each in self._steps])
        self.file = file
        self.row = 0
        """Rows of the file so far, bad ones and nulls among them."""
        self.rows = DocumentRows(self._options)
        return self.rows

    def rollback(self) -> None:
        """Drop the counts and the documents of the file that `begin_file` began."""
        self._lines.rollback()
        for step, before in zip(self._steps, self._before, strict=True):
            step.counts = before

    def finish(self) -> tuple[list[dict[str, Any]], str]:
        """Publish the file of dropped documents; return the counts of each step, and the checksum of the file."""
        self._lines.close()
        digest = file_checksum(self._lines.path)
        fsync_file(self._lines.path)
        os.replace(self._lines.path, self._path)
        fsync_directory(self._path.parent)
        return [each.counts for each in self._steps], digest

    def close(self) -> None:
        """Remove the file if it is unfinished."""
        self._lines.close()
        self._lines.path.unlink(missing_ok=True)

    def apply(self, array: pa.Array) -> PackedTexts:
        """Return the texts that the steps leave of the next rows of the file. An empty text passes as it is."""
        return PackedTexts.join([document.text.encode() for document in self.documents(array)])

    def documents(self, array: pa.Array) -> Iterator[Any]:
        """Yield the documents that the steps leave of the next rows of the file, also those without text."""
        from datatrove.data import Document  # on demand: datatrove takes seconds to import

        for text in array.to_pylist():
            row, columns = self.row, self.rows.others.popleft()
            self.row += 1
            if not text:
                yield from [] if text is None else [Document(text="", id="")]
                continue
            # id and metadata as datatrove's readers make them
            document_id = columns.pop("id", f"{self.file}/{row}")
            inner = columns.pop("metadata", {})
            metadata = (inner if isinstance(inner, dict) else {"metadata": inner}) | columns
            documents = [Document(text=text, id=str(document_id), metadata=metadata)]
            for step in self._steps:
                documents = [found for each in documents for found in self._pass(each, step, row)]
            yield from documents

    def _pass(self, document: Any, step: _Step, row: int) -> list[Any]:
        """Return what a step makes of a document; write down why it drops the document."""
        step.counts["in"] += 1
        step.counts["bytes_in"] += len(document.text.encode())
        step.reseed(document.id)
        before, self._refused = dict(document.metadata), None
        reason = ""
        try:
            found: list[Any] = list(step.run(iter([document])))
            sizes = [len(each.text.encode()) for each in found]  # fails if a step leaves something else than UTF-8
        except Exception as error:
            words = f"step {step.name} raises {type(error).__name__}: {printable(str(error))}"
            if self._options.on_step_error == "fail" or isinstance(error, (ImportError, OSError)):
                hint = "mend the step, or drop such documents with on_step_error: drop"
                where = f"document {printable(document.id)} (row {row} of {printable(self.file)})"
                raise RelayrunError(words, where=where, hint=hint) from error  # no fault of the file
            found, sizes, reason = [], [], f"error: {type(error).__name__}"
        step.counts["out"] += len(found)
        step.counts["bytes_out"] += sum(sizes)
        if not found:
            refused = self._refused or document
            reason = reason or str(refused.metadata.get("filter_reason") or "dropped")
            step.counts["dropped"][reason] = step.counts["dropped"].get(reason, 0) + 1
            place = {"id": refused.id, "file": self.file, "row": row, "step": step.name, "reason": reason}
            self._lines.write(exclusion_line(refused, before, place))
        return found

    def write(self, document: Any, rank: int = 0) -> None:
        """Take the document that a filter drops."""
        self._refused = document
