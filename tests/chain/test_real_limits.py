"""The time that a job really has: its grace period fits into it; the end of its reservation ends the chain."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from relayrun.control import decisions
from relayrun.control.chain import evaluation_jobs, supervisor, watch
from relayrun.control.chain.requested_options import read_requests
from relayrun.control.failure_signatures import cause_words
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, StartTimes
from relayrun.control.rundir.run import stop_reason
from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.slurm import Slurm
from tests.history import trained

from .exhaustion import run_child
from .test_exhaustion import Stage, fresh_begin, stage  # noqa: F401 - a fixture


def ended(stage: Stage) -> None:  # noqa: F811
    reached = run_child(lambda: supervisor.end_attempt(stage.run, 4, 143), stage.run_path, stage.slurm)
    assert reached.code in (0, supervisor.EXIT_ATTEMPT_FAILED), reached.output


def begun_in_a_reservation(stage: Stage) -> None:  # noqa: F811
    """Begin attempt 4 in job 1, which got the reservation `camp`."""
    assert fresh_begin(stage).code == 0
    attempt = stage.run.attempt(4)
    started = attempt.started_record()
    replace(started, options={**started.options, "reservation": "camp"}).write(attempt.begin)


@pytest.mark.parametrize(
    ("grace_period", "floor", "ceiling", "within"),
    [
        (600.0, 300.0, 1800.0, (240.0, 240.0, 240.0)),
        (600.0, 600.0, 600.0, (240.0, 240.0, 240.0)),  # chain.grace_period
        (60.0, 60.0, 60.0, (60.0, 60.0, 60.0)),
    ],
)
def test_the_lead_is_that_of_the_time_that_slurm_gave_the_job(
    stage: Stage,  # noqa: F811
    grace_period: float,
    floor: float,
    ceiling: float,
    within: tuple[float, float, float],
) -> None:
    plan = Plan.load(stage.run)
    replace(
        plan,
        time_limit=3600,
        grace_period=grace_period,
        min_grace_period=floor,
        max_grace_period=ceiling,
        signal_seconds=540,
    ).write(stage.run.plan)
    stage.slurm.set("1", seconds=480)
    assert fresh_begin(stage).code == 0
    started = stage.run.attempt(4).read_begin()
    assert started is not None
    assert (started.grace_period, started.min_grace_period, started.max_grace_period) == within
    assert started.job_end_time is not None
    job_env = (stage.run.attempt(4).path / "job.env").read_text()
    assert (
        f"leave_from={started.job_end_time - started.grace_period:.0f}\n" in job_env
    )  # Slurm's warning comes with the start


def test_the_lead_of_a_first_attempt_is_a_quarter_of_the_time_that_it_has(stage: Stage) -> None:  # noqa: F811
    plan = replace(
        Plan.load(stage.run), time_limit=3600, grace_period=600.0, min_grace_period=30.0, max_grace_period=1800.0
    )
    job = Job(id="1", name="j", state="RUNNING", start_time=1000.0, end_time=1480.0)
    found = supervisor._plan_for_time_limit(plan, job)
    assert (found.grace_period, found.min_grace_period, found.max_grace_period) == (120.0, 30.0, 240.0)


def test_with_the_time_that_was_asked_for_the_lead_is_the_plans_and_a_warning_is_heeded(stage: Stage) -> None:  # noqa: F811
    plan = Plan.load(stage.run)
    replace(
        plan,
        time_limit=3600,
        grace_period=2400.0,
        min_grace_period=2400.0,
        max_grace_period=2400.0,
        signal_seconds=2700,
    ).write(stage.run.plan)
    assert fresh_begin(stage).code == 0
    started = stage.run.attempt(4).read_begin()
    assert started is not None
    assert (started.grace_period, started.min_grace_period, started.max_grace_period) == (2400.0,) * 3
    assert "leave_from" not in (stage.run.attempt(4).path / "job.env").read_text()


def asked_for(stage: Stage, job_id: str) -> dict[str, str]:  # noqa: F811
    own = {"dependency", "comment", "parsable", "begin"}
    return {name: value for name, value in stage.slurm.jobs()[job_id]["options"].items() if name not in own}


def test_a_successor_asks_for_the_plan_and_not_for_what_slurm_gave(stage: Stage) -> None:  # noqa: F811
    """A plugin chose the partition and refuses one that is given; the reservation is this job's."""
    replace(read_requests(stage.run), accepted={"1": {"partition": "debug", "nodes": "1", "time": "01:00:00"}}).write(
        stage.run.requests
    )
    stage.slurm.set("1", partition="debug", limit="00:08:00", seconds=480)
    assert fresh_begin(stage).code == 0
    (job,) = stage.slurm.pending()
    assert asked_for(stage, job) == {}
    assert "partition" not in stage.slurm.jobs()[next(iter(stage.slurm.fallback_jobs()))]["options"]
    assert read_requests(stage.run).accepted[job]["partition"] == "debug"
    begin = stage.run.attempt(4).read_begin()
    assert begin is not None
    assert begin.options["time"] == "00:08:00"  # a fact of the attempt


@pytest.mark.parametrize("noticed_by", ["end", "watch", "next begin"])
def test_a_change_of_the_waiting_job_holds_for_the_job_behind_it(stage: Stage, noticed_by: str) -> None:  # noqa: F811
    assert fresh_begin(stage).code == 0
    (job,) = stage.slurm.pending()
    stage.slurm.set(job, partition="low")
    if noticed_by == "watch":
        run_child(lambda: look_now(stage), stage.run_path, stage.slurm)
    if noticed_by != "next begin":
        ended(stage)
        assert read_requests(stage.run).changes["partition"]["value"] == "low"
    stage.slurm.set("1", state="COMPLETED")
    stage.slurm.set(job, state="RUNNING")
    assert fresh_begin(stage, job).code == 0
    (following,) = stage.slurm.pending()
    assert asked_for(stage, following) == {"partition": "low"}


def look_now(stage: Stage) -> int:  # noqa: F811
    found = watch.Watch(stage.run, 4)
    found._next_try = 0.0
    found._look_after_successor()
    return 0


def test_a_requeued_job_does_not_keep_a_lowered_time_limit(stage: Stage) -> None:  # noqa: F811
    """Only an operator may raise it: another job takes its place."""
    plan = Plan.load(stage.run)
    replace(plan, time_limit=3600, chain=replace(plan.chain, mode="requeue")).write(stage.run.plan)
    assert fresh_begin(stage).code == 0
    assert not stage.slurm.pending()
    stage.slurm.set("1", limit="00:08:00")
    ended(stage)
    (job,) = stage.slurm.pending()
    assert job != "1"
    assert asked_for(stage, job) == {}  # the job that a person queued has the default partition


@pytest.mark.parametrize("held", ["PENDING", "RESV_DEL_HOLD"])
def test_a_job_that_its_reservation_ended_is_the_last_one(stage: Stage, held: str) -> None:  # noqa: F811
    """Slurm has taken the reservation from the job that it ends, and holds those that wait."""
    begun_in_a_reservation(stage)
    for job in (*stage.slurm.pending(), *stage.slurm.fallback_jobs()):
        stage.slurm.set(job, state=held, **{"reservation": "camp"} if held == "PENDING" else {})
    ended(stage)
    reason = stop_reason(stage.run) or ""
    assert reason.startswith("reservation camp ended; to go on without it: relayrun resume ")
    assert "cancelled" not in reason
    assert {job["state"] for key, job in stage.slurm.jobs().items() if key != "1"} == {"CANCELLED"}


def test_a_successor_that_a_person_moved_out_of_the_reservation_goes_on(stage: Stage) -> None:  # noqa: F811
    begun_in_a_reservation(stage)
    ended(stage)
    assert stop_reason(stage.run) is None
    assert len(stage.slurm.pending()) == 1


def test_a_reservation_of_every_day_does_not_end_the_chain(
    stage: Stage,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun_in_a_reservation(stage)
    stage.slurm.set("1", reservation="camp")
    (job,) = stage.slurm.pending()
    stage.slurm.set(job, reservation="camp")
    monkeypatch.setattr(Slurm, "reservation_end", lambda _, __, for_good=False: math.inf if for_good else time.time())
    ended(stage)
    assert stop_reason(stage.run) is None
    assert stage.slurm.pending() == [job]


def test_a_successor_whose_reservation_ended_is_not_waited_for(stage: Stage) -> None:  # noqa: F811
    assert fresh_begin(stage).code == 0
    (job,) = stage.slurm.pending()
    stage.slurm.set(job, state="RESV_DEL_HOLD")
    ended(stage)
    assert stop_reason(stage.run) == f"the successor, job {job}, never starts: its reservation was deleted"
    assert stage.slurm.jobs()[job]["state"] == "CANCELLED"


def test_a_chain_whose_jobs_each_save_one_interval_and_leave_ends(stage: Stage) -> None:  # noqa: F811
    """A start that needs nearly all of the time limit: each job brings a checkpoint, and one more job."""
    assert fresh_begin(stage).code == 0
    attempt = stage.run.attempt(4)
    started = attempt.started_record()
    replace(started, job_end_time=started.start_time + 300, grace_period=100.0).write(attempt.begin)
    late = started.start_time + 195
    StartTimes(process=late, imported=late, initialised=late, loaded=late).write(attempt.started)
    trained(stage.run, 4, 30, 40)
    for number in (2, 3):
        end = AttemptEnd.read(stage.run.attempt(number).end)
        assert end is not None
        replace(end, no_time=True).write(stage.run.attempt(number).end)
    ended(stage)
    record = stage.run.attempt(4).read_end()
    assert record is not None
    assert (record.cause, record.progress, record.no_time) == ("saved", True, True)
    reason = stop_reason(stage.run) or ""
    assert reason.startswith("3 attempts in a row had no time to train; time limit near; of the time limit of")
    assert stage.slurm.pending() == []


def test_slurm_may_have_forgotten_a_job_of_a_reservation(stage: Stage) -> None:  # noqa: F811
    begun_in_a_reservation(stage)
    stage.slurm.write({key: job for key, job in stage.slurm.jobs().items() if key != "1"})
    ended(stage)
    assert stop_reason(stage.run) is None
    assert len(stage.slurm.pending()) == 1


def ends_with(stage: Stage, text: str) -> None:  # noqa: F811
    """The attempt fails with this log."""
    attempt = stage.run.attempt(4)
    started = attempt.read_begin()
    assert started is not None
    log = stage.run_path / "job.err"
    log.write_text(text)
    replace(started, log=str(log), log_offset=0).write(attempt.begin)
    reached = run_child(lambda: supervisor.end_attempt(stage.run, 4, 1), stage.run_path, stage.slurm)
    assert reached.code == supervisor.EXIT_ATTEMPT_FAILED, reached.output


def test_the_last_end_of_a_chain_has_its_cause_and_the_words_of_its_log(stage: Stage) -> None:  # noqa: F811
    plan = Plan.load(stage.run)
    replace(plan, chain=replace(plan.chain, max_failed_attempts=1)).write(stage.run.plan)
    assert fresh_begin(stage).code == 0
    ends_with(
        stage, "0: OSError: [Errno 28] No space left on device\nsrun: error: n0: task 0: Exited with exit code 1\n"
    )
    text = stage.run.stop.read_text()
    end = stage.run.attempt(4).read_end()
    assert end is not None
    assert end.failure
    assert f"cause: {cause_words(end.failure)}\n" in text
    assert "No space left on device" in text.partition("cause: ")[2]


def test_the_begin_and_the_end_of_a_job_see_to_evaluations(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The job before may have been killed between its last save and its look."""
    told = stage.run_path / "told"

    def look(*_: object) -> None:
        with told.open("a") as file:
            file.write("looked\n")

    monkeypatch.setattr(evaluation_jobs, "submit_due_evaluations", look)
    assert fresh_begin(stage).code == 0
    assert told.read_text() == "looked\n"
    ended(stage)
    assert told.read_text() == "looked\n" * 2


@pytest.mark.parametrize(
    ("words", "delay"),
    [
        ("OSError: [Errno 98] Address already in use", decisions.BACKOFF_SECONDS),  # the next start takes another port
        ("OSError: [Errno 116] Stale file handle", decisions.WAIT_SECONDS),
    ],
)
def test_a_network_or_a_disk_gets_time_to_come_back_and_a_port_does_not(stage: Stage, words: str, delay: int) -> None:  # noqa: F811
    assert fresh_begin(stage).code == 0
    ends_with(stage, f"0: {words}\nsrun: error: n0: task 0: Exited with exit code 1\n")
    end = stage.run.attempt(4).read_end()
    assert end is not None
    assert end.delay == delay
