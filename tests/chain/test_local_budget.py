"""Chains with a budget: the ranks save and leave before it is over, STOP says why, and its owner can raise it."""

from __future__ import annotations

import shutil
import time
from datetime import datetime

import pytest

from relayrun.control.chain import budget
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.run import Run, read_stop
from relayrun.watch.status.queue import QueueStatus
from relayrun.watch.status.summary import summarize_run
from tests.history import began
from tests.plans import plan_with

from .conftest import MakeRun
from .test_local_chain import ends, logs, run_chain

SHORT = {"time_limit": 20, "grace_period": 8.0, "signal_seconds": 1}


def test_a_run_without_a_budget_reads_nothing(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, plan = make_run()
    monkeypatch.setattr(Attempt, "read_begin", None)
    end = budget.budget_end(run, plan, nodes=1, start=0.0)
    assert (end.cap(7.0, "the limit"), end.cap(None, "")) == ((7.0, "the limit"), (None, ""))
    assert budget.why_over(run, plan, end, 1.0) == ""


@pytest.mark.slow
def test_a_chain_stops_before_it_exceeds_its_budget_and_goes_on_when_its_owner_raises_it(make_run: MakeRun) -> None:
    most = 30 / 3600
    run, plan = make_run("--steps=400", "--step-seconds=0.25", total_steps=400, max_node_hours=most, **SHORT)
    run_chain(run, plan)
    records = ends(run)
    assert [record.cause for record in records] == ["saved", "saved"], logs(run)
    assert (records[-1].action, records[-1].chain_end) == ("stop", "stopped")
    stop = read_stop(run)
    assert stop is not None
    assert stop.reason.startswith("the budget is over: 0.01 of chain.max_node_hours 0.00833333 are used"), stop.reason
    assert f"relayrun resume {run.path} --set chain.max_node_hours=..." in stop.reason
    used = budget.used_node_seconds(run, plan, until=time.time())
    assert 10 < used < 30
    assert resume_point(run).iteration == records[-1].durable_iteration > records[0].durable_iteration
    run.stop.unlink()
    run_chain(run, plan)  # a job that a person queues by hand is refused
    assert [number for number in run.attempt_numbers() if run.attempt(number).begin.exists()] == [1, 2]
    assert (read_stop(run) or stop).reason.startswith("the budget is over")
    run.stop.unlink()
    plan = plan_with(plan, max_node_hours=1.0, total_steps=records[-1].durable_iteration + 1, submitted_after_attempt=2)
    plan.write(run.plan)
    run_chain(run, plan)
    assert (read_stop(run) or stop).state == "done", logs(run)


@pytest.mark.slow
def test_ranks_that_do_not_leave_are_ended_with_the_budget(make_run: MakeRun) -> None:
    run, plan = make_run(
        *("--steps=400", "--step-seconds=0.25", "--save-seconds=600"),
        total_steps=400,
        max_node_hours=20 / 3600,
        time_limit=90,
        grace_period=8.0,
    )
    began = time.time()
    run_chain(run, plan)
    assert time.time() - began < 60
    (record,) = ends(run)
    assert (record.exit_code != 0, record.chain_end) == (True, "stopped"), record
    assert "the ranks are still there, and the budget is over" in logs(run)


def test_the_first_limit_of_several_ends_the_job(make_run: MakeRun) -> None:
    run, plan = make_run(max_node_hours=2.0, max_gpu_hours=4.0, gpus_per_node=8)
    assert budget.budget_end(run, plan, nodes=1, start=1000.0).time == 1000 + 1800
    assert budget.budget_end(run, plan, nodes=2, start=1000.0).time == 1000 + 900
    day = datetime.fromtimestamp(1600).isoformat()
    end = budget.budget_end(run, plan_with(plan, deadline=day), nodes=1, start=1000.0)
    assert (end.time, end.setting, end.words) == (1600, "deadline", f"chain.deadline is {day}")
    assert end.cap(1500.0, "") == (1500.0, "")
    assert end.cap(None, "") == (1600.0, f"the budget is over: {end.words}")
    assert budget.why_over(run, plan, end, 1.0).endswith("--set chain.deadline=...")


def test_an_end_that_nobody_recorded_counts_as_late_as_it_can_have_been(make_run: MakeRun) -> None:
    run, plan = make_run(nodes=2)
    began(run, 1, start_time=110.0, job_start_time=100.0, options={"nodes": "4"})  # until the next job starts
    began(run, 2, start_time=200.0, job_start_time=200.0, job_end_time=260.0)  # until its limit
    began(run, 3, start_time=900.0, job_start_time=900.0, job_end_time=2000.0)
    assert budget.used_node_seconds(run, plan, until=1000.0) == 4 * 100 + 2 * 60 + 2 * 100
    began(run, 3, start_time=900.0, job_start_time=900.0, job_end_time=2000.0, previous_job_end=230.0)
    assert budget.used_node_seconds(run, plan, until=1000.0) == 4 * 100 + 2 * 30 + 2 * 100
    assert budget.used_node_seconds(run, plan, until=900.0, before=3) == 4 * 100 + 2 * 60


@pytest.mark.long
def test_the_first_attempt_tells_what_the_chain_needs_within_a_tenth(make_run: MakeRun) -> None:
    """As far as the machine keeps its pace: a busy one does not."""
    run, plan = make_run("--steps=220", "--step-seconds=0.25", total_steps=220, max_node_hours=1.0, **SHORT)
    run_chain(run, plan)
    stop = read_stop(run)
    assert stop is not None
    assert stop.state == "done", logs(run)
    used = budget.used_node_seconds(run, plan, until=time.time())
    for number in run.attempt_numbers()[1:]:
        shutil.rmtree(run.attempt(number).path)
    run.stop.unlink()
    for folder in sorted(run.checkpoints.iterdir())[1:]:
        shutil.rmtree(folder)
    first = Run(run.path)
    spent = budget.used_node_seconds(first, plan, until=time.time())
    done = run.attempt(1).read_end().durable_iteration
    drift = abs((used - spent) / (220 - done) / (spent / done) - 1)
    left = summarize_run(first, QueueStatus(), now=time.time(), plan=plan).remaining
    assert left is not None
    said = spent + 3600 * left.node_hours
    print(f"said {said:.1f} node seconds after attempt 1, used {used:.1f}; the pace changed by {drift:.1%}")
    assert said == pytest.approx(used, rel=0.1 + drift), logs(run)
