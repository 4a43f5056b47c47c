"""`relayrun report`: the attempts of a run, its loss, and both as a picture."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.monitoring import report
from relayrun.rundir.run import Run
from tests.history import make_history


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_history(tmp_path_factory.mktemp("report") / "run", lines=30, attempts=3)


@pytest.mark.slow
def test_the_table_the_curve_and_the_picture(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path), "--png", str(tmp_path / "relay.png")]) == 0
    out = capsys.readouterr().out
    assert "attempts of run" in out
    for iterations in ("1–10", "11–20", "21–30"):
        assert iterations in out
    assert "training loss" in out
    assert out.splitlines()[-1] == str(tmp_path / "relay.png")
    assert (tmp_path / "relay.png").read_bytes().startswith(b"\x89PNG")


def test_every_attempt_has_its_checkpoints_and_one_that_trained_nothing_says_so(run: Run, tmp_path: Path) -> None:
    copy = Run(Path(shutil.copytree(run.path, tmp_path / "run", symlinks=True)))
    copy.attempt(3).metrics.unlink()
    rows = report.read_report(copy).attempts
    assert [row.trained for row in rows] == [True, True, False]
    assert all(row.commits for row in rows)
    assert all(row.commits[-1][1] == row.durable_iteration for row in rows[:2])
    assert rows[0].start_time <= rows[1].start_time


def test_a_run_that_has_not_begun_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_history(tmp_path / "run", lines=10, attempts=1)
    shutil.rmtree(run.attempt(1).path)
    assert main(["report", str(run.path)]) == 1
    assert "no attempt of this run has begun" in capsys.readouterr().err
