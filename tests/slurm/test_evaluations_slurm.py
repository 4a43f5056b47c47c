"""Evaluation jobs on a real Slurm: lm_eval on a task file and data of our own, around a training that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.control.rundir.plan import Plan
from relayrun.files import read_json_lines
from tests.export.models import SHAPES, write_task
from tests.workspace import Workspace, ends, steps

from .cluster import ROOT, TestCluster
from .test_training_chain import SLURM, TWO_NODES, job_of, submit, wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

STEPS, INTERVAL = 300, 100
FAULTS = "relayrun.lab.faults.injection:FaultInjectionHook"


def test_each_checkpoint_is_evaluated_once_although_training_is_killed_around_it(
    cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workspace = Workspace.make(tmp_path_factory.mktemp("it's a workspace"))
    tasks = write_task(workspace.folder / "tasks", documents=12)
    config = workspace.config(
        "run",
        job=TWO_NODES | {"time": "10"},
        cluster=SLURM,
        training={"steps": STEPS},
        checkpoint={"interval": 50, "keep_last": 1},
        evaluation={
            "interval": INTERVAL,
            "tasks": ["tiny_choice"],
            "include_path": str(tasks),
            "limit": 10,
            "keep_exported": True,
            "job": {"time": "5", "exclude": "n0,n1"},
        },
    )
    submit(cluster, config)
    run = workspace.run("run")
    name = Plan.load(run).job_name

    def evaluates(iteration: int) -> bool:
        return any(job.name.startswith(f"{name}-iter_{iteration:07}") for job in cluster.queue())

    for attempt, iteration in ((1, 100), (2, 200)):  # the ranks die while the evaluation of what they saved is on
        cluster.wait_until(
            lambda at=iteration: evaluates(at), timeout=600, interval=0.2, what=f"evaluation {iteration}"
        )
        cluster.run(["scancel", "--signal=KILL", f"{job_of(run, attempt)}.0"])
        cluster.wait_until(run.attempt(attempt).end.exists, timeout=600)
    wait_for_end(cluster, run, timeout=900)
    assert [end.cause for end in ends(run)] == ["failed", "failed", "done"]
    assert sorted(steps(run)) == list(range(1, STEPS + 1))
    cluster.wait_until(lambda: not cluster.queue(), timeout=600, interval=0.5, what="the last evaluation")

    lines = list(read_json_lines(run.evaluations_view))
    assert [(line["iteration"], line["status"]) for line in lines] == [(100, "done"), (200, "done"), (300, "done")], (
        lines
    )
    for line in lines:
        assert set(line["results"]) == {"tiny_choice"}
        assert 0 <= line["results"]["tiny_choice"]["acc"] <= 1
        own = {"num_fewshot": None, "limit": 10, "dtype": "auto", "parallelize": False}
        assert line["settings"] == {"program": line["settings"]["program"], **own}
        assert line["settings"]["program"].startswith("lm_eval ")
        assert json.loads((Path(line["model"]) / "config.json").read_text())["model_type"] == "llama"
    logs = sorted(path.name for path in (ROOT / "logs/slurm/training").glob(f"{name}-iter_*.out"))
    assert len(logs) == 3, "exactly one job a checkpoint"
    said = subprocess.run(
        [sys.executable, "-m", "relayrun.cli", "status", str(run.path)],
        cwd=ROOT,
        env=cluster.env,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    ).stdout
    assert "iteration 300: tiny_choice " in said
    assert "3 done" in said


@pytest.mark.parametrize("kind", SHAPES)
def test_a_chain_that_trains_another_model_has_its_scores(
    cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """The chain has two jobs, the first of which is asked to leave."""
    workspace = Workspace.make(tmp_path_factory.mktemp("workspace"))
    tasks = write_task(workspace.folder / "tasks", documents=12)
    config = workspace.config(
        "run",
        job=TWO_NODES | {"time": "10"},
        cluster=SLURM,
        model={"transformer": SHAPES[kind]},
        parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True},  # which experts need
        training={"steps": 60, "hooks": [{"hook": FAULTS, "options": {"faults": "slow-after=20:0.3"}}]},
        checkpoint={"interval": 20},
        evaluation={
            "interval": 20,
            "tasks": ["tiny_choice"],
            "include_path": str(tasks),
            "keep_exported": True,
            "job": {"time": "5", "exclude": "n0,n1"},
        },
    )
    submit(cluster, config)
    run = workspace.run("run")
    cluster.wait_until(lambda: bool(run.attempt(1).read_commits()), timeout=600, interval=0.1, what="a checkpoint")
    cluster.run(["scancel", "--signal=USR2", "--batch", job_of(run, 1)])
    wait_for_end(cluster, run, timeout=900)
    causes = [end.cause for end in ends(run)]
    assert len(causes) == 2
    assert causes[1] == "done"
    assert sorted(steps(run)) == list(range(1, 61))
    cluster.wait_until(lambda: not cluster.queue(), timeout=600, interval=0.5, what="the last evaluation")
    lines = list(read_json_lines(run.evaluations_view))
    assert [(line["iteration"], line["status"]) for line in lines] == [(20, "done"), (40, "done"), (60, "done")], lines
    for line in lines:
        assert line["results"]["tiny_choice"]["acc"] in [n / 12 for n in range(13)]
        (architecture,) = json.loads((Path(line["model"]) / "config.json").read_text())["architectures"]
        assert architecture == f"{kind}ForCausalLM"
