"""`relayrun resume`: the settings of the last submit, without typing them again."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import Run, stop_reason, write_stop
from relayrun.control.scheduler import job_history
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.errors import ConfigError
from relayrun.submit.check import existing_run
from relayrun.trust import folder_identity
from tests.history import make_history
from tests.workspace import Workspace


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that was submitted with an override, and whose chain has ended."""

    def end_of_queue(scheduler: LocalScheduler, *_: Any) -> None:
        scheduler.cancel("1")

    monkeypatch.setattr(LocalScheduler, "run_queue", end_of_queue)
    workspace = Workspace.make(tmp_path)
    run = Run(tmp_path / "run")
    assert main(["submit", str(workspace.config("run")), "--set", "training.steps=33"]) == 0
    write_stop(run, ChainEnd("failed", "a rank found a wrong tokenizer"))
    return run


def test_a_run_goes_on_as_it_was_submitted_last(submitted: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(submitted.path)]) == 0
    assert f"run directory {submitted.path}\n" in capsys.readouterr().out
    assert stop_reason(submitted) is None
    assert submitted.revisions() == [1]
    assert Plan.load(submitted).total_steps == 33


def test_what_changes_is_said_and_makes_a_revision(
    submitted: Run, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO")
    assert main(["resume", str(submitted.path), "--set", "job.time=20"]) == 0
    assert [message for message in caplog.messages if "changed" in message] == ["changed: job.time: '5' -> '20'"]
    assert sorted(submitted.revisions()) == [1, 2]
    assert Plan.load(submitted).time_limit == 1200


def test_the_budget_of_a_run_with_jobs_is_changed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queued: list[bool] = []
    monkeypatch.setattr(LocalScheduler, "run_queue", lambda *_: queued.append(True))
    monkeypatch.setattr(job_history, "ANSWER_SECONDS", 1e9)
    run, path = Run(tmp_path / "run"), str(Workspace.make(tmp_path).config("run", chain={"max_node_hours": 2.0}))
    assert main(["submit", path]) == 0
    before = Plan.load(run)
    assert main(["resume", str(run.path), "--set", "chain.max_node_hours=3", "--set", "chain.deadline=2099-01-31"]) == 0
    assert f"the jobs of {run.path} obey within a minute" in capsys.readouterr().out
    chain = replace(before.chain, max_node_hours=3.0, deadline="2099-01-31")
    assert Plan.load(run) == replace(before, chain=chain, config_revision=2)
    assert resolve.read_resolved_config(run.config_revision(2)).chain.max_node_hours == 3
    for more in (["--set", "training.steps=44"], []):
        assert main(["resume", str(run.path), "--set", "chain.max_node_hours=4", *more]) == (1 if more else 0)
        assert ("this run has jobs already: " in capsys.readouterr().err) == bool(more)
    assert main(["resume", str(run.path)]) == 1  # nothing that could be changed
    monkeypatch.setattr(job_history, "ANSWER_SECONDS", -1e9)  # its terminal has gone, and nobody starts the job
    assert main(["resume", str(run.path), "--set", "chain.max_node_hours=5"]) == 0
    assert (len(queued), sorted(run.revisions())) == (2, [1, 2, 3, 4])


def test_a_run_that_was_moved_goes_on_where_it_is(submitted: Run, tmp_path: Path) -> None:
    moved = Run(submitted.path.rename(tmp_path / "elsewhere"))
    assert main(["resume", str(moved.path)]) == 0
    assert resolve.read_resolved_config(moved.config_revision(2)).run_dir == str(moved.path)
    assert str(moved.path) in moved.job_script.read_text()


@pytest.mark.parametrize("plan", ["its", "none", "mine", "guessed", "of no birth"])
def test_a_copy_goes_on_only_with_a_config_that_its_owner_names(
    submitted: Run, tmp_path: Path, plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lies in a copy may be of anybody, and his plan may name me."""
    copy = Run(Path(shutil.copytree(submitted.path, tmp_path / "copy")))
    if plan == "none":
        copy.plan.unlink()
    elif plan == "mine":
        copy.plan.write_text(copy.plan.read_text().replace(f'"owner": {os.geteuid()}', '"owner": null'))
    elif plan != "its":  # who sees the number of a folder made just before knows the next one
        number, birth = copy.path.stat().st_ino, None if plan == "of no birth" else folder_identity(submitted.path)[1]
        copy.plan.write_text(json.dumps(json.loads(copy.plan.read_text()) | {"directory": [number, birth]}))
    before = sorted(copy.path.rglob("*"))
    assert main(["resume", str(copy.path)]) == 1
    assert ("this is a copy of a run" if plan != "none" else "it has no plan.json") in capsys.readouterr().err
    config = [str(copy.config_revision(1)), "--set", f"run_dir={copy.path}", "--resume"]
    assert (main(["submit", *config]) == 1) == (plan != "none")
    if plan != "none":
        assert "remove its plan.json if you moved a run of your own" in capsys.readouterr().err
        assert sorted(copy.path.rglob("*")) == before
        copy.plan.unlink()
        assert main(["submit", *config]) == 0
    assert Plan.load_trusted(copy).owner == os.geteuid()


def test_a_dry_run_writes_nothing(submitted: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(submitted.path.rglob("*"))
    assert main(["resume", str(submitted.path), "--dry-run"]) == 0
    assert "#SBATCH" in capsys.readouterr().out
    assert sorted(submitted.path.rglob("*")) == before
    assert stop_reason(submitted) is not None


def test_a_run_that_stands_where_it_is_to_stop_is_refused(tmp_path: Path) -> None:
    made = make_history(tmp_path / "history", lines=30, attempts=3)
    reached = resume_point(made).iteration
    path = Workspace.make(tmp_path).config("run", training={"steps": 1000})
    with pytest.raises(ConfigError, match=f"training.stop_after: the run stands at iteration {reached} already"):
        existing_run.check_stop_after(resolve.load_run_config(path, [f"training.stop_after={reached}"]), made)
    existing_run.check_stop_after(resolve.load_run_config(path, [f"training.stop_after={reached + 1}"]), made)
    existing_run.check_stop_after(resolve.load_run_config(path), made)


def test_a_run_that_there_is_not_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "no/such"]) == 1
    assert "no/such: there is no such run" in capsys.readouterr().err
