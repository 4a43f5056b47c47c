"""A time limit that start and save eat up: refused where it is known, said where it is measured."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relayrun.config.compose import resolve
from relayrun.control.chain_state import clock_ahead, count_attempts_without_time
from relayrun.control.rundir import time_limit
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChangedJobEnd, CheckpointCommit, StartTimes
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Job
from relayrun.errors import ConfigError
from relayrun.submit import submission
from tests.history import began, ended, make_history
from tests.plans import plan_with
from tests.workspace import Workspace


def attempt(run: Run, number: int, *, start: float | None, limit: float = 300.0, save: float = 0.0) -> None:
    """An attempt whose start took so many seconds, and its save."""
    folder = run.attempt(number)
    began(run, number, start_time=1000.0, job_end_time=1000.0 + limit, grace_period=30.0)
    if start is not None:
        StartTimes(process=1001.0, imported=1002.0, initialised=1003.0, loaded=1000.0 + start).write(folder.started)
    if save:
        path = run.checkpoint(number)
        path.mkdir(parents=True)
        folder.append_commit(
            CheckpointCommit(iteration=number, path=str(path), consumed_samples=1, time=0.0, seconds=save)
        )


def words(run: Run, number: int, *, now: float = 1100.0) -> str:
    return time_limit.explain_short_training_time(run.attempt(number), now=now)


def test_a_start_that_leaves_little_of_the_limit_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path)
    attempt(run, 1, start=200.0)
    assert words(run, 1) == (
        "of the time limit of 300 s the start took 200 s, and leaving is given 30 s: 70 s are left to train in; "
        "raise job.time"
    )
    attempt(run, 2, start=290.0)
    assert "nothing is left to train in" in words(run, 2)
    attempt(run, 3, start=50.0)
    assert words(run, 3) == ""


def test_a_limit_that_is_over_before_the_start_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path)
    attempt(run, 1, start=None)
    assert words(run, 1, now=1100.0) == ""  # it failed early
    assert words(run, 1, now=1300.0) == "the time limit of 300 s was over before the start was; raise job.time"


def test_where_slurm_gave_less_than_was_asked_nobody_is_told_to_ask_for_more(tmp_path: Path) -> None:
    run = Run(tmp_path)
    attempt(run, 1, start=200.0)
    for asked, advice in (
        (310.0, "raise job.time"),
        (3600.0, "job.time asks for 3600 s, and Slurm gave this job less"),
    ):
        assert time_limit.explain_short_training_time(run.attempt(1), now=1100.0, asked=asked).endswith(advice)
    attempt(run, 2, start=None)
    words = time_limit.explain_short_training_time(run.attempt(2), now=1300.0, asked=3600.0)
    assert words.endswith("before the start was; job.time asks for 3600 s, and Slurm gave this job less")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setattr(submission, "log_folder", lambda _: tmp_path / "root/logs")
    return Workspace.make(tmp_path)


def submit(workspace: Workspace, **sections: Any) -> None:
    submission.submit_run(resolve.load_run_config(workspace.config("run", **sections)), resume=True)


@pytest.mark.parametrize("setting", ["grace_period", "signal_seconds"])
def test_a_lead_that_is_not_below_the_limit_is_refused(workspace: Workspace, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"chain.{setting} 300 .*job.time .300 s."):
        submit(workspace, chain={setting: 300})
    assert not (workspace.run("run").path / "local").exists()
    submit(workspace, chain={setting: 299})


def test_a_limit_below_what_start_and_save_took_at_best_is_refused(workspace: Workspace) -> None:
    run = workspace.run("run")
    attempt(run, 1, start=400.0)
    attempt(run, 2, start=280.0, save=40.0)
    with pytest.raises(ConfigError, match=r"start took 280 s at best .* 40 s .*job.time .300 s.") as error:
        submit(workspace)
    assert "job.time" in (error.value.hint or "")
    assert not (run.path / "plan.json").exists()
    assert run.revisions() == []
    submit(workspace, job={"time": "6"})


def test_a_run_without_measurements_is_not_judged(workspace: Workspace) -> None:
    attempt(workspace.run("run"), 1, start=None)
    started = time.monotonic()
    submit(workspace)
    assert time.monotonic() - started < 60


def test_attempts_that_had_no_time_to_train_are_counted(tmp_path: Path) -> None:
    run = make_history(tmp_path / "run", lines=10, attempts=1)
    plan = Plan.load(run)
    for number, (start, no_time) in enumerate([(50.0, False), (245.0, True), (265.0, True)], start=2):
        attempt(run, number, start=start)
        assert time_limit.had_no_time(run.attempt(number)) is no_time
        ended(run, number, base=0, durable=number, no_time=no_time)
    attempt(run, 5, start=None)
    assert not time_limit.had_no_time(run.attempt(5))
    assert count_attempts_without_time(run, plan) == 2
    assert count_attempts_without_time(run, plan_with(plan, submitted_after_attempt=3)) == 1
    ChangedJobEnd(time=5000.0, why="").write(run.attempt(4).job_end)
    assert not time_limit.had_no_time(run.attempt(4))  # it was extended
    ended(run, 5, base=0, durable=5)
    assert count_attempts_without_time(run, plan) == 0


@pytest.mark.parametrize(
    ("script", "slurm", "ahead"),
    [
        (3.0, 4000.0, 0.0),  # nothing is asked
        (-3600.0, 3600.0, -3600.0),
        (3600.0, -3600.0, 3600.0),
        (300.0, 0.0, 0.0),  # a long prolog
        (-3600.0, None, 0.0),
        (None, 3600.0, 0.0),
    ],
)
def test_the_clock_of_a_node_is_compared_with_slurms(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: float | None,
    slurm: float | None,
    ahead: float,
) -> None:
    now = time.time()
    monkeypatch.setenv("RELAYRUN_SCRIPT_TIME", "" if script is None else str(now + script))
    scheduler = SimpleNamespace(clock=lambda: None if slurm is None else time.time() + slurm)
    job = Job(id="1", name="j", state="RUNNING", start_time=now)
    assert clock_ahead(job, scheduler) == pytest.approx(ahead, abs=2)  # type: ignore[arg-type]
    words = "3600 s behind Slurm's" if ahead < 0 else "3600 s ahead of Slurm's"
    assert (words in capsys.readouterr().err) == bool(ahead)
