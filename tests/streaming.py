"""Files of rows that say which row they are, and streams over them, for the tests of streams."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relayrun.config.sections.data import DataSource, DocumentWindowSection, StreamSection
from relayrun.tokens.order.sample_rows import SampleRow
from relayrun.tokens.order.sampler import MixturePart, MixtureSampler
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.shards.manifest import DatasetManifest
from relayrun.tokens.streams.files import freeze_text_files
from relayrun.tokens.streams.samples import SampleShape
from relayrun.tokens.streams.text_stream import TextStream
from relayrun.tokens.tokenize.encode.libraries import Encoded

EOD = 0
SEQ_LENGTH = 64
MOST_SAMPLES = 100_000
"""More than the streams of any test have: who looks for the end of one stops there."""


def text_of(number: int) -> str:
    """A row that tells its number, 8 to 47 characters long."""
    return f"<{number:05}>" + "x" * (1 + number * 7919 % 40)


def numbers_in(text: str) -> list[int]:
    """The rows that whole documents of a text are. Fails for a text that is no row."""
    rows = [int(document[1:6]) for document in text.split("\0") if document]
    assert [text_of(row) for row in rows] == [document for document in text.split("\0") if document]
    return rows


def write(
    folder: Path,
    kind: str,
    sizes: Sequence[int],
    *,
    first: int = 0,
    group: int = 7,
    extra: Mapping[int, Any] | None = None,
) -> list[list[int]]:
    """Write a file of each size, in rows counted from `first`; return the rows of each file.

    `group`: rows of a row group. `extra`: texts of some rows, in place of their own; None is null.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, size in enumerate(sizes):
        rows = list(range(first, first + size))
        first += size
        texts = [(extra or {}).get(row, text_of(row)) for row in rows]
        path = folder / f"{number:03}"
        if kind == "parquet":
            table = pa.table(
                {"text": pa.array(texts, pa.string()), "number": rows, "even": [row % 2 == 0 for row in rows]}
            )
            pq.write_table(table, path.with_suffix(".parquet"), row_group_size=group)
        elif kind == "arrow":
            with pa.ipc.new_file(path.with_suffix(".arrow"), pa.schema([("text", pa.string())])) as writer:
                writer.write_table(pa.table({"text": pa.array(texts, pa.string())}), max_chunksize=group)
        else:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
            packed = number % 2 == 1
            name = path.with_suffix(".jsonl.gz" if packed else ".jsonl")
            name.write_bytes(gzip.compress(lines) if packed else lines)
        files.append(rows)
    return files


def encode(texts: PackedTexts) -> Encoded:
    """A byte is a token."""
    return texts.used.astype(np.uint32), texts.sizes


def stream(
    folder: Path,
    kind: str,
    *,
    lanes: int = 4,
    name: str = "web",
    window: DocumentWindowSection | None = None,
    files: DatasetManifest | None = None,
    seed: int = 1,
    **options: Any,
) -> TextStream:
    """A stream over the files of a folder."""
    settings = StreamSection(**options)
    if files is None:
        source = DataSource.model_validate({"path": str(folder), "weight": 1.0, "source": kind, "stream": settings})
        files = freeze_text_files(name, source, 0)
    shape = SampleShape.from_settings(window, seq_length=SEQ_LENGTH, eod=EOD, vocabulary_size=256, where=name)
    return TextStream(files.files, settings, shape, encode, name=name, seed=seed, lanes=lanes)


def sampler(parts: Mapping[str, Any], weights: Mapping[str, float]) -> MixtureSampler:
    """A mixture of data sets and streams."""
    made = {
        name: MixturePart(dataset=parts[name], weight=weight, record={"fingerprint": name})
        for name, weight in weights.items()
    }
    return MixtureSampler(made, {"seed": 1})


def inputs(row: SampleRow) -> str:
    """The text of a sample's inputs, padding left out; the end of a document is a zero."""
    return bytes(row.tokens[: SEQ_LENGTH - row.padding].tolist()).decode()


def digest(row: SampleRow) -> str:
    """What identifies a sample: its tokens, lengths and loss mask."""
    mask = b"" if row.loss_mask is None else row.loss_mask.tobytes()
    return hashlib.sha256(row.tokens.astype(np.int64).tobytes() + repr(row.lengths).encode() + mask).hexdigest()
