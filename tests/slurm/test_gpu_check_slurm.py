"""`relayrun gpu-check` as one Slurm job of two nodes, on CPUs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from relayrun.config.compose import yaml_file
from relayrun.lab.gpucheck import report
from tests import warm

from .cluster import ROOT, TestCluster
from .test_training_chain import SLURM

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

LOGS = ROOT / "logs" / "slurm" / "training"


@pytest.mark.long
def test_all_nodes_measure_the_bandwidth_and_the_first_one_the_rest(cluster: TestCluster, tmp_path: Path) -> None:
    site = tmp_path / "it's a site.yaml"
    site.write_text(yaml_file.dump_yaml(SLURM | {"job": {"partition": "debug"}, "python": warm.python()}))
    folder = tmp_path / "it's a check"
    command = [sys.executable, "-m", "relayrun.cli", "gpu-check", "--tiny", f"--cluster={site}", "--nodes=2"]
    submitted = cluster.run([*command, f"--folder={folder}", "--only", "bandwidth", "save"])
    (job,) = re.findall(r"^job (\d+): ", submitted.stdout, re.M)
    assert len(cluster.queue()) == 1
    state = cluster.wait_job(job, timeout=900)
    said = "".join(path.read_text() for path in sorted(LOGS.glob(f"gpu-check-job-*-check-{job}.*")))
    assert state == "COMPLETED", said
    result = json.loads((folder / "gpu-tiny.json").read_text())
    assert [(part["name"], part["status"]) for part in result["parts"]] == [
        ("environment", "done"),
        ("save", "done"),
        ("bandwidth", "done"),
    ]
    bandwidth = result["parts"][-1]["figures"]
    assert bandwidth["nodes"]["ranks"] == 4  # two on each of two nodes
    assert bandwidth["machine"]["ranks"] == 2
    assert all(entry["bus_bytes_per_second"] > 0 for entry in bandwidth["nodes"]["all_reduce"])
    assert report.check_exit_code(report.check_rows(result)) == 0
