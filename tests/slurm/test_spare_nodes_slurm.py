"""Nodes of a real Slurm are lost, and a spare one goes on inside the same job: the real training program."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.chain.failure_reason import attempt_log
from relayrun.control.rundir import restarts
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from tests.chain.test_local_recovery import SETTINGS, assert_same_run
from tests.workspace import Workspace, ends

from . import power_loss
from .cluster import TestCluster
from .conftest import MakeCluster
from .test_recovery_slurm import CLUSTER, agents
from .test_training_chain import SLURM, TWO_NODES, job_of, submit, wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

SPARE = TWO_NODES | {"spare_nodes": 1, "time": "20"}


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Iterator[TestCluster]:
    """Four nodes, of which Slurm notices the loss after 20 to 40 seconds; each test loses some. On a busy machine Slurm
    24.11 waits up to 10 s for one that is lost, and asks no other one meanwhile."""
    found = make_cluster(node_timeout=20)
    yield found
    found.down()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.make(tmp_path_factory.mktemp("workspace"))


def config(
    workspace: Workspace,
    folder: str,
    *,
    memory_interval: int = 0,
    step_seconds: int = 1,
    host_python: str | None = None,
    **chain: object,
) -> Path:
    hook = {
        "hook": "relayrun.lab.faults.injection:FaultInjectionHook",
        "options": {"faults": f"slow-after=6:{step_seconds}"},
    }
    sections = SETTINGS | {
        "training": SETTINGS["training"] | {"hooks": [hook]},
        "checkpoint": SETTINGS["checkpoint"] | {"memory_interval": memory_interval},
        "chain": {"recovery": "node"} | chain,
        "job": SPARE,
        "cluster": CLUSTER | ({"host_python": host_python} if host_python else {}),
    }
    return workspace.config(folder, **sections)


def reference(cluster: TestCluster, workspace: Workspace) -> Run:
    """The undisturbed run, without agents; trained once."""
    run = workspace.run("whole")
    if not run.path.exists():
        submit(cluster, workspace.config("whole", **SETTINGS, job=TWO_NODES | {"time": "20"}, cluster=SLURM))
        wait_for_end(cluster, run, timeout=600)
    return run


def wait_for(cluster: TestCluster, run: Run, iteration: int, *, attempt: int = 1) -> None:
    def reached() -> bool:
        return any(line["iteration"] >= iteration for line in read_json_lines(run.attempt(attempt).metrics))

    cluster.wait_until(reached, timeout=360, interval=0.1, what=f"iteration {iteration}")


def without_n1(
    cluster: TestCluster, workspace: Workspace, name: str, **settings: Any
) -> tuple[Run, restarts.FailedRestart]:
    """A run that loses its second node at iteration 8 and is done all the same, and the restart that failed then."""
    submit(cluster, config(workspace, name, **settings))
    run = workspace.run(name)
    wait_for(cluster, run, 8)
    power_loss.lose(cluster, "n1")
    wait_for_end(cluster, run, timeout=600)
    assert [end.cause for end in ends(run)] == ["done"]
    (failed,) = restarts.read_failed_restarts(run.attempt(1))
    return run, failed


@pytest.mark.parametrize("silent", [False, True], ids=["dead", "silent"])
def test_a_spare_node_goes_on_inside_the_job(cluster: TestCluster, workspace: Workspace, silent: bool) -> None:
    whole = reference(cluster, workspace)
    name = f"lost-{silent}"
    submit(cluster, config(workspace, name))
    run = workspace.run(name)
    wait_for(cluster, run, 8)
    gone = power_loss.lose(cluster, "n1", silent=silent)
    if silent:
        cluster.wait_until(lambda: len(agents_of_round_2(run)) > 0, timeout=300, what="a restart without n1")
        power_loss.bring_back(gone)
    wait_for_end(cluster, run, timeout=600)
    assert [end.cause for end in ends(run)] == ["done"]
    (failed,) = restarts.read_failed_restarts(run.attempt(1))
    assert (failed.rank, failed.node, failed.lost) == (None, "n1", {"n1": "n2"})
    begin = AttemptStart.read(run.attempt(1).begin)
    assert begin is not None
    assert cluster.job(begin.job_id)["Restarts"] == "0"
    assert_same_run(run, whole)
    shown = cluster.run([sys.executable, "-m", "relayrun.cli", "goodput", "--json", str(run.path)]).stdout
    spent = json.loads(shown)
    (attempt,) = (each for each in spent["attempts"] if each["attempt"] is not None)
    assert attempt["node_seconds"]["spare"] > 0  # before the loss
    assert attempt["node_seconds"]["given up"] > 0  # behind it
    assert sum(spent["node_seconds"].values()) == pytest.approx(spent["allocated_node_seconds"], abs=1e-3)
    assert spent["node_seconds"]["unknown"] <= 0.01 * spent["allocated_node_seconds"]
    done = cluster.run([sys.executable, "-m", "relayrun.cli", "status", str(run.path)])
    assert "n2 takes the place of n1" in done.stdout
    cluster.wait_until(lambda: not agents(run), timeout=300, what="the end of all agents")


def test_a_spare_node_begins_with_the_copies_that_the_next_node_keeps(
    cluster: TestCluster, workspace: Workspace
) -> None:
    whole = reference(cluster, workspace)
    run, failed = without_n1(cluster, workspace, "copies", memory_interval=1)
    assert (failed.lost, failed.source) == ({"n1": "n2"}, "neighbour")
    assert failed.next_iteration >= 7
    assert failed.steps_lost <= 1
    assert_same_run(run, whole)


def agents_of_round_2(run: Run) -> list[object]:
    return [failed for failed in restarts.read_failed_restarts(run.attempt(1)) if failed.seconds.get("all")]


def test_the_batch_host_is_lost_and_the_job_begins_again_under_its_id(
    cluster: TestCluster, workspace: Workspace
) -> None:
    whole = reference(cluster, workspace)
    submit(cluster, config(workspace, "batch", auto_requeue=True))
    run = workspace.run("batch")
    wait_for(cluster, run, 8)
    power_loss.lose(cluster, "n0")
    name = Plan.load(run).job_name  # for a while two of its jobs wait: this one, and its successor behind it
    cluster.wait_until(lambda: all(job.name != name for job in cluster.queue()), timeout=600, interval=0.5)
    assert [end.cause for end in ends(run)] == ["unknown", "done"]
    assert ends(run)[0].reason.startswith("n0: the batch host is lost; the batch script is gone with it")
    assert job_of(run, 1) == job_of(run, 2)
    assert cluster.job(job_of(run, 1))["Restarts"] == "1"
    assert_same_run(run, whole)


@pytest.mark.parametrize("mode", ["singleton", "requeue"])
@pytest.mark.parametrize("node", ["n1", "n0"], ids=["a-node", "the-batch-host"])
def test_no_job_waits_for_a_spare_node_that_is_not_up(
    cluster: TestCluster, workspace: Workspace, node: str, mode: str
) -> None:
    """Three nodes are up, all of them the job's; behind the loss of one the next job has two of them."""
    whole = reference(cluster, workspace)
    cluster.run(["scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=broken"])
    name = f"{mode}-without-{node}"
    submit(cluster, config(workspace, name, auto_requeue=True, mode=mode))
    run = workspace.run(name)
    wait_for(cluster, run, 8)
    power_loss.lose(cluster, node)
    if node == "n1":  # Slurm has not noticed when the attempt ends
        cluster.wait_until(lambda: len(agents_of_round_2(run)) > 0, timeout=300, what="a restart without n1")
        cluster.run(["scancel", "--signal=USR2", "--batch", job_of(run, 1)])
    job_name = Plan.load(run).job_name
    cluster.wait_until(lambda: all(job.name != job_name for job in cluster.queue()), timeout=600, interval=0.5)
    assert [end.cause for end in ends(run)] == ["saved" if node == "n1" else "unknown", "done"]
    begin = AttemptStart.read(run.attempt(2).begin)
    assert begin is not None
    assert begin.nodes == ("n[0,2]" if node == "n1" else "n[1-2]")
    assert begin.job_id != job_of(run, 1)
    assert_same_run(run, whole)


def test_a_spare_node_takes_the_place_of_one_where_begin_fails(
    cluster: TestCluster, workspace: Workspace, tmp_path: Path
) -> None:
    """Three nodes are up, all of them the job's; on its batch host no Python starts."""
    whole = reference(cluster, workspace)
    cluster.run(["scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=broken"])
    python = tmp_path / "host-python"
    python.write_text(f'#!/bin/bash\n[[ "${{SLURMD_NODENAME:-}}" != n0 ]] || exit 1\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    submit(cluster, config(workspace, "begin-fails", auto_requeue=True, host_python=str(python)))
    run = workspace.run("begin-fails")
    wait_for_end(cluster, run, timeout=600)
    assert [end.cause for end in ends(run)] == ["done"]
    begin = AttemptStart.read(run.attempt(1).begin)
    assert begin is not None
    assert begin.nodes == "n[1-2]"
    assert cluster.job(begin.job_id)["Restarts"] == "1"
    assert_same_run(run, whole)


def test_without_a_successor_the_job_ends_with_its_batch_host(cluster: TestCluster, workspace: Workspace) -> None:
    submit(cluster, config(workspace, "alone", auto_requeue=False))
    run = workspace.run("alone")
    wait_for(cluster, run, 8)
    power_loss.lose(cluster, "n0")
    cluster.wait_until(run.attempt(1).end.exists, timeout=300)
    assert cluster.wait_job(job_of(run, 1)) == "CANCELLED"
    (end,) = ends(run)
    assert (end.cause, end.action) == ("unknown", "end")
    assert end.reason.startswith("n0: the batch host is lost")


def test_a_starter_that_stands_still_holds_no_node_to_the_time_limit(
    cluster: TestCluster, workspace: Workspace
) -> None:
    """The starter contains the coordinator: nobody restarts the rank that dies meanwhile."""
    whole = reference(cluster, workspace)
    submit(
        cluster, config(workspace, "still", hang_timeout=20, step_seconds=3)
    )  # time for the kills before the last one
    run = workspace.run("still")
    wait_for(cluster, run, 8)
    (starter,) = agents(run, "relayrun.control.agent.step_per_node")
    os.kill(starter, signal.SIGSTOP)
    for server in children(agents(run)[0]):  # its ranks die with it
        os.kill(server, signal.SIGKILL)
    began = time.monotonic()
    cluster.wait_until(run.attempt(2).begin.exists, timeout=400, what="the next job")
    print(f"the next job after {time.monotonic() - began:.0f} s")
    assert f"process {starter}, which started the ranks, is still there; ending it" in attempt_log(run.attempt(1))
    wait_for_end(cluster, run, timeout=600)
    assert [end.cause for end in ends(run)] == ["hang", "done"]
    assert_same_run(run, whole)


def test_steps_of_a_starter_that_is_killed_end_with_it(cluster: TestCluster, workspace: Workspace) -> None:
    """Alone, by the memory limit for instance: the batch script records the end, and the next job goes on."""
    whole = reference(cluster, workspace)
    submit(cluster, config(workspace, "starter", step_seconds=3))
    run = workspace.run("starter")
    wait_for(cluster, run, 8)
    (starter,) = agents(run, "relayrun.control.agent.step_per_node")
    left = agents(run)
    os.kill(starter, signal.SIGKILL)
    cluster.wait_until(run.attempt(2).begin.exists, timeout=300, what="the next job")
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]
    wait_for_end(cluster, run, timeout=600)
    assert [end.cause for end in ends(run)] == ["failed", "done"]
    assert_same_run(run, whole)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
