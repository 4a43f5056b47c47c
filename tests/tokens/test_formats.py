"""A format of data files is declared once, and every reader of text asks that declaration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow.parquet as pq
import pytest

from relayrun.config.sections.data import DataSource, StreamSection
from relayrun.errors import InputError
from relayrun.tokens.order.document_lengths import lengths_by_file
from relayrun.tokens.readers.inputs import FORMATS, FileFormat, read_paths_file
from relayrun.tokens.readers.texts import large_strings
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.shuffle.reshard import ReshardOptions, reshard
from relayrun.tokens.streams.files import find_text_files
from relayrun.tokens.streams.fragments import TEXT_COLUMN, Fragment, FragmentReader
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.encode.tokenizer_files import write_byte_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file

PACKAGE = Path(__file__).resolve().parents[2] / "relayrun"
PARAGRAPHS = FileFormat(name="paragraphs", suffixes=(".par",), reader=f"{__name__}:read_paragraphs")
TEXTS = ["one", "two", "three"]


def read_paragraphs(raw: BinaryIO, path: str, column: str, **options: Any) -> Iterator[Any]:
    """The made-up format: paragraphs between empty lines."""
    yield large_strings(raw.read().decode().split("\n\n"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.par").write_text("\n\n".join(TEXTS))
    return folder


@pytest.fixture
def paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, PARAGRAPHS.name, PARAGRAPHS)


def test_files_of_an_unknown_format_are_not_found(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"files end in \.parquet, \.pq, \.jsonl, .*\.arrow.*; look at the filters"):
        prepare_dumps(data, tmp_path / "m")


@pytest.mark.usefixtures("paragraphs")
def test_a_declared_format_is_tokenized(data: Path, tmp_path: Path) -> None:
    prepare_dumps(data, tmp_path / "m")
    paths_file = tmp_path / "m/dumps/paths_file_0.txt"
    assert read_paths_file(paths_file) == ["a.par"]
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    options = TokenizeOptions(tokenizer=str(tokenizer), append_eod="no")
    tokenize_paths_file(options, output_folder=tmp_path / "out", dataset=data, paths_file=paths_file)
    assert bytes(np.asarray(Shard.open(tmp_path / "out/00000_tokens").ids(), np.uint8)) == "".join(TEXTS).encode()


@pytest.mark.usefixtures("paragraphs")
def test_a_declared_format_is_shuffled_and_measured(data: Path, tmp_path: Path) -> None:
    assert reshard(ReshardOptions(dataset_folder=str(data), output=tmp_path / "out")) == 3
    assert sorted(pq.read_table(tmp_path / "out/data_0.parquet")["text"].to_pylist()) == sorted(TEXTS)
    ((name, lengths),), unit = lengths_by_file(data, column="text", tokenizer=None)
    assert (name, lengths.tolist(), unit) == ("a.par", [3, 3, 5], "bytes")


@pytest.mark.usefixtures("paragraphs")
def test_a_declared_format_is_a_stream(data: Path) -> None:
    """A config takes the name once `SourceKind` lists it."""
    stream = StreamSection()
    source = DataSource.model_construct(path=str(data), weight=1.0, source="paragraphs", stream=stream)
    reader = FragmentReader(find_text_files(source, "data set"), stream)
    rows = [text for batch in reader.read(Fragment(0, None), 1) for text in batch[TEXT_COLUMN].to_pylist()]
    assert rows == TEXTS[1:]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "parquet"])
def test_a_format_is_named_where_it_is_declared_alone(name: str) -> None:
    """Besides the settings, which list the formats that can be streams."""
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if f'"{name}"' in path.read_text()}
    assert files - {"config/sections/data.py"} == {"tokens/readers/inputs.py"}
