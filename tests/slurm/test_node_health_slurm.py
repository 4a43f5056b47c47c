"""A node of a real Slurm is sick by the site's own check: a spare one takes its place, or the next job avoids it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.control.rundir import node_health
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import error_lines
from tests.chain.test_local_recovery import SETTINGS, assert_same_run
from tests.workspace import Workspace, ends

from .cluster import TestCluster
from .test_recovery_slurm import CLUSTER
from .test_training_chain import SLURM, TWO_NODES, submit, wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

CHECK = "import os, sys; print('no scratch'); sys.exit(1 if os.environ['SLURMD_NODENAME'] == 'n1' else 0)"


def config(workspace: Workspace, folder: str, *, spare_nodes: int, **chain: object) -> Path:
    chain = {"recovery": "node", "node_health_command": [sys.executable, "-c", CHECK], **chain}
    job = TWO_NODES | {"time": "10", "spare_nodes": spare_nodes}
    return workspace.config(folder, **SETTINGS, chain=chain, job=job, cluster=CLUSTER)


def found(run: Run, attempt: int) -> list[tuple[str, str, str]]:
    return [
        (each.node, each.check, each.action) for each in node_health.read_findings(run.attempt(attempt)) if each.hard
    ]


def test_a_sick_node_is_left_out_of_its_job_or_of_the_next_one(cluster: TestCluster, tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    submit(cluster, workspace.config("whole", **SETTINGS, job=TWO_NODES | {"time": "10"}, cluster=SLURM))
    wait_for_end(cluster, workspace.run("whole"), timeout=600)

    submit(cluster, config(workspace, "spare", spare_nodes=1))
    run = workspace.run("spare")
    wait_for_end(cluster, run, timeout=600)
    assert [end.cause for end in ends(run)] == ["done"]
    assert found(run, 1) == [("n1", "command", "left out")]
    assert_same_run(run, workspace.run("whole"))
    shown = cluster.run([sys.executable, "-m", "relayrun.cli", "status", str(run.path)]).stdout
    assert "no scratch (exit status 1); left out" in " ".join(shown.split())

    submit(cluster, config(workspace, "next", spare_nodes=0, auto_requeue=True))
    run = workspace.run("next")
    wait_for_end(cluster, run, timeout=600)
    first, second = ends(run)
    assert (first.cause, second.cause) == ("failed", "done")
    assert "no scratch (exit status 1)" in first.reason
    assert found(run, 1) == [("n1", "command", "ended")]
    assert found(run, 2) == []
    begin = run.attempt(2).read_begin()
    assert begin is not None
    assert "n1" not in error_lines.expand_nodelist(begin.nodes)
    assert_same_run(run, workspace.run("whole"))
