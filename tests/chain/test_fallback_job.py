"""The fallback job, with a batch script that is killed at each call of `begin`, and with faults of its own."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.chain import failover, job_script, supervisor
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import stop_reason, write_stop
from relayrun.control.scheduler.base import MAX_FAILED_BEGINS
from relayrun.control.scheduler.slurm_commands import parse_job
from tests.plans import plan_with
from tests.waiting import wait_for

from .exhaustion import KILL, Reached, run_child
from .test_exhaustion import EVERYTHING, Stage, exhaust, fresh_begin, stage, todays  # noqa: F401 - a fixture


def run_fallback_job(stage: Stage) -> Reached | None:  # noqa: F811
    """Let Slurm start the fallback job, if it would; return how that ended."""
    for job_id in stage.slurm.start_fallback_jobs():
        reached = run_child(lambda: failover.run_fallback_job(stage.run), stage.run_path, stage.slurm, job=job_id)
        stage.slurm.set(job_id, state="FAILED" if reached.code else "COMPLETED")
        return reached
    return None


@pytest.mark.slow
@EVERYTHING
def test_the_batch_script_is_killed_inside_begin(stage: Stage, everything: bool) -> None:  # noqa: F811
    """And so the program beside it, at each of its calls. A job goes on, from where the killed one would have."""
    stage.keep()
    undisturbed = fresh_begin(stage)
    assert undisturbed.code == 0, undisturbed.output
    wanted, wrong, count = stage.state(), [], 0
    for number, call in enumerate(undisturbed.calls):
        if not everything and number % 20 != todays(20):
            continue
        count += 1
        stage.reset()
        run_child(lambda: supervisor.begin_attempt(stage.run), stage.run_path, stage.slurm, at=number, fault=KILL)
        stage.slurm.set("1", state="FAILED")
        before = stage.slurm.pending()
        looked = run_fallback_job(stage)
        waiting = stage.slurm.pending()
        complaint = ""
        if looked is not None and looked.code:
            complaint = looked.output
        elif looked is None and not before:
            complaint = "the fallback job did not start, and nothing is queued"
        elif len(waiting) != 1 or (before and waiting != before):
            complaint = f"{before} waited, now {waiting}"
        elif list(stage.slurm.fallback_jobs().values()) != waiting:
            complaint = f"the fallback jobs stand behind {stage.slurm.fallback_jobs()}"
        else:
            stage.slurm.set(waiting[0], state="RUNNING")
            fresh_begin(stage, waiting[0])
            found = stage.state()
            if (found.stop, found.base, found.follows) != (wanted.stop, wanted.base, wanted.follows):
                complaint = f"{found} instead of {wanted}"
        if complaint:
            wrong.append(f"killed at {number} {call}: {complaint}")
    assert count
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong])


@pytest.mark.slow
@EVERYTHING
def test_faults_of_the_fallback_job_itself(stage: Stage, everything: bool) -> None:  # noqa: F811
    """Its batch script starts it again. One job waits then, with a fallback job behind it."""
    stage.slurm.set("1", state="FAILED")
    (own,) = stage.slurm.start_fallback_jobs()

    def look() -> int:
        return failover.run_fallback_job(stage.run)

    def check(reached: Reached) -> str:
        if reached.code:
            again = run_child(look, stage.run_path, stage.slurm, job=own)
            if again.code:
                return f"nor the second time: {again.output[-500:]}"
        waiting = stage.slurm.pending()
        if len(waiting) != 1 or stop_reason(stage.run) is not None:
            return f"{waiting}, STOP {stop_reason(stage.run)}"
        behind = list(stage.slurm.fallback_jobs().values())
        return "" if behind == waiting or "no fallback job behind" in reached.output else f"behind {behind}"

    stage.keep()
    exhaust(stage, look, check, everything=everything, job=own)


def ended(stage: Stage, job_id: str, state: str) -> Reached:  # noqa: F811
    stage.slurm.set(job_id, state=state)
    reached = run_fallback_job(stage)
    assert reached is not None
    assert reached.code == 0, reached.output
    return reached


def test_a_person_who_ended_the_chain_stands_in_the_comment_of_the_job_that_failed(stage: Stage) -> None:  # noqa: F811
    """A full disk took no STOP. There is room again."""
    stage.slurm.set("1", comment="relayrun:stopped-by=ada")
    ended(stage, "1", "FAILED")
    assert stop_reason(stage.run) == "stopped by ada"
    assert stage.slurm.pending() == []


def test_begin_finds_in_its_own_comment_that_a_person_ended_the_chain(stage: Stage) -> None:  # noqa: F811
    stage.slurm.set("1", comment="relayrun:stopped-by=ada")
    begun = fresh_begin(stage)
    assert begun.code == supervisor.EXIT_CHAIN_ENDS, begun.output
    assert stop_reason(stage.run) == "stopped by ada"
    assert stage.slurm.pending() == []


def test_it_is_counted_and_not_for_ever(stage: Stage) -> None:  # noqa: F811
    job, delays = "1", []
    while stop_reason(stage.run) is None:
        ended(stage, job, "FAILED")
        if stop_reason(stage.run) is None:
            (job,) = stage.slurm.pending()
            known = stage.slurm.jobs()[job]
            delays.append(known["delay"])
            assert len(delays) < MAX_FAILED_BEGINS
            assert known["comment"] == f"relayrun:begin-failed={len(delays)}@n0"
            assert known["exclude"] == "n0"
            assert list(stage.slurm.fallback_jobs().values()) == [job]
    assert delays == [30 << number for number in range(MAX_FAILED_BEGINS - 1)]
    assert (stop_reason(stage.run) or "").endswith(f"left no successor, {MAX_FAILED_BEGINS} times in a row")
    assert not stage.slurm.pending()
    assert not stage.slurm.fallback_jobs()


def test_a_job_that_the_controller_has_forgotten(stage: Stage) -> None:  # noqa: F811
    """Where the fallback job waited for its node longer than that remembers: its own count holds."""
    assert fresh_begin(stage).code == 0
    (job,) = stage.slurm.pending()
    (own,) = stage.slurm.fallback_jobs()
    stage.slurm.set("1", state="FAILED")
    stage.slurm.set(job, state="FAILED")
    stage.slurm.set(own, comment=f"relayrun:starts-only-if-job={job}-fails,failed-begins=3")
    assert stage.slurm.start_fallback_jobs() == [own]
    stage.slurm.write({key: fields for key, fields in stage.slurm.jobs().items() if key != job})
    reached = run_child(lambda: failover.run_fallback_job(stage.run), stage.run_path, stage.slurm, job=own)
    assert reached.code == 0, reached.output
    (following,) = stage.slurm.pending()
    assert stage.slurm.jobs()[following]["comment"] == "relayrun:begin-failed=4@"
    assert stage.slurm.jobs()[following]["delay"] == 240


def test_a_waiting_job_that_is_cancelled_while_nothing_runs_ends_the_chain(stage: Stage) -> None:  # noqa: F811
    assert fresh_begin(stage).code == 0
    (waiting,) = stage.slurm.pending()
    stage.slurm.set("1", state="FAILED")
    ended(stage, waiting, "CANCELLED")
    assert stop_reason(stage.run) == f"the successor, job {waiting}, was cancelled"
    assert not stage.slurm.pending()


def test_a_waiting_job_that_is_cancelled_beside_a_running_one(stage: Stage) -> None:  # noqa: F811
    """The running one will say so; until then the fallback job stands behind it, in case it cannot."""
    assert fresh_begin(stage).code == 0
    (waiting,) = stage.slurm.pending()
    ended(stage, waiting, "CANCELLED")
    assert stop_reason(stage.run) is None
    assert list(stage.slurm.fallback_jobs().values()) == ["1"]
    ended(stage, "1", "FAILED")
    assert stop_reason(stage.run) == f"the successor, job {waiting}, was cancelled"
    assert not stage.slurm.pending()


def test_a_person_who_submitted_again_has_forgotten_what_was_cancelled_before(stage: Stage) -> None:  # noqa: F811
    assert fresh_begin(stage).code == 0
    (waiting,) = stage.slurm.pending()
    ended(stage, waiting, "CANCELLED")
    replace(Plan.load(stage.run), submitted_after_attempt=max(stage.run.attempt_numbers())).write(stage.run.plan)
    ended(stage, "1", "FAILED")
    assert stop_reason(stage.run) is None


def test_what_a_fallback_job_has_decided_stands_however_long_stop_cannot_be_written(
    stage: Stage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm forgets who was cancelled, and the next look would queue a job."""
    tries: list[float] = []

    def full(*arguments: Any) -> None:
        if len(tries) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_stop(*arguments)

    monkeypatch.setattr("relayrun.control.chain.failover.write_stop", full)
    monkeypatch.setattr("time.sleep", tries.append)
    failover._write_stop_patiently(stage.run, ChainEnd("stopped", "by ada"))
    assert (tries, stop_reason(stage.run)) == ([failover.RETRY_SECONDS] * 2, "by ada")


def test_a_first_job_that_is_cancelled_ends_the_chain(stage: Stage) -> None:  # noqa: F811
    ended(stage, "1", "CANCELLED")
    assert stop_reason(stage.run) == "job 1, which was to go on, was cancelled"


def test_a_job_that_still_ends_is_nobody_who_goes_on(stage: Stage) -> None:  # noqa: F811
    """Its epilog takes long, and it ended well: a fallback job behind it would never start."""
    assert fresh_begin(stage).code == 0
    (waiting,) = stage.slurm.pending()
    stage.slurm.set("1", state="COMPLETING")
    ended(stage, waiting, "FAILED")
    assert stop_reason(stage.run) is None
    (following,) = stage.slurm.pending()
    assert list(stage.slurm.fallback_jobs().values()) == [following]


@pytest.mark.slow
def test_a_site_that_lets_nobody_change_a_job(stage: Stage) -> None:  # noqa: F811
    """Another fallback job takes the place of the one that cannot be moved, and the failed tries are counted."""
    stage.slurm.unchangeable = True
    assert fresh_begin(stage).code == 0
    (job,) = stage.slurm.pending()
    assert list(stage.slurm.fallback_jobs().values()) == [job]
    stage.slurm.set("1", state="FAILED")
    tries = 0
    while stop_reason(stage.run) is None:
        tries += 1
        assert tries <= MAX_FAILED_BEGINS
        ended(stage, job, "FAILED")
        if stop_reason(stage.run) is None:
            (job,) = stage.slurm.pending()
            assert list(stage.slurm.fallback_jobs().values()) == [job]
    assert tries == MAX_FAILED_BEGINS
    assert not stage.slurm.fallback_jobs()


@pytest.mark.parametrize("small", [True, False])
def test_what_it_takes_over_from_the_jobs_of_the_chain(stage: Stage, small: bool) -> None:  # noqa: F811
    """Where it may run; and all that they ask for, where a site refuses a small job."""
    given: dict[str, str | None] = {"gres": "gpu:4", "exclusive": None, "constraint": "fast", "time-min": "30"}
    replace(Plan.load(stage.run), sbatch_options=given, nodes=2).write(stage.run.plan)
    if not small:
        stage.slurm.demanded = "gres"
    stage.slurm.set("1", state="FAILED")
    (old,) = stage.slurm.start_fallback_jobs()
    reached = run_child(lambda: failover.run_fallback_job(stage.run), stage.run_path, stage.slurm, job=old)
    assert reached.code == 0, reached.output
    (new,) = stage.slurm.fallback_jobs()
    asked = stage.slurm.jobs()[new]["options"]
    assert asked["constraint"] == "fast"
    assert asked["time"] == "0-00:10:00"
    assert "time-min" not in asked
    further = {name: asked.get(name) for name in ("gres", "exclusive", "nodes")}
    expected = {"gres": "gpu:4", "exclusive": "", "nodes": "1"}  # as the job had that failed
    assert further == (dict.fromkeys(expected) if small else expected)


def test_it_leaves_a_chain_alone_that_has_ended_or_changed_hands(stage: Stage) -> None:  # noqa: F811
    stage.run.stop.write_text("stopped by ann\n")
    ended(stage, "1", "FAILED")
    assert not stage.slurm.pending()
    assert not stage.slurm.fallback_jobs()
    assert stop_reason(stage.run) == "stopped by ann"


def test_the_end_of_a_chain_leaves_none(stage: Stage) -> None:  # noqa: F811
    (stage.run.triggers / "exit").touch()
    assert fresh_begin(stage).code == supervisor.EXIT_CHAIN_ENDS
    assert not stage.slurm.pending()
    assert not stage.slurm.fallback_jobs()


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_of_submitted_jobs(stage: Stage, limit: int) -> None:  # noqa: F811
    """Where Slurm allows two jobs, one is the successor: the fallback job gives way. With one there is neither."""
    stage.slurm.set("1", state="RUNNING")
    stage.slurm.limit = limit
    reached = fresh_begin(stage)
    assert reached.code == 0, reached.output
    assert len(stage.slurm.pending()) == limit - 1
    assert not stage.slurm.fallback_jobs()
    assert ("no fallback job behind job" in reached.output) == (limit == 2)


def test_a_chain_of_the_version_before_has_none(stage: Stage) -> None:  # noqa: F811
    plan_with(Plan.load(stage.run), fallback_job=False).write(stage.run.plan)
    calls = fresh_begin(stage).calls
    assert not [call for call in calls if "scontrol update" in call and "fallback" in call]
    assert list(stage.slurm.fallback_jobs().values()) == ["1"]  # untouched


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (signal.SIGUSR2, ""),  # before the time limit
        (signal.SIGTERM, "N/A"),  # somebody cancels it
        (signal.SIGTERM, "2026-11-21T04:48:32"),  # a job with more rights takes its node
    ],
)
def test_its_script_ends_with_a_reason_where_nothing_works(
    stage: Stage,  # noqa: F811
    tmp_path: Path,
    number: signal.Signals,
    shown: str,
) -> None:
    """The last of its lines, with a Python that is away."""
    plan = replace(Plan.load(stage.run), host_python="/nowhere/python3", log_folder=str(tmp_path / "logs"))
    script = tmp_path / "fallback.sbatch"
    script.write_text(job_script.fallback_script(plan, stage.run))
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/said\n[[ $1 != show ]] || echo JobName=x PreemptTime=1\n')
    squeue = scontrol.with_name("squeue")
    squeue.write_text(
        f'#!/bin/bash\nif [[ $* == *PreemptTime ]]; then echo "{shown}"; else echo {int(shown[:1] == "2")}; fi\n'
    )
    for command in (scontrol, squeue):
        command.chmod(0o755)
    environment = os.environ | {"PATH": f"{scontrol.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", script], env=environment) as process:
        log = tmp_path / "logs" / f"{plan.fallback_job_name}-7.err"
        wait_for(lambda: log.exists() and "/nowhere/python3" in log.read_text())
        process.send_signal(number)
        assert process.wait(300) == 1
    said = (tmp_path / "said").read_text()
    if shown[:1] == "2":  # Slurm brings it back
        assert stop_reason(stage.run) is None
        assert "requeue 7\n" in said
    else:
        assert (stop_reason(stage.run) or "").startswith("a job of the chain failed, and the fallback job 7 could not")
        assert said.endswith("update JobId=7 Comment=relayrun:fallback-failed\n")


def test_a_comment_that_was_emptied_is_none() -> None:
    """So Slurm shows a job whose nodes came back: with `Comment=` and nothing behind it."""
    job = parse_job("JobId=1 JobName=j UserId=a(1) JobState=RUNNING Network=(null) Comment= StdErr=/e StdIn=/i")
    assert (job.failed_begins, job.begin_failed_on) == (0, "")
