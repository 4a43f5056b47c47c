"""A chain that cannot go on says so: which job died, how and where, and the command that goes on."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.control.chain.requested_options import RequestedOptions
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import job_history
from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.job_history import JobEnd
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.submit import submission
from relayrun.watch import symptoms
from relayrun.watch.status import queue, run_status
from relayrun.watch.status.queue import QueueStatus
from relayrun.watch.status.run_status import RunStatus
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.watch.test_status import NOW, begin, commit, end, steps, text_of
from tests.workspace import Workspace

DIED = JobEnd(id="7", state="NODE_FAIL", exit_code="1", nodes="n1", end_time=NOW - 60, source="sacct")


@pytest.fixture
def run(make_run: MakeRun) -> Run:  # noqa: F811
    """Attempt 1 of job 7 has begun, trained and saved."""
    made, _plan = make_run(total_steps=50)
    begin(made, 1, start=NOW - 1200)
    steps(made, 1, 1, 12)
    commit(made, 1, 10, age=900)
    return made


def status(run: Run, queue: QueueStatus) -> RunStatus:
    return run_status.read_run_status(run, queue, now=NOW)


def words_of(found: RunStatus) -> str:
    return " ".join(text_of(found).split())


def test_an_attempt_whose_job_is_gone_without_a_successor(run: Run) -> None:
    found = status(run, QueueStatus(last_job=DIED))
    assert found.state == "failed"
    assert found.broken is not None
    for word in ("attempt 1", "job 7", "NODE_FAIL", "exit code 1", "n1", "nothing is queued"):
        assert word in found.broken, found.broken
    assert found.go_on == f"relayrun resume {run.path}"
    assert "go on" in text_of(found)
    assert "last job 7: NODE_FAIL, exit code 1, on n1, 60 s ago (sacct)" in words_of(found)


def test_an_attempt_behind_which_nothing_could_be_queued(run: Run) -> None:
    run.attempt(1).retry_successor.write_text("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: policy")
    words = "nothing could be queued behind it: sbatch: error: QOSMaxSubmitJobPerUserLimit sbatch: error: policy"
    assert words in (status(run, QueueStatus(last_job=DIED)).broken or "")


def test_an_end_without_a_successor_says_how_it_ended(run: Run) -> None:
    end(run, 1, "failed", "rank 1 on n1: CUDA error (exit code 1)", 10, progress=True)
    found = status(run, QueueStatus())
    assert found.state == "failed"
    assert "failed: rank 1 on n1: CUDA error" in (found.broken or "")


def test_a_first_job_that_died_before_its_begin(make_run: MakeRun) -> None:  # noqa: F811
    made, plan = make_run()
    LocalScheduler(made).submit(plan, made.job_script, options={})
    path = made.path / "local/job-0001.json"
    job = json.loads(path.read_text())
    path.write_text(json.dumps(job | {"state": "FAILED", "exit_code": 1, "start_time": 1.0, "end_time": 2.0}))
    log = Path(plan.log_folder) / f"{plan.job_name}-1.err"
    log.parent.mkdir()
    log.write_text("bash: no such file\n")
    found = status(made, queue.query_queue(made))
    assert found.state == "failed"
    for word in ("job 1", "FAILED", "before it began", str(log)):
        assert word in (found.broken or ""), found.broken


@pytest.mark.parametrize(
    ("cause", "state"), [("saved", "stopped"), ("done", "done"), ("failed", "failed"), ("unknown", "failed")]
)
def test_a_chain_of_one_job_that_ended_as_planned_is_not_broken(
    make_run: MakeRun,  # noqa: F811
    cause: str,
    state: str,
) -> None:
    made, _plan = make_run(auto_requeue=False)
    begin(made, 1)
    end(made, 1, cause, "time limit near", 0, progress=True)
    assert status(made, QueueStatus()).state == state


def test_a_fallback_job_goes_on_with_a_chain_that_has_no_other(run: Run) -> None:
    waits = Job(id="8", name="j-fallback", state="PENDING")
    found = status(run, QueueStatus(last_job=DIED, fallback_jobs=[waits], reasons={"8": "Resources"}))
    assert found.state == "queued"
    assert "fallback job 8 (pending: Resources)" in words_of(found)
    run.stop.write_text("fatal: loss nan\n")
    assert status(run, QueueStatus(fallback_jobs=[waits])).state == "stopped"


def test_a_fallback_job_that_never_starts_goes_on_with_nothing(run: Run) -> None:
    """Slurm takes a job for which its QOS demands more nodes, and lets it wait."""
    waits = Job(id="8", name="j-fallback", state="PENDING")
    found = status(run, QueueStatus(last_job=DIED, fallback_jobs=[waits], reasons={"8": "QOSMinNode"}))
    assert found.state == "failed"
    assert "job 7" in (found.broken or "")
    assert (found.broken or "").endswith("the fallback job 8 never starts: QOSMinNode")


def test_a_waiting_job_whose_reservation_has_ended_never_starts(run: Run) -> None:
    end(run, 1, "saved", "time limit near", 10, progress=True)
    gone = Job(id="8", name="j", state="RESV_DEL_HOLD")
    fallback = Job(id="9", name="j-fallback", state="RESV_DEL_HOLD")
    reasons = dict.fromkeys("89", "Reservation camp was deleted")
    found = status(run, QueueStatus(jobs=[gone], fallback_jobs=[fallback], reasons=reasons))
    assert found.state == "blocked"
    assert "job 8 never starts unless a person changes something: Reservation camp was deleted" in words_of(found)
    assert found.go_on == f"relayrun cancel {run.path} && relayrun resume {run.path} --set job.reservation=null"
    assert "queue 8 (resv_del_hold: Reservation camp was deleted)" in words_of(found)
    assert status(run, QueueStatus(jobs=[gone, Job(id="7", name="j", state="RUNNING")])).state == "running"


@pytest.mark.parametrize("state", ["REQUEUE_HOLD", "SPECIAL_EXIT"])
def test_a_job_that_is_held_in_another_way_is_blocked_and_shown_as_slurm_says_it(run: Run, state: str) -> None:
    held = Job(id="8", name="j", state=state)
    found = status(run, QueueStatus(jobs=[held], reasons={"8": "job requeued in held state"}))
    assert (found.state, found.go_on) == ("blocked", "scontrol release 8")
    assert f"8 ({state.lower()}: job requeued in held state)" in words_of(found)


def test_a_predecessor_that_does_not_leave_is_no_running_chain(run: Run) -> None:
    """A slow epilog keeps it COMPLETING for as long as it likes."""
    completing = Job(id="7", name="j", state="COMPLETING")
    assert status(run, QueueStatus(jobs=[completing])).state == "running"  # its end may be under way
    end(run, 1, "saved", "time limit near", 10, progress=True)
    assert status(run, QueueStatus(jobs=[completing])).state == "failed"
    assert status(run, QueueStatus(jobs=[completing, Job(id="8", name="j", state="PENDING")])).state == "queued"


def test_while_a_submit_is_under_way_nothing_is_broken(make_run: MakeRun) -> None:  # noqa: F811
    made, _plan = make_run()
    with open(made.path / ".submit.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status(made, QueueStatus()).state == "queued"
    assert status(made, QueueStatus()).state == "failed"


def test_a_stopped_chain_and_a_silent_scheduler_are_what_they_were(run: Run) -> None:
    assert status(run, QueueStatus(error="no answer")).state == "unknown"
    run.stop.write_text("fatal: loss nan\n")
    assert status(run, QueueStatus()).state == "stopped"


def test_the_json_says_the_same(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run.path), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["state"] == "failed"
    assert value["broken"]
    assert value["go_on"] == f"relayrun resume {run.path}"


def test_the_command_that_goes_on_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace.make(tmp_path)
    submission.submit_run(resolve.load_run_config(workspace.config("run")))
    made = workspace.run("run")
    for path in (made.path / "local").glob("job-*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "FAILED", "end_time": 2.0}))
    command = shlex.split(run_status.read_run_status(made, queue.query_queue(made), now=NOW).go_on or "")
    monkeypatch.setattr(LocalScheduler, "run_queue", lambda *_: None)
    assert main(command[1:]) == 0
    assert status(made, queue.query_queue(made)).state == "queued"
    assert made.revisions() == [1]


def test_a_local_queue_whose_terminal_has_gone_is_broken_and_a_submit_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace.make(tmp_path)
    config = resolve.load_run_config(workspace.config("run"))
    submission.submit_run(config)  # nobody runs its queue
    made = workspace.run("run")
    assert status(made, queue.query_queue(made)).state == "queued"  # somebody may be about to
    monkeypatch.setattr(job_history, "ANSWER_SECONDS", -1.0)
    found = status(made, queue.query_queue(made))
    assert found.state == "failed"
    assert "nobody runs" in (found.broken or "")
    assert submission.submit_run(config).job_id == "2"
    assert json.loads((made.path / "local/job-0001.json").read_text())["state"] == "CANCELLED"


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Only these commands of Slurm are installed; each notes that it was called."""
    folder.mkdir()
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\necho {name} \"$@\" >> '{folder}/called'\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin")


SACCT = """echo '41|FAILED|1:0|n1|2026-11-22T10:00:00|2026-11-22T10:00:01'
echo '42|CANCELLED by 0|0:0|None assigned|Unknown|2026-11-22T10:00:02'"""
SQUEUE = "case \"$*\" in *--states=all*) echo '41|FAILED|n1'; echo '42|CANCELLED|';; esac"
SCONTROL = "echo 'JobId=41 JobState=FAILED Reason=NonZeroExitCode ExitCode=1:0 EndTime=2026-11-22T10:00:01 NodeList=n1'"


def test_accounting_says_how_the_last_job_died(
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _plan = make_run(scheduler="slurm")
    commands(tmp_path / "bin", monkeypatch, sacct=SACCT, squeue=SQUEUE, scontrol=SCONTROL)
    found = status(made, queue.query_queue(made))
    assert found.last_job == JobEnd(
        id="41", state="FAILED", exit_code="1", nodes="n1", end_time=found.last_job.end_time, source="sacct"
    )
    assert "job 41 (FAILED, exit code 1, on n1) died before it began" in (found.broken or "")
    assert len((tmp_path / "bin/called").read_text().splitlines()) == 2  # squeue, sacct


def test_a_job_that_lost_a_node_on_its_way_ended_once(
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Accounting has a row for each number of nodes that it had."""
    made, _plan = make_run(scheduler="slurm")
    sacct = f"echo '41|RESIZING|0:0|n[1-2]|2026-11-22T09:00:00|2026-11-22T10:00:00'\n{SACCT}"
    commands(tmp_path / "bin", monkeypatch, sacct=sacct, squeue=SQUEUE, scontrol=SCONTROL)
    found = status(made, queue.query_queue(made)).last_job
    assert found is not None
    assert (found.id, found.state, found.nodes) == ("41", "FAILED", "n1")


@pytest.mark.slow
@pytest.mark.parametrize("sacct", [None, "echo Slurm accounting storage is disabled >&2; exit 1", "sleep 100"])
def test_without_accounting_the_controller_says_it(
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sacct: str | None,
) -> None:
    made, _plan = make_run(scheduler="slurm")
    monkeypatch.setattr(job_history, "ANSWER_SECONDS", 20.0 if sacct != "sleep 100" else 2.0)
    monkeypatch.setattr(job_history, "SILENT_COMMANDS", set())
    extra = {} if sacct is None else {"sacct": sacct}
    commands(tmp_path / "bin", monkeypatch, squeue=SQUEUE, scontrol=SCONTROL, **extra)
    found = status(made, queue.query_queue(made))
    assert found.last_job is not None
    assert (found.last_job.id, found.last_job.reason, found.last_job.source) == ("41", "NonZeroExitCode", "scontrol")
    assert ("sacct" in job_history.SILENT_COMMANDS) is (sacct == "sleep 100")


def test_what_nobody_remembers_is_no_error(
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _plan = make_run(scheduler="slurm")
    commands(tmp_path / "bin", monkeypatch, squeue="exit 0")
    found = status(made, queue.query_queue(made))
    assert (found.state, found.last_job) == ("failed", None)


def test_why_a_job_is_pending(
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, plan = make_run(scheduler="slurm")
    squeue = f"case \"$*\" in *%r*) echo '43|AssocGrpNodeLimit';; *) echo '43|{plan.job_name}|PENDING';; esac"
    commands(tmp_path / "bin", monkeypatch, squeue=squeue)
    found = status(made, queue.query_queue(made))
    assert (found.state, found.pending) == ("queued", {"43": "AssocGrpNodeLimit"})
    assert "43 (pending: AssocGrpNodeLimit)" in text_of(found)


def test_checkpoints_left_behind_by_a_fall_back_are_told_with_the_reason(run: Run) -> None:
    for iteration in (14, 16):
        commit(run, 1, iteration, age=100)
        (run.checkpoint(iteration) / "data").write_bytes(b"1")
    found = status(run, QueueStatus())
    assert [(entry.iteration, entry.quarantined) for entry in found.left_behind] == [(16, False), (14, False)]
    line = Lineage(run)
    line.quarantine(line.durable(), attempt=2)
    begin(run, 2, base=10)
    for found in (status(run, QueueStatus()), status(run, QueueStatus(jobs=[Job(id="8", name="j", state="RUNNING")]))):
        assert [(entry.iteration, entry.quarantined) for entry in found.left_behind] == [(16, True), (14, True)]
        assert found.left_behind[0].why == "data has 1 bytes, not 5"
    assert "iteration 10" in words_of(found)
    assert "16, 14 (in quarantine): data has 1 bytes, not 5" in words_of(found)
    run.checkpoint(18).mkdir()
    run.attempt(2).append_commit(
        CheckpointCommit(iteration=18, path=str(run.checkpoint(18)), consumed_samples=1, time=NOW, seconds=1.0)
    )
    assert status(run, QueueStatus()).left_behind == []  # they have been computed again


def test_what_a_person_changed_in_a_waiting_job_is_shown(run: Run) -> None:
    change = {"value": "low", "job": "8", "instead": "debug"}
    RequestedOptions(changes={"partition": change, "qos": {**change, "instead": ""}}).write(run.requests)
    shown = words_of(status(run, QueueStatus(jobs=[Job(id="8", name="j", state="PENDING")])))
    assert "changed partition is low instead of debug since job 8; qos is low since job 8" in shown


@pytest.mark.parametrize(
    ("reason", "mended_by"),
    [
        ("launch failed requeued held", "scontrol release 8"),  # a prolog failed
        ("DependencyNeverSatisfied", "scontrol update JobId=8 Dependency=singleton"),
        ("PartitionTimeLimit", "--set job.time=..."),
        ("InvalidQOS", "--set job.qos=..."),
    ],
)
def test_a_successor_that_never_starts_is_blocked_with_the_command_that_mends_it(
    run: Run, reason: str, mended_by: str
) -> None:
    waits = Job(id="8", name="j", state="PENDING")
    found = status(run, QueueStatus(jobs=[waits], reasons={"8": reason}))
    assert found.state == "blocked"
    assert (found.go_on or "").endswith(mended_by)
    at_work = status(run, QueueStatus(jobs=[Job(id="7", name="j", state="RUNNING"), waits], reasons={"8": reason}))
    assert (at_work.state, at_work.go_on) == ("running", found.go_on)


@pytest.mark.parametrize(
    ("state", "reason"), [("PENDING", "Resources"), ("PENDING", "AWordOfSlurm99"), ("THAWING", "")]
)
def test_a_job_of_which_the_word_is_not_known_is_shown_and_told_and_not_blocked(
    run: Run, state: str, reason: str
) -> None:
    found = status(run, QueueStatus(jobs=[Job(id="8", name="j", state=state)], reasons={"8": reason}))
    assert found.state == ("queued" if state == "PENDING" else "running")
    told = [each for each in symptoms._waiting(found) if each.cause == "unknown-8"]
    assert len(told) == (reason != "Resources")
    assert all((reason or state.lower()) in each.reason for each in told)
