"""A controller that takes half a minute for each answer: people are told what is known, and one job is queued."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.workspace import Workspace

from .cluster import ROOT, TestCluster
from .test_training_chain import chain_jobs, job_of, wait_for_end, wait_for_iteration

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

SECONDS = 30
COMMANDS = ("sacct", "sbatch", "scancel", "scontrol", "sinfo", "squeue")

WRAPPER = """#!/bin/sh
grep -qz '^SLURM_JOB_ID=' /proc/$PPID/environ || sleep {seconds}
exec {real} "$@"
"""


def slow_commands(folder: Path, path: str) -> str:
    """Return a PATH with Slurm's commands, each of which waits first where a person calls it."""
    folder.mkdir()
    for name in COMMANDS:
        real = shutil.which(name, path=path)
        assert real is not None
        (folder / name).write_text(WRAPPER.format(seconds=SECONDS, real=real))
        (folder / name).chmod(0o755)
    return f"{folder}:{path}"


def test_a_slow_controller_costs_a_person_time_and_nothing_else(cluster: TestCluster, tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path / "workspace")
    hook = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "slow-after=3:1"}}
    path = workspace.config(
        "slow",
        cluster={"name": "test", "scheduler": "slurm"},
        training={"steps": 400, "hooks": [hook]},
        chain={"auto_requeue": True},
    )
    run = workspace.run("slow")
    slow = {"PATH": slow_commands(tmp_path / "slow", cluster.env["PATH"])}
    relayrun = [sys.executable, "-m", "relayrun.cli"]
    cluster.run([*relayrun, "submit", path], env=slow, cwd=ROOT, timeout=900)
    assert len(chain_jobs(cluster, run)) in (1, 2)  # the job has queued its successor, or not yet
    wait_for_iteration(cluster, run, 1)
    began = time.monotonic()
    found = cluster.run([*relayrun, "status", run.path], env=slow, cwd=ROOT).stdout
    assert time.monotonic() - began < 60
    assert f"attempt 1, job {job_of(run, 1)}" in " ".join(found.replace("attempt ", "attempt ").split())
    cluster.run([*relayrun, "cancel", run.path], env=slow, cwd=ROOT, timeout=900)
    wait_for_end(cluster, run, timeout=120)
    assert "cancelled" in run.stop.read_text()
