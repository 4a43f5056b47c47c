"""`relayrun wrap` on a real Slurm: the script starts its own steps on all nodes of the job, as below sbatch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.config.compose import yaml_file
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.run import Run
from tests.submit.test_wrap import TRAIN
from tests.workspace import ends

from .cluster import ROOT, TestCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=toy --time=5
#SBATCH --nodes=2 --ntasks-per-node=2
echo "batch: $SLURM_NNODES nodes, $SLURM_NTASKS tasks, step ${{SLURM_STEP_ID:-none}}, rank ${{RANK:-none}}"
srun bash -c 'echo "task $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME"'
srun --ntasks=1 --nodes=1 {python} train.py "$1"
"""


@pytest.mark.parametrize("pyz", [False, True])
def test_a_script_with_steps_of_its_own_is_a_chain(cluster: TestCluster, tmp_path: Path, pyz: bool) -> None:
    (tmp_path / ".relayrun").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "train.sbatch").write_text(SCRIPT.format(python=sys.executable))
    site = {"name": "test", "scheduler": "slurm", "environment": {"MASTER_ADDR": "127.0.0.1"}}
    (tmp_path / "site.yaml").write_text(yaml_file.dump_yaml(site))
    wrap = [sys.executable, "-m", "relayrun.cli", "wrap", f"--cluster={tmp_path / 'site.yaml'}"]
    told = ["--checkpoints=out/step-{iteration}.pt", r"--progress=step (?P<iteration>\d+)"]
    if pyz:  # the host's Python, without any package
        alone = [getattr(sys, "_base_executable", "python3"), "-I", str(tmp_path / "relayrun.pyz")]
        cluster.run([sys.executable, ROOT / "scripts/tools/make_pyz.py", alone[-1]], cwd=tmp_path)
        wrap = ["env", f"RELAYRUN_PYZ_DIR={tmp_path / 'unpacked'}", *alone, "wrap"]
    cluster.run([*wrap, *told, tmp_path / "train.sbatch", "60"], cwd=tmp_path)
    run = Run(tmp_path / "logs/runs/wrapped/toy")
    cluster.wait_until(run.stop.exists, timeout=240, interval=1)
    log = "".join(path.read_text() for path in sorted((tmp_path / "logs/slurm/training").glob("*.*")))
    assert [end.cause for end in ends(run)] == ["failed", "done"], log
    assert resume_point(run).iteration == 60
    if pyz:
        said = cluster.run([*wrap[:-1], "status", "wrapped/toy"], cwd=tmp_path).stdout
        assert "the program ended by itself, with exit code 0" in said
        assert "exit code 1" in cluster.run([*wrap[:-1], "why", "wrapped/toy", "--attempt=1"], cwd=tmp_path).stdout
    assert log.count("batch: 2 nodes, 4 tasks, step none, rank none") == 2, log
    assert {line for line in log.splitlines() if line.startswith("task ")} == {
        f"task {task} of 4 on n{task // 2}" for task in range(4)
    }
