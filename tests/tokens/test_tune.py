"""`relayrun dumps tune`: real runs over the dataset's own files, and a recommendation."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import psutil
import pytest

from relayrun import cli
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.tune import TuningTrial, recommend_trial
from tests.tokenization_corpus import TEXTS, train_tokenizer, write_parquet


def trial(workers: int, batch_bytes: int, rate: float) -> TuningTrial:
    return TuningTrial(workers=workers, batch_bytes=batch_bytes, tokens_per_second=rate, worker_bytes=1)


def test_of_settings_that_are_about_as_fast_the_cheapest_is_recommended() -> None:
    trials = [trial(1, 4, 30.0), trial(4, 1, 98.0), trial(4, 4, 99.0), trial(8, 1, 100.0), trial(8, 4, 95.0)]
    assert recommend_trial(trials) == trials[1]
    assert recommend_trial(trials[:1]) == trials[0]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """One dump of two files with 60,000 documents each, and what is typed."""
    (tmp_path / "data").mkdir()
    (tmp_path / "temporary").mkdir()
    for name in "ab":
        write_parquet(tmp_path / "data" / f"{name}.parquet", list(TEXTS) * 500)
    prepare_dumps(tmp_path / "data", tmp_path / "meta")
    tokenizer = train_tokenizer(tmp_path / "tok" / "tokenizer.json")
    return [
        "dumps",
        "tune",
        str(tmp_path / "meta"),
        "--tokenizer-name-or-path",
        str(tokenizer),
        "--temp-dir",
        str(tmp_path / "temporary"),
    ]


@pytest.mark.alone
@pytest.mark.slow
def test_every_pair_is_measured_and_nothing_is_left(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*command, "--workers", "1", "2", "--batch-bytes", "100000", "--seconds", "1"]
    assert cli.main(asked) == 0
    head, one, two, advice, forecast = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["workers", "batch", "bytes"]
    for line, workers in ((one, 1), (two, 2)):
        cells = line.split()
        assert cells[:2] == [str(workers), "100,000"]
        assert float(cells[2]) > 0
        assert 0.05 < float(cells[4]) < 2
    assert re.fullmatch(
        r"recommended for this node: workers: [12], batch_bytes: 100000, and tasks: [12] or more", advice
    )
    assert re.fullmatch(r"all dumps, 0\.0 GB of files: .*, \d\.\d GB of memory on each", forecast)
    assert os.listdir(tmp_path / "temporary") == []
    assert not [child for child in psutil.Process().children(recursive=True) if "preprocess" in str(child.cmdline())]


@pytest.mark.slow
def test_an_error_of_the_run_is_the_error(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "--workers", "1", "--batch-bytes", "1000", "--column", "nope"]) == 1
    assert "no column 'nope'; there are: id, text" in capsys.readouterr().err


def test_what_makes_no_sense_is_one_error(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--workers", "0"]) == 1
    assert "positive numbers" in capsys.readouterr().err
    command[2] = str(tmp_path)
    assert cli.main(command) == 1
    assert "there are no dumps here" in capsys.readouterr().err


@pytest.mark.slow
def test_the_steps_of_a_pipeline_are_measured(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a reader of datatrove for endings of its own; its files are short, so the hours are known."""
    (tmp_path / "crawl").mkdir()
    for number in range(3):
        lines = "".join(json.dumps({"text": f"{text} {row}"}) + "\n" for row in range(20) for text in TEXTS if text)
        (tmp_path / f"crawl/{number}.lines.gz").write_bytes(gzip.compress(lines.encode()))
    prepare_dumps(tmp_path / "crawl", tmp_path / "crawl-dumps", endings=[".lines.gz"])
    (tmp_path / "data.yaml").write_text(
        f"tokenizer: {tmp_path}/tok\ntokenizer_name: t\ndataset_name: d\nmetadata_folder: {tmp_path}/crawl-dumps\n"
        f"output_folder: {tmp_path}/tokens\nreader: jsonl\npipeline:\n  - sampler: {{rate: 0.5}}\n"
        "cluster: {name: c, scheduler: slurm, cost_per_node_hour: 1000000, currency: CHF}\n"
    )
    command[2] = str(tmp_path / "crawl-dumps")
    asked = [*command, "--workers", "1", "--batch-bytes", "100000", "--seconds", "1", "--steps"]
    assert cli.main([*asked, str(tmp_path / "data.yaml")]) == 0
    forecast = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"all dumps, 0\.0 GB of files: about \S+ hours of one node \([\d,.]+ CHF\), 0\.\d GB of memory on each",
        forecast,
    )
