"""Chains on a real Slurm, alone and as stages, are stopped by their budget, and go on when their owner raises it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from relayrun.control.chain import budget
from relayrun.control.rundir.campaign import Campaign
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, stop_reason
from tests.campaigns import iterations, words, write_config
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.plans import plan_with

from .cluster import ROOT, TestCluster
from .test_campaign_slurm import SITE, relayrun
from .test_chain import SLURM, ends, logs, start, wait_for_end, wait_for_iteration

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_a_chain_is_stopped_by_its_budget_and_its_owner_raises_it(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    hours = 2 * 90 / 3600
    values = SLURM | {"time_limit": 60, "grace_period": 8.0, "fallback_job": True, "max_node_hours": hours}
    run, plan = make_run("--steps=10000", total_steps=10000, **values)
    start(cluster, run)
    wait_for_end(cluster, run, plan)
    records = ends(run)
    assert [record.cause for record in records] == ["saved", "saved"], logs(run)
    assert "of chain.max_node_hours 0.05 are used" in (stop_reason(run) or ""), logs(run)
    used = budget.used_node_seconds(run, plan, until=time.time())
    assert 2 * 60 < used < 2 * 90
    run.stop.unlink()
    durable = records[-1].durable_iteration
    plan_with(plan, max_node_hours=1.0, total_steps=durable + 5, submitted_after_attempt=2).write(run.plan)
    start(cluster, run)
    wait_for_end(cluster, run, plan)
    assert len(ends(run)) == 3
    assert ends(run)[-1].durable_iteration > durable + 5
    assert (stop_reason(run) or "").startswith("the last iteration"), logs(run)


def test_a_budget_that_is_raised_while_a_job_runs_holds_for_it(cluster: TestCluster, tmp_path: Path) -> None:
    before, after = 120.0, 200.0
    command = {"steps": 300, "run": words(tmp_path, 300, seconds=1.0, every=20)}
    chain = {"max_node_hours": before / 3600, "grace_period": 10}
    config = write_config(tmp_path, "run", cluster=SITE, chain=chain, command=command)
    relayrun(cluster, "submit", config, "--yes")
    run = Run(tmp_path / "run")
    wait_for_iteration(cluster, run)
    began = run.attempt(1).started_record()
    assert (began.job_end_time or 0) - (began.job_start_time or 0) == pytest.approx(before, abs=1)
    told = relayrun(cluster, "resume", run.path, "--set", f"chain.max_node_hours={after / 3600}")
    assert told == f"the jobs of {run.path} obey within a minute\n"
    refused = [sys.executable, "-m", "relayrun.cli", "resume", str(run.path), "--set", "job.time=20"]
    assert "this run has jobs already" in cluster.run(refused, cwd=ROOT, check=False).stderr
    wait_for_end(cluster, run, Plan.load(run))
    (record,) = ends(run)
    assert record.cause == "saved", logs(run)
    assert "of chain.max_node_hours 0.0555556 are used" in (stop_reason(run) or ""), logs(run)
    used = budget.used_node_seconds(run, Plan.load(run), until=time.time())
    print(f"the limit was {before:.0f} node seconds, then {after:.0f}; used {used:.1f}")
    assert before < used <= after
    assert iterations(run) == list(range(1, record.durable_iteration + 1))


def test_stages_are_stopped_by_their_budget_and_their_owner_raises_it(cluster: TestCluster, tmp_path: Path) -> None:
    """The first stage uses a part of it, the second the rest; the table of a project shows both."""
    seconds = 150.0
    steps = {"from": "one", "command.steps": 160, "command.run": words(tmp_path, 160, seconds=1.0)}
    chain = {"max_node_hours": seconds / 3600, "grace_period": 10}
    config = write_config(tmp_path, "plan", seconds=1.0, cluster=SITE, chain=chain, stages={"one": None, "two": steps})
    relayrun(cluster, "stages", "submit", config, "--yes")
    one, two = (member.run for member in Campaign.load(tmp_path / "plan").members)
    cluster.wait_until(lambda: stop_reason(two) is not None and not cluster.queue(), 600, what="the budget is over")
    assert stop_reason(one) == "the last iteration, 4, is saved"
    reason = stop_reason(two) or ""
    assert reason.startswith("the budget is over: ")
    assert "of chain.max_node_hours 0.0416667 are used by all runs of plan together" in reason
    own = [budget.used_node_seconds(run, Plan.load(run), until=time.time()) for run in (one, two)]
    assert min(own) > 4
    assert seconds / 2 < sum(own) <= seconds
    assert 4 < max(iterations(two)) < 160
    shown = relayrun(cluster, "status", tmp_path)
    rows = {name: next(line for line in shown.splitlines() if f"tests/plan-{name}" in line) for name in ("one", "two")}
    assert " done " in rows["one"]
    assert " stopped " in rows["two"]
    assert f"{sum(own) / 3600:.1f}" in shown.splitlines()[-1]
    relayrun(cluster, "stages", "resume", tmp_path / "plan", "--set", "chain.max_node_hours=1")
    relayrun(cluster, "resume", two.path, "--yes")
    cluster.wait_until(lambda: stop_reason(two) is not None and not cluster.queue(), 600, what="the end of the stages")
    assert stop_reason(two) == "the last iteration, 160, is saved"
    assert iterations(two) == list(range(5, 161))
