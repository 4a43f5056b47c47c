"""A chain on a real Slurm is stopped by its budget, and goes on when its owner raises it."""

from __future__ import annotations

import time

import pytest

from relayrun.control.chain import budget
from relayrun.control.rundir.run import stop_reason
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.plans import plan_with

from .cluster import TestCluster
from .test_chain import SLURM, ends, logs, start, wait_for_end

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
