"""`scripts/conversion/do-convert.sh` as Slurm jobs: what ranks have trained, for Hugging Face."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.run import Run
from tests.workspace import VOCABULARY, Workspace, ends

from .cluster import ROOT, TestCluster
from .test_training_chain import SLURM, TWO_NODES, submit, wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

SCRIPT = ROOT / "scripts/conversion/do-convert.sh"


@pytest.fixture(scope="module")
def run(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trained by two tensor-parallel ranks on two nodes, in bf16, with the distributed optimizer."""
    workspace = Workspace.make(tmp_path_factory.mktemp("it's a workspace"))
    config = workspace.config(
        "a run",
        job=TWO_NODES | {"time": "10"},
        cluster=SLURM,
        training={"steps": 12, "precision": "bf16"},
        parallel={"tensor_model_parallel_size": 2, "use_distributed_optimizer": True},
        checkpoint={"interval": 6},
    )
    submit(cluster, config)
    made = workspace.run("a run")
    wait_for_end(cluster, made, timeout=600)
    assert [end.cause for end in ends(made)] == ["done"]
    return made


def convert(cluster: TestCluster, *arguments: str | Path) -> str:
    """Submit the script; return the job's id."""
    return cluster.sbatch([SCRIPT, *arguments], env={"PYTHON": sys.executable})


def test_a_trained_checkpoint_becomes_a_folder_with_its_logits(cluster: TestCluster, run: Run) -> None:
    job = convert(cluster, run.path, "models/it's 12", "--iteration", "12", "--test-logits", "--dtype", "float32")
    assert cluster.wait_job(job, timeout=600) == "COMPLETED", cluster.output(job)
    said = re.search(
        r"logits of megatron-core and transformers on \d+ tokens differ by at most (\S+)", cluster.output(job)
    )
    assert said is not None, cluster.output(job)
    assert float(said.group(1).rstrip(".,;")) < 1e-5
    folder = cluster.work / "models/it's 12"
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("llama", VOCABULARY)
    assert (folder / "model.safetensors").stat().st_size > 4 * VOCABULARY * config["hidden_size"]


def test_what_cannot_be_converted_fails_the_job_with_one_error(cluster: TestCluster, run: Run) -> None:
    checkpoint = Path(str(resume_point(run).path))
    shard = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1000])
    (cluster.work / "taken").mkdir()
    wrong = {
        "nowhere: there is no such run": (run.path.with_name("nowhere"), "failed/nothing"),
        f"{shard.name} has {len(whole) - 1000} bytes, not {len(whole)}": (run.path, "failed/torn", "--iteration", "12"),
        "no checkpoint of iteration 7": (run.path, "failed/iteration", "--iteration", "7"),
        "taken": (run.path, "taken"),
    }
    try:
        jobs = {words: convert(cluster, *arguments) for words, arguments in wrong.items()}
        states = {words: cluster.wait_job(job, timeout=600) for words, job in jobs.items()}
    finally:
        shard.write_bytes(whole)
    for words, job in jobs.items():
        output = cluster.output(job)
        assert states[words] == "FAILED", output
        assert words in output
        assert len(re.findall(r"^error: ", output, re.M)) == 1, output
        assert "Traceback" not in output, output
    assert not list((cluster.work / "failed").glob("*"))
    assert not list((cluster.work / "taken").iterdir())
