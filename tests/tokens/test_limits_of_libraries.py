"""A limit of a library, or a habit of another program's writer, is no fault of the file."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from relayrun.config.sections.conditions import parse_row_condition
from relayrun.config.sections.data import StreamSection
from relayrun.errors import InputError
from relayrun.tokens import streams
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.faults import LineFaults
from relayrun.tokens.shards.manifest import TextFileEntry
from relayrun.tokens.shuffle.reshard import ReshardOptions, reshard
from relayrun.tokens.streams.fragments import Fragment, FragmentReader
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


TEXT = b"".join(b'{"text": "document %d"}\n' % number for number in range(3000))
PACK: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("padding", [1, 4, 1024, 3 << 20])
def test_zeros_behind_a_compressed_file_are_padding(tmp_path: Path, ending: str, padding: int) -> None:
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(PACK[ending](TEXT[: len(TEXT) // 2]) + PACK[ending](TEXT[len(TEXT) // 2 :]) + bytes(padding))
    read = read_column(str(path), "text", batch_bytes=10_000)
    assert sum(map(len, read)) == 3000
    second = len(PACK[ending](TEXT[: len(TEXT) // 2]))
    parts = [f"{path}/bytes={cut}" for cut in (f"0-{second}", f"{second}-{second + 9}", f"{second + 9}-")]
    rows = [sum(map(len, read_column(part, "text", batch_bytes=10_000))) for part in parts]
    assert (sum(rows), rows[0] > 1000, rows[1] > 1000, rows[2]) == (3000, True, True, 0)


@pytest.mark.parametrize("ending", PACK)
def test_what_is_torn_or_no_padding_behind_a_compressed_file_is_a_fault(tmp_path: Path, ending: str) -> None:
    whole = PACK[ending](TEXT)
    for number, content in enumerate((whole[:-6], whole + whole[:100], whole + b"garbage behind it", whole[:100])):
        path = tmp_path / f"{number}.jsonl.{ending}"
        path.write_bytes(content)
        with pytest.raises(InputError, match="cannot be read, it may be torn"):
            list(read_column(str(path), "text", batch_bytes=10_000))


def _doubled(folder: Path, kind: str, names: list[str]) -> str:
    rows = pa.Table.from_arrays([pa.array([f"{at} {row}" for row in range(5)]) for at in range(len(names))], names)
    path = folder / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(rows, path)
    elif kind == "arrow":
        with pa.ipc.new_stream(path, rows.schema) as writer:
            writer.write_table(rows)
    else:
        lines = zip(*rows.columns, strict=True)
        path.write_text("\n".join([",".join(names), *(",".join(map(str, line)) for line in lines)]) + "\n")
    return str(path)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv"])
def test_a_doubled_column_is_named(tmp_path: Path, kind: str) -> None:
    path = _doubled(tmp_path, kind, ["text", "m", "m"])
    assert [text for array in read_column(path, "text", batch_bytes=99) for text in array.to_pylist()][1] == "0 1"
    with pytest.raises(InputError, match=r"a\.\w+: 2 columns are named 'm'; there are: text, m, m") as caught:
        list(read_column(path, "m", batch_bytes=99))
    assert "rename all but one" in str(caught.value)


def test_a_doubled_column_of_a_stream_or_a_shuffle(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = _doubled(tmp_path / "in", "parquet", ["text", "m", "m"])
    entry = TextFileEntry(path=path, size=Path(path).stat().st_size, fingerprint="")
    section = StreamSection.model_validate({"extra_columns": ["m"], "map": "builtins:str"})
    with pytest.raises(InputError, match="2 columns are named 'm'"):
        list(FragmentReader([entry], section).read(Fragment(0, None), 0))
    with pytest.raises(InputError, match="2 columns are named 'm'"):
        list(streams.open(path, columns=["text", "m"], nb_epochs=1))
    assert sum(len(table) for table in streams.open(path, columns=["text"], nb_epochs=1)) == 5
    reshard(ReshardOptions(dataset_folder=str(tmp_path / "in"), output=tmp_path / "out"))
    assert pq.ParquetFile(next((tmp_path / "out").glob("*.parquet"))).schema_arrow.names == ["text", "m", "m"]
