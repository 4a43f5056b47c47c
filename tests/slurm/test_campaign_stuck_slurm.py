"""What holds up a run of a campaign on a real Slurm: it holds up no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.control.rundir.run import Run, stop_reason
from tests.campaigns import attempts, iterations, write_config

from .cluster import ROOT, TestCluster
from .test_campaign_slurm import SITE

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_a_run_that_slurm_refuses_holds_up_no_other(cluster: TestCluster, tmp_path: Path) -> None:
    axes = [{"job.constraint": "nowhere"}, {"job.cpus_per_task": 1}, {"job.cpus_per_task": 2}]
    config = write_config(tmp_path, cluster=SITE, sweep={"list": axes, "at_once": 1})
    command = [sys.executable, "-m", "relayrun.cli", "sweep"]
    done = cluster.run([*command, "submit", config], cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "tiny: 01: its first job is refused: sbatch: " in done.stderr
    runs = [Run(tmp_path / f"tiny-{number:02}") for number in (2, 3)]
    cluster.wait_until(lambda: all(stop_reason(run) for run in runs), timeout=400, what="both others are done")
    cluster.wait_until(lambda: not cluster.queue(), timeout=600, interval=0.5, what="their jobs have ended")
    assert [iterations(run) for run in runs] == [[1, 2, 3, 4]] * 2
    assert attempts(Run(tmp_path / "tiny-01")) == []
    shown = cluster.run([*command, "status", tmp_path / "tiny"], cwd=ROOT)
    assert "its first job is refused: sbatch: " in shown.stderr
