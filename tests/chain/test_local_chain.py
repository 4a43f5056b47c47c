"""The chain on one machine: the real job script, supervisor and signals around the stand-in program."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from relayrun.control.chain import supervisor
from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptStart, ChainEnd
from relayrun.control.rundir.run import Run, read_stop, stop_reason
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.files import read_json_lines
from tests.plans import plan_with
from tests.waiting import wait_for

from .conftest import MakeRun

pytestmark = pytest.mark.slow  # they wait for real clocks

CUT = {"time_limit": 20, "grace_period": 8.0, "signal_seconds": 1}
"""12 s in which a job starts and makes steps, but not all of those that a test asks for; then 7 s in which it sees by
itself that its time is near, however busy the machine is, before Slurm's signal says so."""


def run_chain(run: Run, plan: Plan) -> list[str]:
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    events: list[str] = []
    scheduler.run_queue(events.append)
    assert scheduler.jobs(plan) == []
    return events


def ends(run: Run) -> list[AttemptEnd]:
    records = [AttemptEnd.read(run.attempt(number).end) for number in run.attempt_numbers()]
    assert all(record is not None for record in records)
    return [record for record in records if record is not None]


def logs(run: Run) -> str:
    return "".join(path.read_text() for path in sorted((run.path.parent / "logs").iterdir()))


def test_a_run_goes_through_as_many_jobs_as_its_time_limit_asks_for(make_run: MakeRun) -> None:
    run, plan = make_run("--steps=40", "--step-seconds=0.35", total_steps=40, **CUT)
    run_chain(run, plan)
    records = ends(run)
    assert len(records) >= 2, logs(run)
    assert [record.cause for record in records] == ["saved"] * (len(records) - 1) + ["done"]
    assert (stop_reason(run) or "").startswith("the last iteration, 40, is saved")
    assert resume_point(run).iteration == 40
    assert [line["iteration"] for line in read_json_lines(run.metrics_view)] == list(range(1, 41))
    bases = [AttemptStart.read(run.attempt(n).begin) for n in run.attempt_numbers()]
    assert [begin.base_iteration for begin in bases if begin] == [0, *(r.durable_iteration for r in records[:-1])]


def test_a_chain_ends_where_stop_after_says_and_goes_on_when_it_is_raised(make_run: MakeRun) -> None:
    run, plan = make_run("--steps=3", "--step-seconds=0.01", stop_after=3)
    run_chain(run, plan)
    assert [record.cause for record in ends(run)] == ["done"]
    reason = "iteration 3 is saved, and training.stop_after ends the run there"
    assert read_stop(run) == ChainEnd("done", reason)
    run.stop.unlink()
    run_chain(run, plan)  # a job that a person queues by hand finds nothing to do
    assert stop_reason(run) == reason
    assert [number for number in run.attempt_numbers() if run.attempt(number).begin.exists()] == [1]
    run.stop.unlink()
    run, plan = make_run("--steps=5", "--step-seconds=0.01", total_steps=5, submitted_after_attempt=1)
    run_chain(run, plan)
    assert stop_reason(run) == "the last iteration, 5, is saved"
    assert [line["iteration"] for line in read_json_lines(run.metrics_view)] == [1, 2, 3, 4, 5]


def test_the_signal_asks_to_leave_where_the_deadline_inside_does_not(make_run: MakeRun) -> None:
    run, plan = make_run(
        "--steps=30", "--step-seconds=0.4", total_steps=30, time_limit=20, grace_period=0.0, signal_seconds=9
    )
    events = run_chain(run, plan)
    assert any("SIGUSR2" in event for event in events)
    assert ends(run)[0].reason in ("SIGUSR2", "stop file")
    assert ends(run)[-1].cause == "done"


def test_no_successor_without_auto_requeue(make_run: MakeRun) -> None:
    slow = ("--steps=100", "--step-seconds=0.4")  # they do not fit into the time limit, however long the start takes
    run, plan = make_run(*slow, total_steps=100, time_limit=20, grace_period=8.0, auto_requeue=False)
    run_chain(run, plan)
    assert [record.cause for record in ends(run)] == ["saved"]
    assert not run.stop.exists()


def test_a_crash_loop_stops_after_the_failed_attempts_allowed(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run("--crash-at=0", max_failed_attempts=2)
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    waits: list[tuple[str, int]] = []

    def skip_backoff() -> None:
        for path in (run.path / "local").glob("job-*.json"):
            job = json.loads(path.read_text())
            wait = job["eligible_time"] - path.stat().st_mtime
            if job["state"] == "PENDING" and wait > 1:
                waits.append((path.name, round(wait)))
                path.write_text(json.dumps(job | {"eligible_time": 0}))

    scheduler.run_queue(lambda _event: None, skip_backoff)
    assert waits == [("job-0002.json", 30)]  # the job that waits behind the failed one, and no other
    records = ends(run)
    assert [record.cause for record in records] == ["failed", "failed"]
    assert records[0].exit_code == 7
    assert (stop_reason(run) or "").startswith("2 attempts in a row without a new checkpoint")
    assert scheduler.jobs(plan) == []


def test_a_fatal_error_stops_at_once(make_run: MakeRun) -> None:
    run, plan = make_run("--fatal-at=3")
    run_chain(run, plan)
    assert [record.cause for record in ends(run)] == ["fatal"]
    assert (stop_reason(run) or "").startswith("fatal: loss is NaN")


def test_exit_trigger_ends_the_chain_and_is_acknowledged(make_run: MakeRun) -> None:
    run, plan = make_run("--steps=200", total_steps=200)

    def touch() -> None:
        wait_for(run.attempt(1).metrics.exists)  # before, the chain ends without an attempt
        triggers.touch_trigger(run, "exit")

    toucher = threading.Thread(target=touch, daemon=True)
    toucher.start()
    run_chain(run, plan)
    toucher.join(300)
    assert [record.cause for record in ends(run)] == ["exit"]
    assert not (run.triggers / "exit").exists()
    assert json.loads((run.triggers / "exit.done").read_text())["result"] == "saved"
    assert run.stop.exists()


def test_exit_trigger_between_two_jobs_is_obeyed_by_the_next(make_run: MakeRun) -> None:
    run, plan = make_run("--steps=60", "--step-seconds=0.25", total_steps=60, **CUT)
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})

    def touch_between(event: str) -> None:
        if event == "job 1 ended: COMPLETED":
            triggers.touch_trigger(run, "exit")

    scheduler.run_queue(touch_between)
    assert len(ends(run)) == 1
    done = json.loads((run.triggers / "exit.done").read_text())
    assert done["iteration"] == resume_point(run).iteration > 0
    assert (stop_reason(run) or "").startswith("exit trigger by ")


@pytest.mark.parametrize("mode", ["singleton", "requeue"])
def test_a_killed_batch_script_is_closed_by_the_next_job(make_run: MakeRun, mode: str) -> None:
    run, plan = make_run("--steps=30", total_steps=30, mode=mode)
    killed = False

    def kill_first(run: Run = run) -> None:
        nonlocal killed
        job = json.loads((run.path / "local" / "job-0001.json").read_text())
        ready = job["guarded"] if mode == "requeue" else (run.path / "attempts/0001/metrics.jsonl").exists()
        if not killed and job["state"] == "RUNNING" and ready:
            os.kill(job["pid"], signal.SIGKILL)
            killed = True

    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    scheduler.run_queue(lambda _event: None, kill_first)
    records = ends(run)
    assert killed
    assert [record.cause for record in records] == ["unknown", "done"]
    assert records[0].exit_code == -1


def test_an_end_that_neither_records_nor_scheduler_know_counts_as_failed(make_run: MakeRun) -> None:
    run, plan = make_run("--steps=30", total_steps=30, max_failed_attempts=1)
    first = run.path / "local" / "job-0001.json"

    def kill_first() -> None:
        if first.exists() and run.attempt(1).metrics.exists():
            os.kill(json.loads(first.read_text())["pid"], signal.SIGKILL)

    def forget_first(event: str) -> None:
        if event.startswith("job 1 ended"):
            first.unlink()  # as Slurm forgets a job after MinJobAge

    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    scheduler.run_queue(forget_first, kill_first)
    assert [(record.cause, record.exit_code, record.progress) for record in ends(run)] == [("unknown", -1, False)]
    assert (stop_reason(run) or "").startswith("1 attempt in a row without a new checkpoint")
    assert not any(job.live for job in scheduler.jobs(plan))


def test_a_cancelled_job_stops_the_chain(make_run: MakeRun) -> None:
    run, plan = make_run("--steps=200", total_steps=200)
    scheduler = LocalScheduler(run)
    job_id = scheduler.submit(plan, run.job_script, options={})
    cancelled: list[str] = []

    def cancel() -> None:
        if not cancelled and run.attempt(1).metrics.exists():
            cancelled.append(job_id)
            scheduler.cancel(job_id)

    scheduler.run_queue(lambda _event: None, cancel)
    assert [record.cause for record in ends(run)] == ["cancelled"]
    assert (stop_reason(run) or "").startswith("the job was cancelled")


@pytest.mark.long
def test_a_job_that_queues_itself_again_goes_the_same_way(make_run: MakeRun) -> None:
    run, plan = make_run("--steps=40", "--step-seconds=0.35", total_steps=40, mode="requeue", **CUT)
    events = run_chain(run, plan)
    records = ends(run)
    assert len(records) >= 2
    assert [record.cause for record in records] == ["saved"] * (len(records) - 1) + ["done"]
    begins = [AttemptStart.read(run.attempt(number).begin) for number in run.attempt_numbers()]
    assert {begin.job_id for begin in begins if begin} == {"1"}
    assert "job 1 ended: COMPLETED and is queued again" in events
    assert "#SBATCH --requeue" in run.job_script.read_text()
    assert [line["iteration"] for line in read_json_lines(run.metrics_view)] == list(range(1, 41))


def test_an_attempt_that_stands_still_is_ended_after_its_ranks_were_asked_for_their_stacks(make_run: MakeRun) -> None:
    run, plan = make_run("--steps=20", "--stop-rank=1", "--stop-at=5", hang_timeout=5, max_failed_attempts=1)
    run_chain(run, plan)
    (record,) = ends(run)
    assert record.cause == "hang"
    assert "ranks 1 did not answer" in record.reason
    assert "no progress for" in record.reason
    assert 'File "' in (run.stacks(1) / "rank-0000.txt").read_text()
    assert (stop_reason(run) or "").startswith("1 attempt in a row without a new checkpoint")


@pytest.mark.long
def test_the_lead_is_measured_by_what_the_attempts_before_took(make_run: MakeRun) -> None:
    run, plan = make_run(
        "--steps=40", "--step-seconds=0.35", "--save-seconds=2", total_steps=40, time_limit=120, grace_period=108.0
    )
    plan = plan_with(plan, min_grace_period=1.0, max_grace_period=108.0)
    plan.write(run.plan)
    run_chain(run, plan)
    leads = [
        begin.grace_period
        for number in run.attempt_numbers()
        if (begin := AttemptStart.read(run.attempt(number).begin))
    ]
    assert leads[0] == 108.0
    assert 10 + 1.5 * 2 < leads[1] < 10 + 1.5 * 2 + 5


@pytest.mark.parametrize("folder", ["with blank", "it's", 'double"quote', "dollar$HOME `id`", "ünï→code", "-dash"])
def test_any_run_directory_name_works(make_run: MakeRun, folder: str) -> None:
    run, plan = make_run("--steps=2", folder=folder, total_steps=2)
    run_chain(run, plan)
    assert [record.cause for record in ends(run)] == ["done"], logs(run)


def test_begin_outside_a_job_is_one_clear_error(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _plan = make_run()
    monkeypatch.delenv("RELAYRUN_LOCAL_JOB_ID", raising=False)
    with pytest.raises(Exception, match="not inside a local job"):
        supervisor.begin_attempt(run)


def test_signals_that_the_submitter_blocks_or_ignores_reach_the_job(make_run: MakeRun) -> None:
    """Else the supervisor beside the ranks would not see that they have gone, and the job would last to its limit."""
    run, plan = make_run("--steps=3", total_steps=3, time_limit=60)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    former = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        events = run_chain(run, plan)
    finally:
        signal.signal(signal.SIGUSR2, former)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert [record.cause for record in ends(run)] == ["done"]
    assert not any("SIGUSR2" in event for event in events), events


def test_no_process_is_left_behind(make_run: MakeRun) -> None:
    run, plan = make_run("--steps=2", total_steps=2)
    run_chain(run, plan)

    def left() -> list[bytes]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found.append(entry.read_bytes())
        return [words for words in found if str(run.path).encode() in words]

    wait_for(lambda: not left(), words=left)
