"""How lengths lie in files: curves, correlation and batch means of `relayrun data lengths`, and its picture."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.cli import main
from relayrun.tokens.order.document_lengths import CURVE_POINTS, measure_length_order
from tests import genomes


def test_the_figures_are_those_of_a_slow_reference() -> None:
    generator = np.random.default_rng(4)
    files = [(f"f{number}", generator.integers(1, 500, size)) for number, size in enumerate((130, 1, 0, 77))]
    found = measure_length_order(files, batch=10)
    everything = [int(length) for _, lengths in files for length in lengths]
    mean = sum(everything) / len(everything)
    variance = sum((length - mean) ** 2 for length in everything) / len(everything)
    products = [(a - mean) * (b - mean) for _, lengths in files for a, b in pairwise(lengths)]
    assert found.lag_1_correlation == pytest.approx(sum(products) / len(products) / variance)
    batches = [sum(lengths[at : at + 10]) / 10 for _, lengths in files for at in range(0, len(lengths) // 10 * 10, 10)]
    assert found.batch_mean_variance_ratio == pytest.approx(np.var(batches) / (variance / 10))
    assert [(curve.file, curve.documents) for curve in found.curves] == [("f0", 130), ("f1", 1), ("f3", 77)]
    first = found.curves[0]
    assert len(first.means) == len(first.positions) == CURVE_POINTS
    assert sum(first.means) / CURVE_POINTS == pytest.approx(files[0][1].mean(), rel=0.05)
    assert found.curves[1].means == [float(files[1][1][0])]


def test_a_shuffle_is_told_from_sorted_files() -> None:
    lengths = np.random.default_rng(1).lognormal(7.7, 1.0, 20_000).astype(np.int64)
    ordered = np.sort(lengths)[::-1]
    in_files = [(str(number), part) for number, part in enumerate(np.split(ordered, 8))]
    found, shuffled = measure_length_order(in_files, batch=64), measure_length_order([("all", lengths)], batch=64)
    assert found.lag_1_correlation is not None
    assert shuffled.lag_1_correlation is not None
    assert shuffled.lag_1_noise is not None
    assert found.batch_mean_variance_ratio is not None
    assert shuffled.batch_mean_variance_ratio is not None
    assert found.lag_1_correlation > 0.9
    assert abs(shuffled.lag_1_correlation) < 2 * shuffled.lag_1_noise
    assert found.batch_mean_variance_ratio > 30
    assert 0.6 < shuffled.batch_mean_variance_ratio < 1.6


def test_what_has_no_order_has_no_figures() -> None:
    for lengths in ([], [3], [5, 5, 5]):
        found = measure_length_order([("a", np.array(lengths, np.int64))], batch=1)
        assert (found.lag_1_correlation, found.batch_mean_variance_ratio) == (None, None)


@pytest.mark.slow
def test_before_and_after_a_shuffle_in_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = genomes.write(tmp_path / "before", files=3, count=300)
    (tmp_path / "after").mkdir()
    np.random.default_rng(1).shuffle(texts)
    pq.write_table(pa.table({"text": texts}), tmp_path / "after" / "0.parquet")
    folders = [str(tmp_path / name) for name in ("before", "after")]
    picture = tmp_path / "lengths.svg"
    command = ["data", "lengths", *folders, "--window", "256", "--batch", "16"]
    assert main([*command, "--json", "--picture", str(picture)]) == 0
    before, after = json.loads(capsys.readouterr().out)
    assert (before["folder"], after["folder"]) == (folders[0], folders[1])
    assert before["documents"] == after["documents"] == 900
    assert before["total"] == after["total"] == sum(map(len, texts))
    assert [len(found["order"]["curves"]) for found in (before, after)] == [3, 1]
    assert before["order"]["lag_1_correlation"] > 0.6 > 0.2 > after["order"]["lag_1_correlation"]
    assert before["order"]["batch_mean_variance_ratio"] > 5 > after["order"]["batch_mean_variance_ratio"]
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    assert "position in the file" in drawn
    assert main([*command, "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert picture.read_text() == drawn
    assert f"{folders[1]}:\n900 documents" in printed
    assert "neighbours in 3 files: lag-1 correlation 0.7" in printed
    assert "batches of 16 neighbours: variance of means / of independent draws" in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--picture", "lengths.gif"], "'lengths.gif' names no kind of picture"),
        (["--batch", "0"], "1 document or more"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["data", "lengths", str(tmp_path / "nothing"), *options]) == 1
    assert words in capsys.readouterr().err
