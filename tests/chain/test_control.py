"""`relayrun save` and `relayrun stop`, on chains of the local scheduler."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from relayrun import cli
from relayrun.cli import control
from relayrun.errors import RunDirError, user_name
from relayrun.rundir.lineage import durable
from relayrun.rundir.records import End
from relayrun.scheduler.local import LocalScheduler
from tests.waiting import wait_for

from .conftest import MakeRun


def test_stop_of_a_queued_run_leaves_nothing_queued_and_starts_nothing(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plan = make_run()
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={}, delay=600)
    other, other_plan = make_run(folder="other")
    LocalScheduler(other).submit(other_plan, other.job_script, options={})
    assert cli.main(["stop", str(run.path)]) == 0
    user = user_name(os.geteuid())
    assert capsys.readouterr().out == f"the chain has ended: stopped by {user}; nothing is queued\n"
    assert run.stop.read_text().startswith(f"stopped by {user}\n")
    assert scheduler.jobs(plan) == []
    assert [path.name for path in run.triggers.iterdir()] == ["exit.done"]
    assert json.loads((run.triggers / "exit.done").read_text())["user"] == user
    scheduler.run_queue(pytest.fail)
    assert run.attempt_numbers() == []
    assert len(LocalScheduler(other).jobs(other_plan)) == 1
    assert cli.main(["stop", str(run.path)]) == 0  # once more changes nothing
    assert run.stop.read_text().startswith(f"stopped by {user}\n")
    assert cli.main(["save", str(run.path)]) == 1
    assert f"the chain of this run has ended: stopped by {user}" in capsys.readouterr().err


def test_a_job_that_starts_in_spite_of_a_stop_ends_at_once(make_run: MakeRun) -> None:
    """Between the look at the queue and the cancel a job may start: it finds STOP or the trigger."""
    run, plan = make_run()
    scheduler = LocalScheduler(run)
    control.stop(run, scheduler, user="ann")
    scheduler.submit(plan, run.job_script, options={})
    scheduler.run_queue(lambda _event: None)
    assert run.attempt_numbers() == []
    assert run.stop.read_text().startswith("stopped by ann\n")
    assert scheduler.jobs(plan) == []


@pytest.mark.slow
def test_save_and_stop_of_a_running_attempt(make_run: MakeRun) -> None:
    run, plan = make_run("--steps=1000", total_steps=1000)
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    words: list[str] = []

    def steer_it() -> None:
        wait_for(run.attempt(1).metrics.exists)
        words.append(control.save(run, scheduler))
        words.append(control.stop(run, scheduler, user="ann"))

    thread = threading.Thread(target=steer_it)
    thread.start()
    scheduler.run_queue(lambda _event: None)
    thread.join(300)
    assert words[0].startswith("job 1 saves after the step that is under way and goes on; the answer will lie in ")
    assert words[1] == "job 1 saves after the step that is under way, cancels what is queued and leaves"
    record = End.read(run.attempt(1).end)
    assert record is not None
    assert (record.cause, record.durable_iteration) == ("exit", durable(run).iteration)
    assert durable(run).iteration > 0
    assert scheduler.jobs(plan) == []
    assert run.stop.exists()


def test_save_is_refused_where_no_job_will_do_it(make_run: MakeRun) -> None:
    run, plan = make_run()
    scheduler = LocalScheduler(run)
    with pytest.raises(RunDirError, match="no job of this run is running or queued"):
        control.save(run, scheduler)
    assert list(run.triggers.iterdir()) == []
    scheduler.submit(plan, run.job_script, options={})
    assert control.save(run, scheduler).startswith("no job runs now; job 1 answers when it has started")
    assert (run.triggers / "save").exists()


def test_a_scheduler_that_does_not_answer_leaves_the_trigger_to_the_next_job(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _plan = make_run(scheduler="slurm")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["stop", str(run.path)]) == 0
    assert "squeue is not installed here" in capsys.readouterr().out
    assert (run.triggers / "exit").exists()
    assert not run.stop.exists()


@pytest.mark.slow
def test_cancel_ends_what_runs(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run, plan = make_run("--steps=100000", total_steps=100_000)
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    codes: list[int] = []

    def cancel() -> None:
        wait_for(run.attempt(1).metrics.exists)
        codes.append(cli.main(["cancel", str(run.path)]))

    thread = threading.Thread(target=cancel)
    thread.start()
    scheduler.run_queue(lambda _event: None)
    thread.join(300)
    user = user_name(os.geteuid())
    assert codes == [0]
    assert f"the chain has ended: cancelled by {user}; cancelled " in capsys.readouterr().out
    assert scheduler.jobs(plan, anyone=True) == []
    assert run.stop.read_text().startswith(f"cancelled by {user}\n")
    assert cli.main(["cancel", str(run.path)]) == 0  # once more changes nothing
    assert f"the chain has ended: cancelled by {user}; no job was there" in capsys.readouterr().out
