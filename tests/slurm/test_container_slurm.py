"""A chain of two nodes whose ranks run in a container, by a real apptainer: Debian has one since Slurm 26.05."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.workspace import Workspace, ends, steps

from .cluster import ROOT, TestCluster
from .test_training_chain import SLURM, TWO_NODES, job_of, submit, wait_for_end, wait_for_iteration

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("apptainer") is None, reason="apptainer is not installed"),
]

NAME = "image of this test"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder as an image, with this machine's programs mounted."""
    folder = tmp_path / "image"
    for name in ("usr", "proc", "sys", "dev", "tmp", "etc"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (folder / "etc" / name).touch()
    (folder / "etc/image-name").write_text(f"{NAME}\n")
    return folder


def test_ranks_of_two_nodes_run_in_a_container_from_job_to_job(
    cluster: TestCluster, tmp_path: Path, image: Path
) -> None:
    workspace = Workspace.make(tmp_path / "workspace")
    told = tmp_path / "workspace/told"
    tell = f'echo "$(cat /etc/image-name): rank $SLURM_PROCID of job $SLURM_JOB_ID" >>{told}; exec "$@"'
    inside = {
        "container": {
            "runtime": "apptainer",
            "image": str(image),
            "gpus": "none",
            "mounts": ["/usr", str(ROOT), sys.prefix, sys.base_prefix, str(workspace.folder)],
            "options": ["--userns"],
        },
        "python": sys.executable,
        "command_prefix": ["bash", "-c", tell, "bash"],
    }
    slow = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "slow-after=5:0.5"}}
    config = workspace.config("run", training={"steps": 20, "hooks": [slow]}, job=TWO_NODES, cluster=SLURM | inside)
    submit(cluster, config)
    run = workspace.run("run")
    wait_for_iteration(cluster, run, 1)
    first = job_of(run, 1)
    cluster.run(["scancel", "--batch", "--signal=USR2", first])
    wait_for_end(cluster, run, timeout=600)
    assert [end.cause for end in ends(run)] == ["saved", "done"]
    assert sorted(steps(run)) == list(range(1, 21))
    jobs = [first, job_of(run, 2)]
    lines = told.read_text().splitlines()
    assert {line for line in lines if " rank " in line} >= {
        f"{NAME}: rank {rank} of job {job}" for job in jobs for rank in (0, 1)
    }
