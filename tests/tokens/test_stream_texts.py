"""A stream's tokens are those that Hugging Face's tokenizers gives for each text, whatever stands in the texts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.config.sections.data import DataSource, DocumentWindowSection, StreamSection
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.streams.files import freeze_text_files
from relayrun.tokens.streams.lane_cursor import LaneCursor
from relayrun.tokens.streams.samples import SampleShape
from relayrun.tokens.streams.text_stream import TextStream
from relayrun.tokens.tokenize.encode.engines import select_engine
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import EngineName, TokenizeOptions
from tests import streaming
from tests.tokenization_corpus import EOS, TEXTS, expected_ids, train_tokenizer

SEQ_LENGTH = 1024
"""As long as any of the texts."""
HARD = [
    *TEXTS,
    "\0",
    "a\0b\0\0c",
    "\ufeffa mark in front",
    "a mark \ufeff within\ufeff",
    "\ufffe\uffff\U0010ffff",
    "\r",
    "\r\n\r\n",
    "\u2028 \u2029 \x85 lines of Unicode\x0b\x0c",
    " ",
    "\t" * 300,
    "e\u0301\u0301\u0301" * 50,
    '"quoted" \\ \\u0041 \\n {"text": "x"}',
]


def write(path: Path, kind: str) -> None:
    if kind == "parquet":
        pq.write_table(pa.table({"text": HARD}), path, row_group_size=3)
    elif kind == "arrow":
        with pa.ipc.new_file(path, pa.schema([("text", pa.string())])) as writer:
            writer.write_table(pa.table({"text": HARD}), max_chunksize=3)
    else:
        lines = [json.dumps({"text": text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(HARD)]
        data = b"\xef\xbb\xbf" + "\n".join(lines).encode()  # a mark in front, and no end of the last line
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("engine", ["auto", "huggingface"])
def test_tokens_are_those_of_each_text_alone(tmp_path: Path, name: str, engine: EngineName) -> None:
    file = train_tokenizer(tmp_path / "tokenizer.json")
    folder = tmp_path / "text"
    folder.mkdir()
    kind = "jsonl" if "jsonl" in name else name.partition(".")[2]
    write(folder / name, kind)
    loaded = load_tokenizer(TokenizeOptions(tokenizer=str(file), eos_token=EOS))
    chosen = select_engine(engine, loaded.tokenizer, PackedTexts.of(HARD), print)
    encode = chosen.build(loaded.tokenizer.to_str()).encode
    settings = StreamSection(fragment_shuffle_window=0, shuffle_buffer=0)
    source = DataSource.model_validate({"path": str(folder), "weight": 1.0, "source": kind, "stream": settings})
    eod = loaded.eos_id
    shape = SampleShape.from_settings(
        DocumentWindowSection(window=SEQ_LENGTH, packing="none"),
        seq_length=SEQ_LENGTH,
        eod=eod,
        vocabulary_size=loaded.size,
        where="web",
    )
    made = TextStream(freeze_text_files("web", source, 0).files, settings, shape, encode, name="web", seed=1, lanes=1)
    opened = made.open_lanes({0: made.first_cursors()[0]})
    found = []
    for _ in range(streaming.MOST_SAMPLES):
        row = opened.take(0)
        if LaneCursor(*opened.cursor(0)).epoch:
            break
        found.append(row.tokens[: SEQ_LENGTH - row.padding].tolist())
    opened.close()
    assert found == expected_ids(file, HARD)
