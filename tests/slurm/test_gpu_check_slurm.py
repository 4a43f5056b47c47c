"""`relayrun gpu-check` started by srun, on CPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from relayrun.config.compose import yaml_file
from tests import warm

from .cluster import TestCluster
from .test_training_chain import SLURM

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.mark.long
def test_srun_starts_the_check_on_a_node(cluster: TestCluster, tmp_path: Path) -> None:
    site = tmp_path / "it's a site.yaml"
    site.write_text(yaml_file.dump_yaml(SLURM | {"python": warm.python()}))
    command = ["srun", "--nodes=1", "--ntasks=1", sys.executable, "-m", "relayrun.cli", "gpu-check", "--tiny"]
    cluster.run([*command, f"--cluster={site}", f"--folder={tmp_path / 'check'}", "--only", "environment"])
    result = json.loads((tmp_path / "check" / "gpu-tiny.json").read_text())
    assert [(part["name"], part["status"]) for part in result["parts"]] == [("environment", "done")]
    cluster.wait_until(lambda: not cluster.queue(), what="the end of srun's own job, and no other")
