"""Nodes that are machines of their own: process ids that mean nothing on another node, and switches between nodes."""

from __future__ import annotations

import os

import pytest

from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import stop_reason
from relayrun.control.scheduler.error_lines import expand_nodelist
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture

from .cluster import TestCluster
from .conftest import MakeCluster
from .test_chain import SLURM, ends, logs, start, wait_for_end, wait_for_iteration

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a node process ids of its own"),
]


@pytest.fixture(scope="module")
def apart(make_cluster: MakeCluster) -> TestCluster:
    """Four nodes, of which Slurm counts n2 as the first one, and of which none sees another's processes."""
    return make_cluster(apart=True, topology=True, node_timeout=30)


def test_a_node_knows_no_process_of_another_one(apart: TestCluster) -> None:
    job = apart.sbatch(
        ["--nodes=2", "--wrap=echo batch $$; srun bash -c 'echo $SLURMD_NODENAME; ls -d /proc/[0-9]* | wc -l'"]
    )
    assert apart.wait_job(job) == "COMPLETED"
    said = apart.output(job).split()
    assert {"n0", "n1"} <= set(said) or {"n2", "n3"} <= set(said), said
    assert int(said[1]) < 100, "the batch script's process id counts from the start of its node"


@pytest.mark.parametrize("mode", ["requeue", "singleton"])
def test_a_cancelled_job_stays_cancelled(apart: TestCluster, make_run: MakeRun, mode: str) -> None:  # noqa: F811
    run, plan = make_run("--steps=1000", total_steps=1000, **SLURM | {"nodes": 4, "mode": mode})
    start(apart, run)
    wait_for_iteration(apart, run)
    begin = AttemptStart.read(run.attempt(1).begin)
    assert begin is not None
    guard = run.attempt(1).guard_log
    if mode == "requeue":  # the other mode has a guard only where no successor could be queued
        apart.wait_until(lambda: guard.exists() and "guarding attempt 1" in guard.read_text(), what="the guard")
    apart.run(["scancel", begin.job_id])
    wait_for_end(apart, run, plan)
    assert not guard.exists() or "not the batch host" not in guard.read_text()
    assert [end.cause for end in ends(run)] == ["cancelled"], logs(run)
    assert stop_reason(run) in ("the job was cancelled", "the job before this one was cancelled")
    job = apart.job(begin.job_id)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), logs(run)


def test_a_node_without_power_ends_the_attempt_and_not_the_chain(apart: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    run, plan = make_run("--steps=60", total_steps=60, **SLURM)
    start(apart, run)
    wait_for_iteration(apart, run)
    begin = AttemptStart.read(run.attempt(1).begin)
    assert begin is not None
    apart.kill_node(expand_nodelist(begin.nodes)[-1])
    wait_for_end(apart, run, plan)
    assert [end.cause for end in ends(run)][-1] == "done", logs(run)
