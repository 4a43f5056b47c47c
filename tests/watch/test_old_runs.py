"""Runs whose chains ended long ago: tables and metrics of all runs leave them out, and say how many."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from relayrun import places
from relayrun.cli import main
from relayrun.control.rundir.find_runs import OLD_SECONDS, all_run_folders, without_old_runs
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import write_stop
from tests.history import make_history


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a run that has not ended, one that ended now, and one that ended long ago."""
    (tmp_path / places.PROJECT_MARKER).touch()
    monkeypatch.chdir(tmp_path)
    for name in ("living", "new", "old"):
        run = make_history(tmp_path / "logs" / "runs" / "p" / name, lines=20, attempts=2)
        run.plan.write_text(json.dumps(json.loads(run.plan.read_text()) | {"run": f"p/{name}"}))
        if name != "living":
            write_stop(run, ChainEnd(state="done", reason="the last iteration is saved"))
        if name == "old":
            then = time.time() - OLD_SECONDS - 60
            os.utime(run.stop, (then, then))
    return tmp_path


def test_the_table_leaves_out_what_ended_long_ago(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "p/living" in shown
    assert "p/new" in shown
    assert "p/old" not in shown
    assert "1 runs whose chains ended more than 30 days ago: --all" in shown
    assert main(["status", "--all"]) == 0
    assert "p/old" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert main(["status", "p/old"]) == 0, "a run that is named is shown"


def test_metrics_of_a_folder_leave_out_what_ended_long_ago(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    for names in ([], ["logs/runs"]):
        assert main(["metrics", *names]) == 0
        text = capsys.readouterr().out
        assert 'run="p/new"' in text
        assert "p/old" not in text
    assert main(["metrics", "p/old"]) == 0
    assert "relayrun_run_state" in capsys.readouterr().out


def test_a_run_whose_stop_cannot_be_read_is_kept(project: Path) -> None:
    runs = all_run_folders()
    assert {run.path.name for run in without_old_runs(runs, now=time.time())} == {"living", "new"}
    assert len(without_old_runs(runs, now=0.0)) == 3
