"""A project of an installed package on a real Slurm: its launcher, and an upgrade while its chain is under way."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from relayrun.control.rundir import triggers
from relayrun.control.rundir.run import Run
from tests.wheel import build, install
from tests.workspace import ends

from .cluster import TestCluster
from .test_training_chain import wait_for_end, wait_for_iteration

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_a_launcher_of_a_project_and_its_chain_go_on_when_the_package_is_gone(
    cluster: TestCluster, tmp_path: Path
) -> None:
    installed = install(build(tmp_path), tmp_path, "train")
    installed.run(installed.folder / "bin/relayrun", "init", "p", "--cluster", "generic", cwd=tmp_path)
    project = tmp_path / "p"
    with open(project / "configs/clusters/generic.yaml", "r+") as site:
        text = site.read().replace("environment: {}", "environment: {MASTER_ADDR: 127.0.0.1}")
        assert "MASTER_ADDR" in text
        site.seek(0)
        site.write(text)
    settings = {
        "PYTHONPATH": "",
        "MOCK_DATA": "true",
        "MBS": "1",
        "GBS": "2",
        "SEQ_LEN": "64",
        "TRAINING_STEPS": "50000",
        "CHECKPOINT_STEPS": "40000",
        "TENSORBOARD": "false",
        "AUTO_JOB_REQUEUE": "true",
        "HOST_PYTHON": getattr(sys, "_base_executable", "python3"),
    }
    settings = {name: value for name, value in os.environ.items() if name in ("PATH", "SLURM_CONF")} | settings
    launcher = project / "launchers/submit-my-run.sh"
    options = ["--ntasks-per-node=1", "--cpus-per-task=1"]
    first = cluster.sbatch([*options, launcher], cwd=tmp_path, env=settings)
    run = Run(project / "logs/runs/p/my-run")
    wait_for_iteration(cluster, run, 1)
    shutil.rmtree(installed.packages / "relayrun")
    cluster.run(["scancel", "--signal=USR2", "--batch", first])
    wait_for_iteration(cluster, run, 2)
    triggers.touch_trigger(run, "exit")
    wait_for_end(cluster, run, timeout=300)
    assert [end.cause for end in ends(run)] == ["saved", "exit"]
    assert list((project / "logs/slurm/training").glob("*.err"))
