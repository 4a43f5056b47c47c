"""`--row-group-mb` and `--split-rows` of a shuffle: sizes, pieces against a slow reference, the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayrun.cli import main
from relayrun.config.sections.data import DocumentWindowSection
from relayrun.errors import InputError
from relayrun.tokens.shuffle import reshard as module
from relayrun.tokens.shuffle.buckets import RowSplit
from relayrun.tokens.shuffle.reshard import ReshardOptions
from relayrun.tokens.streams.lane_cursor import LaneCursor
from tests import streaming
from tests.tokens.test_reshard import digests

ROOT = Path(__file__).resolve().parents[2]
ROWS = 3000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Texts that are each another one, most of them long, with ASCII and without."""
    folder, generator = tmp_path / "data", np.random.default_rng(2)
    folder.mkdir()
    for number in range(3):
        lengths = generator.integers(0, 900, ROWS // 3)
        texts = [
            f"{number}-{row}:" + ("é🧬x" if row % 3 else "xyz") * (length // 3) for row, length in enumerate(lengths)
        ]
        pq.write_table(pa.table({"id": [*range(len(texts))], "text": texts}), folder / f"{number}.parquet")
    return folder


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit counts the rows alone, so that small data does not fit."""
    for name, value in (("_BASE", 0), ("_THREAD", 0), ("_PAGES", 0), ("_LEAST", 4), ("_GROUP_COPIES", 0)):
        monkeypatch.setattr(module, name, value)


def slow(text: str, size: int, overlap: int) -> list[str]:
    """The pieces of a text: windows that move on by what does not overlap, until one reaches the end."""
    found, start = [], 0
    while True:
        found.append(text[start : start + size])
        if start + size >= len(text):
            return found
        start += size - overlap


@given(
    texts=st.lists(st.none() | st.text(alphabet="aé🧬", max_size=40)),
    size=st.integers(1, 12),
    overlap=st.integers(0, 11),
)
def test_a_cut_is_that_of_a_slow_reference(texts: list[str | None], size: int, overlap: int) -> None:
    if overlap >= size:
        with pytest.raises(InputError, match="--split-overlap: must be at least 0 and below"):
            RowSplit(size=size, overlap=overlap)
        return
    schema = pa.schema([("n", pa.int64()), ("text", pa.large_string()), ("z", pa.large_string())])
    table = pa.table([[*range(len(texts))], texts, [str(row) for row in range(len(texts))]], schema)
    expected = [
        (row, piece, str(row))
        for row, text in enumerate(texts)
        for piece in ([None] if text is None else slow(text, size, overlap))
    ]
    cut = RowSplit(size=size, overlap=overlap)
    found = cut.apply(table, "text")
    assert found.schema == schema
    assert [(row["n"], row["text"], row["z"]) for row in found.to_pylist()] == expected
    assert cut.apply(table.select(["text"]), "text")["text"].to_pylist() == [text for _, text, _ in expected]
    for text in texts:
        assert sum(map(len, slow(text or "", size, overlap))) <= len(text or "") * cut.growth


def test_split_rows_are_the_pieces_of_all_texts_whatever_the_memory_and_the_threads(
    data: Path, tmp_path: Path, small_memory: None
) -> None:
    options = ReshardOptions(
        dataset_folder=str(data),
        output=tmp_path / "one",
        split_rows=100,
        split_overlap=20,
        row_group_bytes=20_000,
        file_size=60_000,
        memory_limit=1 << 40,
    )
    expected = sorted(
        (row["id"], piece)
        for file in sorted(data.iterdir())
        for row in pq.read_table(file).to_pylist()
        for piece in slow(row["text"], 100, 20)
    )
    assert module.reshard(options) == len(expected)
    found = [row for file in (tmp_path / "one").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert sorted((row["id"], row["text"]) for row in found) == expected
    small = module.replace(options, output=tmp_path / "two", memory_limit=200_000, threads=2)
    assert module.reshard(small) == len(expected)
    assert digests(tmp_path / "two") == digests(tmp_path / "one")


def test_row_groups_hold_about_so_much_text(data: Path, tmp_path: Path) -> None:
    arguments = ["--output-folder", tmp_path / "out", "--row-group-mb", "0.05", "--file-size", "0.1"]
    command = [sys.executable, ROOT / "scripts/tokenization/reshard.py", "--dataset-folder", data, *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    files = [pq.ParquetFile(tmp_path / "out" / f"data_{n}.parquet") for n in range(len(digests(tmp_path / "out")))]
    groups = [[file.read_row_group(group) for group in range(file.num_row_groups)] for file in files]
    rows = [len(group) for of_file in groups for group in of_file]
    text = [sum(len(value.encode()) for value in group["text"].to_pylist()) for of_file in groups for group in of_file]
    assert sum(rows) == ROWS
    assert {*rows[:-1]} == {round(50_000 * ROWS / sum(text))}
    assert len({len(of_file) for of_file in groups[:-1]}) == 1
    assert len(files) == 3
    assert abs(np.mean(text[:-1]) / 50_000 - 1) < 0.02
    assert max(abs(one / 50_000 - 1) for one in text[:-1]) < 0.4


def test_a_stream_of_split_rows_has_the_windows_of_whole_texts(tmp_path: Path) -> None:
    """Windows of rows that are cut as windows are: the same ones, shuffled over everything."""
    streaming.write(tmp_path / "data", "parquet", [60, 40], extra={row: f"{row}:" + "acgt" * row for row in range(100)})
    window = DocumentWindowSection(window=20, overlap=5, bos=1, eos=2, drop_eod=True, packing="none")
    module.reshard(
        ReshardOptions(dataset_folder=str(tmp_path / "data"), output=tmp_path / "out", split_rows=18, split_overlap=5)
    )

    def windows(folder: Path) -> list[bytes]:
        made = streaming.stream(folder, "parquet", window=window, lanes=1)
        opened = made.open_lanes({0: made.first_cursors()[0]})
        found = []
        for _ in range(streaming.MOST_SAMPLES):
            row = opened.take(0)
            if LaneCursor(*opened.cursor(0)).epoch:
                break
            found.append(row.tokens.tobytes())
        opened.close()
        return found

    one, other = windows(tmp_path / "data"), windows(tmp_path / "out")
    assert one != other
    assert sorted(one) == sorted(other)


def refused(data: Path, tmp_path: Path, words: str, **options: Any) -> None:
    with pytest.raises(InputError, match=words):
        module.reshard(ReshardOptions(dataset_folder=str(data), output=tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(data, tmp_path, "--split-rows: must be at least 1", split_rows=0)
    refused(
        data,
        tmp_path,
        "--split-overlap: must be at least 0 and below the 10 characters",
        split_rows=10,
        split_overlap=10,
    )
    refused(data, tmp_path, "--split-overlap: is of rows that --split-rows cuts", split_overlap=3)
    refused(data, tmp_path, "--row-group-mb: must be above 0", row_group_bytes=0)
    refused(data, tmp_path, "make --row-group-mb smaller", row_group_bytes=10**6, memory_limit=240_000_000)
    nested = tmp_path / "nested"
    nested.mkdir()
    pq.write_table(pa.table({"doc": [{"text": "x" * 30}]}), nested / "a.parquet")
    refused(
        nested,
        tmp_path,
        "--split-rows: the text 'doc.text' lies in a column of structs",
        column="doc.text",
        split_rows=9,
    )
    shuffle = ["dumps", "shuffle", "--dataset-folder", str(data), "--output-folder", str(tmp_path / "out")]
    for wrong in (["--row-group-mb", "nan"], ["--row-group-mb", "1", "--row-group-size", "5"], ["--file-size", "big"]):
        with pytest.raises(SystemExit):
            main([*shuffle, *wrong])
    said = capsys.readouterr().err
    assert "nan is no size" in said
    assert "argument --file-size: invalid _finite value: 'big'" in said
