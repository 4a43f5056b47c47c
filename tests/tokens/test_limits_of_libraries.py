"""A limit of a library, or a habit of another program's writer, is no fault of the file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from relayrun.config.sections.conditions import parse_row_condition
from relayrun.errors import InputError
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.faults import LineFaults
from relayrun.tokens.streams.row_filters import arrow_expression, row_fulfils
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from tests.tokenization_corpus import train_tokenizer

LONG_WINDOW = bytes.fromhex("28b52ffd04a8") + bytes(30)
"""A header of zstd with a window of 2^31 bytes."""


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())])
def test_texts_that_are_stored_as_bytes_are_read_and_checked(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["ωδή".encode(), None, b"two", b"\xff bad"]
    plain = pa.array(texts, pa.binary())
    array = plain.dictionary_encode() if pa.types.is_dictionary(kind) else plain.cast(kind)
    pq.write_table(pa.table({"text": array}), tmp_path / "a.parquet", store_schema=True)
    with pytest.raises(InputError, match="the text is not UTF-8"):
        list(read_column(str(tmp_path / "a.parquet"), "text", batch_bytes=1000))
    read = read_column(str(tmp_path / "a.parquet"), "text", batch_bytes=1000, faults=LineFaults(skip=True))
    assert [text for array in read for text in array.to_pylist()] == ["ωδή", None, "two"]


def test_a_long_window_of_zstd_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(LONG_WINDOW)
    with pytest.raises(InputError, match="a long window of zstd") as caught:
        list(read_column(str(tmp_path / "a.jsonl.zst"), "text", batch_bytes=1000))
    assert "torn" not in str(caught.value)
    assert "--long=31" in str(caught.value)


@pytest.mark.parametrize("text", ["n > 1.6e9", "n == 5.0", "n < 5.5 or n >= 1e15", "not n > 1.5", "f > 2.5 and n > 2"])
def test_a_constant_with_a_fraction_asks_rows_of_parquet_and_json_alike(text: str) -> None:
    rows = [{"n": n, "f": f} for n in (1_700_000_139, 5, 2**53 + 2, None, -3) for f in (1.5, 3e9)]
    table = pa.table({name: [row[name] for row in rows] for name in ("n", "f")})
    for name in ("n", "f"):
        text = text.replace(f"{name} ", f'pc.field("{name}") ')
    condition = parse_row_condition(text)
    found = table.filter(arrow_expression(condition, table.schema)).to_pylist()
    assert found == [row for row in rows if row_fulfils(condition, row)]


def test_a_tokenizer_of_mistral_is_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text('{"config": {"pattern": ""}, "vocab": []}')
    for place in (tmp_path, tmp_path / "tekken.json"):
        with pytest.raises(InputError, match=r"\(tekken\), not a tokenizer\.json") as caught:
            load_tokenizer(TokenizeOptions(tokenizer=str(place)))
        assert "convert_tekken_tokenizer" in str(caught.value)
    train_tokenizer(tmp_path / "tokenizer.json")
    assert isinstance(load_tokenizer(TokenizeOptions(tokenizer=str(tmp_path))).tokenizer, Tokenizer)
