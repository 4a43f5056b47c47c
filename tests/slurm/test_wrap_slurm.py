"""`relayrun wrap` on a real Slurm: the script starts its own steps on all nodes of the job, as below sbatch."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from relayrun.config.compose import yaml_file
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.run import Run
from tests.submit.test_wrap import TRAIN
from tests.workspace import ends

from .cluster import ROOT, TestCluster
from .test_law_slurm import begin_of

SCRIPT_PAGE = (ROOT / "docs/tutorial/from-your-script-to-a-chain.md").read_text(encoding="utf-8")
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=toy --time=5
#SBATCH --nodes=2 --ntasks-per-node=2
echo "batch: $SLURM_NNODES nodes, $SLURM_NTASKS tasks, step ${{SLURM_STEP_ID:-none}}, rank ${{RANK:-none}}"
srun bash -c 'echo "task $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME"'
srun --ntasks=1 --nodes=1 {python} train.py "$1"
"""


TOLD = ["--checkpoints=out/step-{iteration}.pt", r"--progress=step (?P<iteration>\d+)"]


def wrap_command(folder: Path) -> list[str]:
    """Write a script and what it needs; return the command that wraps it."""
    (folder / ".relayrun").touch()
    (folder / "out").mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "train.sbatch").write_text(SCRIPT.format(python=sys.executable))
    site = {"name": "test", "scheduler": "slurm", "environment": {"MASTER_ADDR": "127.0.0.1"}}
    (folder / "site.yaml").write_text(yaml_file.dump_yaml(site))
    return [sys.executable, "-m", "relayrun.cli", "wrap", f"--cluster={folder / 'site.yaml'}"]


def test_a_script_that_is_killed_as_the_tutorial_says_goes_on(cluster: TestCluster, tmp_path: Path) -> None:
    wrap = wrap_command(tmp_path)
    (tmp_path / "died").touch()
    cluster.run([*wrap, *TOLD, "--set=name=try", tmp_path / "train.sbatch", "600"], cwd=tmp_path)
    run = Run(tmp_path / "logs/runs/wrapped/try")
    cluster.wait_until(lambda: resume_point(run).iteration >= 10, timeout=120)
    (kill,) = re.findall(r"^(scancel .*JOB\S*)", SCRIPT_PAGE, re.M)
    cluster.run(kill.replace("JOB", run.attempt(1).started_record().job_id).split())
    saved = resume_point(run).iteration
    cluster.wait_until(run.stop.exists, timeout=240, interval=1)
    assert [end.cause for end in ends(run)] == ["failed", "done"]
    assert saved <= begin_of(run, 2).base_iteration < 600


@pytest.mark.parametrize("pyz", [False, True])
def test_a_script_with_steps_of_its_own_is_a_chain(cluster: TestCluster, tmp_path: Path, pyz: bool) -> None:
    wrap, told = wrap_command(tmp_path), TOLD
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
