"""What people see of a chain's end on a real Slurm: who is blamed, what is fatal, what is broken."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from relayrun.control.chain.excluded_nodes import read_node_failures
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.watch.status import queue, run_status
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture

from .cluster import ROOT, TestCluster
from .test_chain import SLURM, ends, hurry, logs, start, wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def status(cluster: TestCluster, run: Run) -> run_status.RunStatus:
    """As a person on this cluster sees it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.conf))
        return run_status.read_run_status(run, queue.query_queue(run), now=0.0)


def test_a_rank_that_is_killed_is_blamed_and_its_neighbour_that_noticed_is_not(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
) -> None:
    """Rank 0 leaves words on the closed connection, and is as fast as srun's news of the end of rank 1."""
    run, plan = make_run("--killed=1", total_steps=60, max_failed_attempts=2, **SLURM)
    start(cluster, run)
    cluster.wait_until(run.attempt(1).end.exists, timeout=600)
    hurry(cluster, plan)
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["failed", "failed"], logs(run)
    hosts = [run.attempt(number).read_begin().nodes for number in (1, 2)]  # type: ignore[union-attr]
    assert hosts == ["n[0-1]", "n[0-1]"]
    assert [strike.node for strike in read_node_failures(run)] == ["n1", "n1"], logs(run)
    assert "task 1 on n1: Killed" in ends(run)[0].reason
    assert "task 1 on n1: Killed" in run.stop.read_text()


def test_a_python_that_is_on_no_node_stops_the_chain_at_once(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    run, plan = make_run(program=["/no/such/python", "-m", "relayrun.train"], **SLURM)
    start(cluster, run)
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["fatal"], logs(run)
    assert "/no/such/python is not found on any rank" in run.stop.read_text()
    assert read_node_failures(run) == []


def test_a_first_job_that_dies_in_a_second_is_broken_and_not_idle(cluster: TestCluster, make_run: MakeRun) -> None:  # noqa: F811
    """Slurm cannot open its output, so that it does not even start."""
    run, _plan = make_run(**SLURM)
    job = cluster.sbatch(["--output=/proc/nowhere/log", run.job_script])
    cluster.wait_job(job)
    cluster.wait_until(lambda: not cluster.queue())
    found = status(cluster, run)
    assert found.state == "failed", found
    assert found.last_job is not None
    assert found.last_job.id == job
    assert found.last_job.source == "scontrol"
    assert f"job {job}" in (found.broken or "")
    assert "before it began" in (found.broken or "")


def test_a_chain_whose_successor_is_gone_is_broken_and_says_how_its_job_died(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
) -> None:
    run, plan = make_run("--steps=1000", total_steps=1000, **SLURM)
    start(cluster, run)
    cluster.wait_until(run.attempt(1).metrics.exists, timeout=600)
    pending = status(cluster, run)
    assert pending.state == "running"
    assert list(pending.pending.values()) == ["Dependency"]
    begin = run.attempt(1).read_begin()
    assert begin is not None
    successor = next(job.id for job in cluster.queue() if job.state == "PENDING")
    for pid in batch_scripts(plan):  # it is killed with all it would have said, and nothing follows
        os.kill(pid, signal.SIGSTOP)
    cluster.run(["scancel", successor])
    for pid in batch_scripts(plan):
        os.kill(pid, signal.SIGKILL)
    cluster.wait_job(begin.job_id)
    cluster.wait_until(lambda: not cluster.queue(), timeout=600)
    found = status(cluster, run)
    assert found.state == "failed", found
    assert f"attempt 1, job {begin.job_id}, is gone without an end" in (found.broken or "")
    assert found.last_job is not None
    assert found.last_job.state in (found.broken or "")
    done = cluster.run([sys.executable, "-m", "relayrun.cli", "status", run.path, "--json"], cwd=ROOT)
    assert json.loads(done.stdout)["state"] == "failed"


def batch_scripts(plan: Plan) -> list[int]:
    """Process ids of the chain's batch scripts: Slurm names its copy in the spool slurm_script."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"slurm_script" in words and f"SLURM_JOB_NAME={plan.job_name}".encode() in variables:
            found.append(int(entry.name))
    return found
