"""A run directory that was moved between two submits goes on where it was."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.control.chain import supervisor
from relayrun.control.rundir.checkpoint_records import ResumePoint, is_checkpoint_of, resume_point
from relayrun.control.rundir.records import AttemptStart, CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import job_history
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.errors import RunDirError
from relayrun.submit import submission
from relayrun.watch.status import queue, run_status
from tests.history import began
from tests.workspace import Workspace

from .conftest import MakeRun
from .test_local_chain import ends, logs, run_chain


@pytest.mark.slow
def test_a_moved_run_goes_on_from_its_checkpoint(make_run: MakeRun, tmp_path: Path) -> None:
    run, plan = make_run("--steps=5", total_steps=10, auto_requeue=False)
    run_chain(run, plan)
    assert resume_point(run).iteration == 5
    moved, new_plan = make_run("--steps=10", folder="elsewhere", total_steps=10, submitted_after_attempt=1)
    script = moved.job_script.read_text()
    shutil.rmtree(moved.path)
    os.rename(run.path, moved.path)
    new_plan.write(moved.plan)  # as a submit renders them anew
    moved.job_script.write_text(script)
    moved.stop.unlink(missing_ok=True)
    run_chain(moved, new_plan)
    begin = moved.attempt(2).read_begin()
    assert begin is not None, logs(moved)
    assert (begin.base_iteration, begin.base_path) == (5, str(moved.checkpoint(5)))
    assert ends(moved)[-1].cause == "done", logs(moved)
    assert resume_point(moved) == ResumePoint(iteration=10, path=str(moved.checkpoint(10)))
    assert not run.path.exists()


def trained(workspace: Workspace, folder: str) -> Run:
    """A run that was submitted and saved iteration 5, and has no job any more."""
    submission.submit_run(resolve.load_run_config(workspace.config(folder)))
    run = workspace.run(folder)
    began(run, 1, base=0)
    attempt = run.attempt(1)
    run.checkpoint(5).mkdir(parents=True)
    (run.checkpoint(5) / "data").write_bytes(b"12345")
    path = str(run.checkpoint(5))
    attempt.append_commit(
        CheckpointCommit(iteration=5, path=path, consumed_samples=40, time=1.0, seconds=1.0, files={"data": 5})
    )
    return run


@pytest.mark.slow
def test_a_submit_after_a_move_renders_all_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job that was queued in the old place is a local one that nobody starts any more."""
    monkeypatch.setattr(job_history, "ANSWER_SECONDS", -1.0)
    workspace = Workspace.make(tmp_path)
    old = trained(workspace, "old-place")
    new = Run(tmp_path / "new-place")
    os.rename(old.path, new.path)
    found = run_status.read_run_status(new, queue.query_queue(new), now=0.0)
    assert (found.state, found.durable_path) == ("failed", str(new.checkpoint(5)))
    assert found.go_on == f"relayrun resume {new.path}"
    monkeypatch.setattr(LocalScheduler, "run_queue", lambda *_: None)
    assert main(["resume", str(new.path)]) == 0
    assert resume_point(new) == ResumePoint(iteration=5, path=str(new.checkpoint(5)))
    for path in (new.plan, new.job_script):
        assert "old-place" not in path.read_text()


def test_a_copy_of_a_run_does_not_reach_into_the_original(tmp_path: Path) -> None:

    old = trained(Workspace.make(tmp_path), "original")
    copy = Run(tmp_path / "copy")
    shutil.copytree(old.path, copy.path)
    assert resume_point(copy) == ResumePoint(iteration=5, path=str(copy.checkpoint(5)))
    assert is_checkpoint_of(copy, resume_point(copy))
    assert [commit.path for commit in copy.attempt(1).read_commits()] == [str(copy.checkpoint(5))]


def test_another_runs_checkpoint_stays_where_it_is(tmp_path: Path) -> None:
    old = trained(Workspace.make(tmp_path), "other")
    run = Run(tmp_path / "run")
    run.attempt(1).path.mkdir(parents=True)
    begin = old.attempt(1).read_begin()
    assert begin is not None
    AttemptStart(**(vars(begin) | {"base_iteration": 5, "base_path": str(old.checkpoint(5))})).write(
        run.attempt(1).begin
    )
    assert resume_point(run) == ResumePoint(iteration=5, path=str(old.checkpoint(5)))


def test_a_job_of_the_old_place_is_told_what_has_become_of_it(tmp_path: Path) -> None:
    with pytest.raises(RunDirError) as error:
        supervisor.begin_attempt(Run(tmp_path / "old-place"))
    assert "moved" in (error.value.hint or "")
    assert "run_dir" in (error.value.hint or "")
