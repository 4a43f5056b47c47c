"""Steps of datatrove in the task of a shard: documents in, texts out, and the dropped documents with their reasons.

The bytes depend on the files and the steps alone. A task makes a shard from its first document, so the state that a
step keeps across documents begins anew with each shard, as with each task of datatrove. Random numbers begin anew with
each document: the seed is made of the document's id and the step's `seed`.
"""

from __future__ import annotations

import copy
import functools
import gzip
import hashlib
import json
import os
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from datatrove.data import Document

from relayrun.errors import RelayrunError
from relayrun.files import fsync_directory
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.stores.direct_io import file_checksum
from relayrun.tokens.stores.urls import printable
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.shard_folder import exclusion_file
from relayrun.tokens.tokenize.steps import build_step, name_and_arguments


class DocumentRows(LineFaults):
    """Keeps the other columns of each row for its document; a bad row keeps its place and its number."""

    whole_rows = True

    def __init__(self, column: str, *, skip: bool) -> None:
        super().__init__(skip=skip, keep=True)
        self._columns = {column, column.partition(".")[0]}
        self.nulls = 0
        """Rows without a text, bad ones aside."""
        self._rows: deque[dict[str, Any]] = deque()

    def add(self, bad: BadLine, where: str) -> None:
        super().add(bad, where)
        if bad.reason in ("not JSON", "no object"):
            self._rows.append({})

    def look(self, row: Mapping[str, Any], long: Mapping[str, Any]) -> None:
        others = {name: value for name, value in row.items() if name not in self._columns}
        self._rows.append({name: value for name, value in others.items() if str(value) not in long} if long else others)

    def end_array(self, array: pa.Array) -> pa.Array:
        """Count the nulls of an array that has just been read."""
        self.nulls += array.null_count - len(self.marks)
        self.marks.clear()
        return array

    def take(self) -> dict[str, Any]:
        """Return the other columns of the next row."""
        return self._rows.popleft()


class _Step:
    """A step in a task, and what it did."""

    def __init__(self, number: int, entry: Any, step: Any, shard: ShardSteps) -> None:
        self.name, given = name_and_arguments(entry)
        self.step = step
        self.documents_in = self.documents_out = 0
        self.dropped: Counter[str] = Counter()
        if hasattr(step, "exclusion_writer"):
            step.exclusion_writer = shard
        self._seed = f"{number} {given.get('seed')}"
        self._own = self.name == "lambda" or not type(step).__module__.startswith("datatrove.")
        holders = [getattr(value, "__self__", value) for value in vars(step).values()]
        self._generators = [each for each in holders if isinstance(each, (np.random.Generator, random.Random))]

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

    def counts(self) -> dict[str, Any]:
        """Return the counts for the record of a task."""
        dropped = dict(sorted(self.dropped.items()))
        return {"step": self.name, "in": self.documents_in, "out": self.documents_out, "dropped": dropped}


class ShardSteps:
    """The steps of one shard, and its file of dropped documents."""

    def __init__(self, options: TokenizeOptions, *, output: str, shard: str) -> None:
        """Raises InputError if a step cannot be made."""
        self._column, self._drop_errors = options.column, options.on_step_error == "drop"
        built = copy.deepcopy(_process_steps(json.dumps(options.pipeline)))
        self._steps = [_Step(number, entry, step, self) for number, (entry, step) in enumerate(built)]
        self._refused: list[Document] = []
        """The document that a filter has just dropped."""
        self._path = exclusion_file(output, shard)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._raw: IO[bytes] = open(f"{self._path}.tmp", "wb")  # noqa: SIM115 - closed by finish or abort
        self._file = ""
        self._row = 0
        self.rows = DocumentRows(options.column, skip=False)
        self._lines: gzip.GzipFile | None = None

    def begin_file(self, file: str, *, skip_lines: bool) -> DocumentRows:
        """Begin a file; return the object that its reader fills."""
        self._end_member()
        # a member of gzip for each file, without a time: the same documents give the same bytes
        self._lines = gzip.GzipFile(filename="", mode="wb", fileobj=self._raw, mtime=0)
        self._file, self._row = file, 0
        self.rows = DocumentRows(self._column, skip=skip_lines)
        return self.rows

    def _end_member(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def mark(self) -> object:
        """Return the state before a file, for `rollback`."""
        self._end_member()
        return self._raw.tell(), [(each.documents_in, each.documents_out, each.dropped.copy()) for each in self._steps]

    def rollback(self, mark: object) -> None:
        """Drop counts and documents since `mark`."""
        assert isinstance(mark, tuple)
        self._end_member()
        self._raw.seek(mark[0])
        self._raw.truncate()
        for step, kept in zip(self._steps, mark[1], strict=True):
            step.documents_in, step.documents_out, step.dropped = kept

    def finish(self) -> str:
        """Publish the file of dropped documents; return its checksum."""
        self._end_member()
        self._raw.flush()
        os.fsync(self._raw.fileno())
        self._raw.close()
        digest = file_checksum(self._raw.name)
        os.replace(self._raw.name, self._path)
        fsync_directory(self._path.parent)
        return digest

    def abort(self) -> None:
        """Remove the unfinished file."""
        self._raw.close()
        Path(self._raw.name).unlink(missing_ok=True)

    def counts(self) -> list[dict[str, Any]]:
        """Return the counts of each step."""
        return [each.counts() for each in self._steps]

    def apply(self, array: pa.Array) -> PackedTexts:
        """Return the texts that the steps leave of the next rows of the file. An empty text passes as it is."""
        texts: list[bytes] = []
        for text in array.to_pylist():
            row, columns = self._row, self.rows.take()
            self._row += 1
            if text is None:
                continue
            if not text:
                texts.append(b"")
                continue
            # id and metadata as datatrove's readers make them
            document_id = columns.pop("id", f"{self._file}/{row}")
            inner = columns.pop("metadata", {})
            metadata = (inner if isinstance(inner, dict) else {"metadata": inner}) | columns
            texts += self._texts(Document(text=text, id=str(document_id), metadata=metadata), row)
        return PackedTexts.join(texts)

    def _texts(self, document: Document, row: int) -> Iterator[bytes]:
        documents = [document]
        for step in self._steps:
            documents = [found for each in documents for found in self._pass(each, step, row)]
        for each in documents:
            yield each.text.encode()

    def _pass(self, document: Document, step: _Step, row: int) -> list[Document]:
        """Return what a step makes of a document; write down why it drops the document."""
        step.documents_in += 1
        step.reseed(document.id)
        before, self._refused = dict(document.metadata), []
        reason = ""
        try:
            found: list[Document] = list(step.step.run(iter([document])))
            for each in found:
                each.text.encode()  # a step may leave something else than a text in UTF-8
        except Exception as error:
            words = f"step {step.name} raises {type(error).__name__}: {printable(str(error))}"
            if not self._drop_errors or isinstance(error, (ImportError, OSError)):
                hint = "mend the step, or drop such documents with on_step_error: drop"
                where = f"document {printable(document.id)} (row {row} of {printable(self._file)})"
                raise RelayrunError(words, where=where, hint=hint) from error  # no fault of the file
            found, reason = [], f"error: {type(error).__name__}"
        step.documents_out += len(found)
        if not found:
            refused = self._refused[0] if self._refused else document
            reason = reason or str(refused.metadata.get("filter_reason") or "dropped")
            step.dropped[reason] += 1
            self._exclude(refused, step.name, reason, before, row)
        return found

    def _exclude(self, document: Document, step: str, reason: str, before: dict[str, Any], row: int) -> None:
        numbers = {name: value for name, value in document.metadata.items() if isinstance(value, (int, float))}
        record = {
            "id": document.id,
            "file": self._file,
            "row": row,
            "step": step,
            "reason": reason,
            "scores": {name: value for name, value in numbers.items() if before.get(name) != value},
            "text": document.text,
            "metadata": before,
        }
        line = json.dumps(record, ensure_ascii=False, default=str) + "\n"
        assert self._lines is not None
        self._lines.write(line.encode("utf-8", "backslashreplace"))

    # a filter of datatrove enters its exclusion writer, and gives it the document that it drops

    def __enter__(self) -> ShardSteps:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing ends: the file is open for the whole shard."""

    def write(self, document: Document, rank: int = 0) -> None:
        """Take the document that a filter drops."""
        self._refused = [document]


@functools.lru_cache(maxsize=1)
def _process_steps(pipeline: str) -> list[tuple[Any, Any]]:
    """Make the steps once per worker: a constructor may read large files."""
    return [(entry, build_step(entry)) for entry in json.loads(pipeline)]
