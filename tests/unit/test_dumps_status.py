from __future__ import annotations

from pathlib import Path

import pytest

from relayrun import cli
from relayrun.tokenization.dumps import prepare
from relayrun.tokenization.jobs import begin, tokenize_dump
from relayrun.tokenization.settings import TokenizationSettings
from relayrun.tokenization.status import read_status

from .tokenization_corpus import TEXTS, train_tokenizer, write_parquet


def test_the_table_says_what_is_done_and_what_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    for name in "ab":
        write_parquet(tmp_path / "data" / f"{name}.parquet", list(TEXTS))
    prepare(tmp_path / "data", tmp_path / "meta", n_dumps=2)
    settings = TokenizationSettings(
        tokenizer=str(train_tokenizer(tmp_path / "tok" / "tokenizer.json")),
        tokenizer_name="t",
        dataset_name="d",
        metadata_folder=str(tmp_path / "meta"),
        output_folder=str(tmp_path / "tokens"),
        logs=str(tmp_path / "logs"),
    )
    begin(settings)
    row = tokenize_dump(settings, 1)
    waiting, done = read_status(tmp_path / "meta")
    assert (waiting.state, waiting.shards, waiting.of) == ("waiting", 0, 0)
    assert (done.state, done.shards, done.of, done.tokens) == ("done", 1, 1, row["total_tokens_processed"])
    assert done.tokens_per_second > 0
    capsys.readouterr()
    assert cli.main(["dumps", "status", str(tmp_path / "meta")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["0", "waiting", "-"]
    assert lines[2].split()[:4] == ["1", "done", "1/1", f"{done.tokens:,}"]
    assert lines[3].split()[:3] == ["total", "1/2", "done"]


def test_a_folder_without_dumps_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dumps", "status", str(tmp_path)]) == 1
    assert "there are no dumps here" in capsys.readouterr().err
