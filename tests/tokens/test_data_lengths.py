"""`relayrun data lengths`: lengths, windows and padding of a folder of shards or of text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.cli import main
from relayrun.tokens.order import document_lengths as module
from relayrun.tokens.order.document_lengths import summarize_lengths
from relayrun.tokens.order.document_packing import PackedRows
from relayrun.tokens.order.document_windows import DocumentCut, DocumentWindows
from relayrun.tokens.shards.manifest import DatasetManifest
from relayrun.tokens.shards.shard import ShardWriter
from tests.workspace import Workspace


def test_shards_in_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, sizes in enumerate(([100, 3, 40], [7, 20])):
        writer = ShardWriter(tmp_path / "a" / f"s{number}", np.uint16)
        writer.add(np.zeros(sum(sizes)), sizes)
        writer.finish()
    assert main(["data", "lengths", str(tmp_path / "a"), "--window=24", "--overlap=4", "--specials=2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "5 documents, 170 tokens",
        "min 3, median 20, mean 34, p99 98, max 100",
        "40.0% of the documents, with 82.4% of the tokens, are longer than a window of 24",
        "11 windows, overlap 4",  # 6 + 1 + 2 + 1 + 1
        "padding of rows of 24, pad: 18.2%",
        "padding of rows of 24, split: 0.0%",
        "padding of rows of 24, greedy: 10.0%",
        "padding of rows of 24, first_fit: 10.0%",
        "padding of rows of 24, best_fit: 10.0%",
        "neighbours in 2 files: lag-1 correlation -0.4922 (of a shuffle: within 1.1547 of 0)",
    ]


def test_text_in_bytes_or_in_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Workspace.make(tmp_path / "workspace").folder / "tokenizer.json"
    (tmp_path / "a").mkdir()
    pq.write_table(pa.table({"text": ["\u00e4b", None, "a b c d"]}), tmp_path / "a" / "one.parquet")
    (tmp_path / "a" / "two.jsonl").write_text(json.dumps({"text": "abcd"}) + "\n")
    assert main(["data", "lengths", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert "3 documents, 14 bytes" in printed
    assert "min 3, median 4, mean 5, p99 7, max 7" in printed
    assert main(["data", "lengths", str(tmp_path / "a"), "--tokenizer", str(tokenizer)]) == 0
    assert "3 documents, 6 tokens" in capsys.readouterr().out


def test_what_it_says_is_what_the_order_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.random.default_rng(1).integers(1, 90, 400)
    writer = ShardWriter(tmp_path / "s", np.uint16)
    writer.add(np.zeros(sizes.sum()), sizes)
    writer.finish()
    cut = DocumentCut(window=32, overlap=5, bos=0, eos=0)
    windows = DocumentWindows(DatasetManifest.build([tmp_path / "s"]), cut)
    found = summarize_lengths(sizes, cut, 40)
    assert found.windows == found.packed_windows == len(windows)
    text = int(windows.sizes(0, len(windows)).sum())
    for packing, share in found.padding.items():
        assert share == 1 - text / (40 * len(PackedRows(windows, 40, packing)))
    monkeypatch.setattr(module, "WINDOWS_PER_BLOCK", 16)
    monkeypatch.setattr(module, "SAMPLED_BLOCKS", 20)
    part = summarize_lengths(sizes, cut, 40)
    assert part.packed_windows == 20 * 16 - (-len(windows) % 16)
    assert part.padding["split"] < part.padding["best_fit"] < part.padding["greedy"] < part.padding["pad"] < 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--overlap=8192"], "an overlap of 8192 does not fit windows with 8192 tokens of text"),
        (["--seq-length=100"], "a window of 8192 does not fit a row of 100"),
        ([], "no file below this folder ends in .idx, "),
    ],
)
def test_what_cannot_be_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["data", "lengths", str(tmp_path), *options]) == 1
    assert words in capsys.readouterr().err
