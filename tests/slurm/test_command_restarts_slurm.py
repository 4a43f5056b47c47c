"""A foreign program on two nodes of a real Slurm, whose ranks are killed and started again inside their job."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from relayrun.config.compose import yaml_file
from relayrun.control.rundir import restarts
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from tests.chain.test_local_command_restarts import PROGRAM, ranks_of, undisturbed
from tests.workspace import ends

from .cluster import ROOT, TestCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

LAST = 300


def test_ranks_of_a_program_on_two_nodes_start_again_in_their_job(cluster: TestCluster, tmp_path: Path) -> None:
    """Two faults of its own, then a kill at any time: one job, one file of weights, each iteration once."""
    faults = ["1:1:7:SIGKILL", "2:0:10:torn"]
    values = {
        "project": "tests",
        "name": "restarts",
        "run_dir": str(tmp_path / "run"),
        "trainer": "command",
        "command": {
            "run": [sys.executable, str(PROGRAM), "{checkpoints}", str(LAST), *faults],
            "resume": ["--resume", "{checkpoint}"],
            "progress": r"^step (?P<iteration>\d+) loss (?P<loss>\S+)",
            "checkpoint": {"pattern": "step-{iteration}", "whole_when": "done"},
            "steps": LAST,
        },
        "chain": {"recovery": "node"},
        "job": {"time": "15", "nodes": 2, "ntasks_per_node": 1},
        "cluster": {"name": "test", "scheduler": "slurm", "environment": {"MASTER_ADDR": "127.0.0.1"}},
    }
    path = tmp_path / "restarts.yaml"
    path.write_text(yaml_file.dump_yaml(values), encoding="utf-8")
    cluster.run([sys.executable, "-m", "relayrun.cli", "submit", path], cwd=ROOT)
    run = Run(tmp_path / "run")

    def reached(iteration: int) -> bool:
        return any(line["iteration"] >= iteration for line in read_json_lines(run.attempt(1).metrics))

    cluster.wait_until(
        lambda: len(restarts.read_failed_restarts(run.attempt(1))) == 2 and reached(30), timeout=600, interval=0.1
    )
    os.kill(ranks_of(run)[0], signal.SIGKILL)
    cluster.wait_until(run.attempt(1).end.exists, timeout=600, interval=0.5)
    (record,) = ends(run)
    found = restarts.read_failed_restarts(run.attempt(1))
    begin = run.attempt(1).read_begin()
    assert begin is not None
    cluster.wait_job(begin.job_id)  # which brings the view of metrics up to date behind the record of its end
    assert record.cause == "done", Path(begin.log or "").read_text()
    assert [(each.rank, each.node, each.iteration, each.next_iteration) for each in found[:2]] == [
        (1, "n1", 7, 5),
        (0, "n0", 10, 5),
    ]
    assert len(found) == 3
    assert cluster.job(begin.job_id)["Restarts"] == "0"
    losses, weights = undisturbed(LAST)
    assert [(line["iteration"], line["loss"]) for line in read_json_lines(run.metrics_view)] == losses
    assert (run.checkpoints / f"step-{LAST}" / "weights").read_text() == weights
