"""`relayrun save` and `relayrun stop`, on chains of the local scheduler."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from relayrun import cli
from relayrun.cli.run import stop
from relayrun.control.chain import jobs
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.records import AttemptEnd, SuccessorJob
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler import slurm_commands
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.control.scheduler.local_queue import LocalQueue
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import RunDirError, user_name
from relayrun.submit import submission
from relayrun.watch.status import queue
from tests.waiting import wait_for

from .conftest import MakeRun
from .fake_slurm import FakeSlurm


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
    assert stop_reason(run) == f"stopped by {user}"
    assert scheduler.jobs(plan) == []
    assert [path.name for path in run.triggers.iterdir()] == ["exit.done"]
    assert json.loads((run.triggers / "exit.done").read_text())["user"] == user
    scheduler.run_queue(pytest.fail)
    assert run.attempt_numbers() == []
    assert len(LocalScheduler(other).jobs(other_plan)) == 1
    assert cli.main(["stop", str(run.path)]) == 0  # once more changes nothing
    assert stop_reason(run) == f"stopped by {user}"
    assert cli.main(["save", str(run.path)]) == 1
    assert f"the chain of this run has ended: stopped by {user}" in capsys.readouterr().err


def test_a_job_that_starts_in_spite_of_a_stop_ends_at_once(make_run: MakeRun) -> None:
    """Between the look at the queue and the cancel a job may start: it finds STOP or the trigger."""
    run, plan = make_run()
    scheduler = LocalScheduler(run)
    stop.request_stop(run, scheduler, user="ann")
    scheduler.submit(plan, run.job_script, options={})
    scheduler.run_queue(lambda _event: None)
    assert run.attempt_numbers() == []
    assert stop_reason(run) == "stopped by ann"
    assert scheduler.jobs(plan) == []


@pytest.mark.slow
def test_save_and_stop_of_a_running_attempt(make_run: MakeRun) -> None:
    run, plan = make_run("--steps=1000", total_steps=1000)
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    words: list[str] = []

    def steer_it() -> None:
        wait_for(run.attempt(1).metrics.exists)
        words.append(stop.request_save(run, scheduler))
        words.append(stop.request_stop(run, scheduler, user="ann"))

    thread = threading.Thread(target=steer_it)
    thread.start()
    scheduler.run_queue(lambda _event: None)
    thread.join(300)
    assert words[0].startswith("job 1 saves after the step that is under way and goes on; the answer will lie in ")
    assert words[1] == "job 1 saves after the step that is under way, cancels what is queued and leaves"
    record = AttemptEnd.read(run.attempt(1).end)
    assert record is not None
    assert (record.cause, record.durable_iteration) == ("exit", resume_point(run).iteration)
    assert resume_point(run).iteration > 0
    assert scheduler.jobs(plan) == []
    assert run.stop.exists()


def test_save_is_refused_where_no_job_will_do_it(make_run: MakeRun) -> None:
    run, plan = make_run()
    scheduler = LocalScheduler(run)
    with pytest.raises(RunDirError, match="no job of this run is running or queued"):
        stop.request_save(run, scheduler)
    assert list(run.triggers.iterdir()) == []
    scheduler.submit(plan, run.job_script, options={})
    assert stop.request_save(run, scheduler).startswith("no job runs now; job 1 answers when it has started")
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


def test_a_cancel_without_an_answer_says_what_was_done(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said `squeue: no answer within 10 s`: STOP was written, and the queued job stayed."""
    run, plan = make_run()
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={}, delay=600)
    (job_id,) = (job.id for job in scheduler.jobs(plan))

    def cancel(self: LocalScheduler, job_id: str) -> None:
        raise slurm_commands.TimedOutError("scancel: no answer within 120 s")

    monkeypatch.setattr(LocalScheduler, "cancel", cancel)
    assert cli.main(["cancel", str(run.path)]) == 1
    said = capsys.readouterr().err
    assert (
        "error: scancel: no answer within 120 s; cancelled: no job; STOP is written: a queued job ends at its start"
        in said
    )
    assert "call `relayrun cancel` again when the scheduler answers" in said
    assert run.stop.exists()
    monkeypatch.undo()
    assert cli.main(["cancel", str(run.path)]) == 0
    assert f"cancelled {job_id}" in capsys.readouterr().out


def test_a_cancel_that_gets_no_answer_half_way_names_the_jobs_that_are_cancelled(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, slurm = on_slurm(make_run, tmp_path, monkeypatch)
    cancel = Slurm.cancel

    def cancelled(self: Slurm, job_id: str) -> None:
        if job_id == "1":
            raise slurm_commands.TimedOutError("scancel: no answer within 120 s")
        cancel(self, job_id)

    monkeypatch.setattr(Slurm, "cancel_together", lambda *_: False)
    monkeypatch.setattr(Slurm, "cancel", cancelled)
    assert cli.main(["cancel", str(run.path)]) == 1
    assert "no answer within 120 s; cancelled: 2; STOP is written" in capsys.readouterr().err
    assert states(slurm)[:2] == ["RUNNING", "CANCELLED"]


def test_cancel_stop_save_and_submit_are_orders_of_a_person(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each command of Slurm has as long to answer as in a job."""
    run, plan = make_run(scheduler="slurm")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for scheduler in (queue.run_scheduler(run), submission._scheduler(plan, run)):
        assert isinstance(scheduler, Slurm)
        assert scheduler._ordered


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written any more, not even STOP; only an empty file can be made."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("relayrun.control.rundir.run.write_atomic", refuse)
    monkeypatch.setattr("relayrun.control.rundir.triggers.write_json", refuse)


def on_slurm(make_run: MakeRun, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, FakeSlurm]:
    """A run whose job runs, with another one and a fallback job behind it."""
    run, plan = make_run(scheduler="slurm", fallback_job=True)
    slurm = FakeSlurm(folder / "jobs.json", plan.job_name)
    monkeypatch.setattr(slurm_commands.subprocess, "run", lambda command, **given: slurm.run(command, given["input"]))
    slurm.add(state="RUNNING")
    slurm.add()
    slurm.add(plan.fallback_job_name, after="2")
    return run, slurm


def states(slurm: FakeSlurm) -> list[str]:
    return [job["state"] for job in slurm.jobs().values()]


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("changes", [True, False], ids=["", "a site lets nobody change a job"])
def test_cancel_needs_no_room_on_the_disk(
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: bool,
) -> None:
    run, slurm = on_slurm(make_run, tmp_path, monkeypatch)
    slurm.unchangeable = not changes
    assert cli.main(["cancel", str(run.path)]) == 0
    assert states(slurm) == ["CANCELLED"] * 3
    said = capsys.readouterr().out
    assert f"could not be written (No space left on device, in {run.path})" in said
    assert "cancelled 1 (running), 2 (pending), and the fallback job 3" in said
    if changes:
        assert [job["comment"] for job in slurm.jobs().values()][:2] == [
            f"relayrun:stopped-by={user_name(os.geteuid())}"
        ] * 2


@pytest.mark.parametrize("fallback", [True, False])
def test_the_jobs_of_a_chain_are_cancelled_with_one_order(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    run, slurm = on_slurm(make_run, tmp_path, monkeypatch)
    if not fallback:
        slurm.set("3", state="CANCELLED")
    commands: list[list[str]] = []
    fake = slurm_commands.subprocess.run

    def recorded(command: list[str], **given: str) -> object:
        commands.append(command)
        return fake(command, **given)  # type: ignore[call-overload]

    monkeypatch.setattr(slurm_commands.subprocess, "run", recorded)
    assert cli.main(["cancel", str(run.path)]) == 0
    assert [command for command in commands if command[0] == "scancel"] == [
        ["scancel", *(["3"] if fallback else []), "2", "1"]
    ]
    assert states(slurm) == ["CANCELLED"] * 3


def test_save_on_a_full_disk_is_one_error_with_the_way_out(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = on_slurm(make_run, tmp_path, monkeypatch)

    opened = os.open

    def refuse(path: str, *words: Any, **more: Any) -> int:
        if path == "save":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, *words, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert cli.main(["save", str(run.path)]) == 1
    said = capsys.readouterr().err
    assert f"error: {run.triggers}: the trigger cannot be made: No space left on device" in said
    assert f"relayrun status {run.path}` says what could go" in said


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("touched", [True, False])
def test_stop_needs_no_room_on_the_disk(
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    touched: bool,
) -> None:
    """An empty file can often be made on a full disk; not where there is no number for it either."""
    run, slurm = on_slurm(make_run, tmp_path, monkeypatch)
    if touched:
        slurm.set("1", state="PENDING")  # nobody is at work who would see it
    else:
        shutil.rmtree(run.triggers)
        run.triggers.symlink_to("/dev/null/triggers")  # not a directory: an error of the system
    assert cli.main(["stop", str(run.path)]) == 0
    assert states(slurm) == ["CANCELLED" if touched else "RUNNING", "CANCELLED", "CANCELLED"]
    said = capsys.readouterr().out
    assert f"stopped by {user_name(os.geteuid())}, which could not be written" in said
    assert ("the ranks of job 1 are asked to save and leave" in said) == (not touched)
    assert slurm.jobs()["1"]["comment"] == f"relayrun:stopped-by={user_name(os.geteuid())}"


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "SIGNALING"])
@pytest.mark.parametrize("hears", [True, False])
def test_a_stop_without_files_says_of_every_job_whether_it_was_asked(
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    hears: bool,
) -> None:
    run, slurm = on_slurm(make_run, tmp_path, monkeypatch)
    slurm.set("1", state=state)
    shutil.rmtree(run.triggers)
    run.triggers.symlink_to("/dev/null/triggers")
    if not hears:
        trainer = SimpleNamespace(leave_signal=None)
        monkeypatch.setattr("relayrun.control.chain.jobs.trainer_of", lambda *_: trainer)
    assert cli.main(["stop", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert "no job was there" not in said
    assert ("the ranks of job 1 are asked to save and leave" in said) == hears
    assert ("job 1 (" in said and "`relayrun cancel` ends it" in said) == (not hears)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("verb", ["stop", "cancel"])
def test_a_run_directory_that_cannot_be_read_any_more_keeps_no_job(
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    verb: str,
) -> None:
    run, slurm = on_slurm(make_run, tmp_path, monkeypatch)

    def away(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    for name in ("jobs.stop_reason", "jobs.write_stop", "jobs.Lineage"):
        monkeypatch.setattr(f"relayrun.control.chain.{name}", away)
    monkeypatch.setattr("relayrun.cli.run.stop.read_stop", away)
    assert cli.main([verb, str(run.path)]) == 0
    assert states(slurm) == ["CANCELLED" if verb == "cancel" else "RUNNING", "CANCELLED", "CANCELLED"]
    assert f"could not be written ({os.strerror(number)}, in {run.path})" in capsys.readouterr().out


@pytest.mark.usefixtures("full")
def test_a_local_queue_on_a_full_disk_says_what_ends_it(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plan = make_run()
    LocalScheduler(run).submit(plan, run.job_script, options={})

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LocalQueue, "write_job", refuse)
    assert cli.main(["cancel", str(run.path)]) == 1
    said = capsys.readouterr().err
    assert f"{run.path / 'local'}: job 1 is not cancelled: No space left on device" in said
    assert "Ctrl-C" in said


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
    assert stop_reason(run) == f"cancelled by {user}"
    assert cli.main(["cancel", str(run.path)]) == 0  # once more changes nothing
    assert f"the chain has ended: cancelled by {user}; no job was there" in capsys.readouterr().out


@pytest.mark.parametrize(("by", "told"), [("ann", "ann"), ("", jobs.SOMEBODY)])
def test_slurm_keeps_who_cancelled_a_successor_where_the_disk_takes_no_record(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, by: str, told: str
) -> None:
    attempt = make_run()[0].attempt(1)
    attempt.path.mkdir(parents=True)
    SuccessorJob(job_id="2", time=0.0).write(attempt.successor)
    scheduler = Mock(cancelled=Mock(return_value=True), cancelled_by=Mock(return_value=by))
    scheduler.current_job_id.return_value, scheduler.query.return_value = "1", None
    monkeypatch.setattr(SuccessorJob, "write", Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
    assert jobs.record_cancelled_successor(attempt, scheduler) is not None
    scheduler.note_stop.assert_called_once_with("1", told)
