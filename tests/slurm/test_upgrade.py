"""A chain that the version before run directories had a format started goes on with this one, on a real Slurm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.control.rundir import triggers
from relayrun.control.rundir.merged_metrics import valid_lines
from relayrun.control.rundir.plan import PLAN_FORMAT, Plan
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.files import read_json, read_lines
from tests.workspace import Workspace, ends, steps

from .cluster import ROOT, TestCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

BEFORE = "96ec013"
"""The last commit of run directories without a format."""


def trained(run: Run, attempt: int) -> bool:
    return any("loss" in line for line in read_lines(run.attempt(attempt).metrics))


def test_the_checkout_is_updated_in_place_between_two_jobs(cluster: TestCluster, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True)
    assert archive.returncode == 0, f"this test needs the history back to {BEFORE}: {archive.stderr.decode()}"
    subprocess.run(["tar", "-x", "-C", checkout], input=archive.stdout, check=True)
    workspace = Workspace.make(tmp_path / "workspace")
    config = workspace.config(
        "run",
        training={"steps": 1_000_000},
        checkpoint={"interval": 50},
        job={"nodes": 2, "ntasks_per_node": 1, "time": "10"},
        cluster={"name": "test", "scheduler": "slurm", "environment": {"MASTER_ADDR": "127.0.0.1"}},
    )
    old = {"PYTHONPATH": str(checkout)}
    cluster.run([sys.executable, "-m", "relayrun.cli", "submit", config], cwd=checkout, env=old, timeout=120)
    run = workspace.run("run")
    assert "format" not in read_json(run.plan)
    plan = Plan.load(run)
    assert plan.package_root == str(checkout)
    cluster.wait_until(lambda: trained(run, 1), timeout=600)
    first = AttemptStart.read(run.attempt(1).begin)
    assert first is not None
    successor = next(job.id for job in cluster.queue() if job.name == plan.job_name and job.state == "PENDING")
    cluster.run(["scontrol", "hold", successor])
    cluster.run(["scancel", "--signal=USR2", "--batch", first.job_id])
    cluster.wait_job(first.job_id, timeout=600)
    for name in ("relayrun", "launchers"):
        shutil.rmtree(checkout / name)
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    cluster.run(["scontrol", "release", successor])
    cluster.wait_until(lambda: trained(run, 2), timeout=600)
    assert read_json(run.plan)["format"] == PLAN_FORMAT
    triggers.touch_trigger(run, "exit")
    cluster.wait_until(lambda: not [j for j in cluster.queue() if j.name == plan.job_name], timeout=600)
    assert [end.cause for end in ends(run)] == ["saved", "exit"]
    second = AttemptStart.read(run.attempt(2).begin)
    assert second is not None
    assert second.base_iteration == ends(run)[0].durable_iteration > 0
    assert list(read_lines(run.metrics_view)) == list(valid_lines(run))
    assert list(steps(run)) == list(range(1, ends(run)[1].durable_iteration + 1))
    assert [row["cause"] for row in read_lines(run.attempts_view)] == ["saved", "exit"]
    assert (stop_reason(run) or "").startswith("exit trigger by ")
