"""Evaluation jobs of the local scheduler: beside the chain, one a checkpoint, on real exports and real lm_eval."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.files import read_json_lines
from tests.export.models import SHAPES, write_task
from tests.workspace import Workspace, ends

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def submit(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "launchers/submit.py", str(config), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def test_each_checkpoint_is_exported_and_evaluated_beside_the_chain(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    held_out = Workspace.make(tmp_path / "held-out", seed=2)
    config = workspace.config(
        "it's a run",
        data={"validation": {"held-out": [str(held_out.folder / "data")]}},
        model={"make_vocab_size_divisible_by": 100},  # a vocabulary without padding, which only training has
        training={"steps": 30, "eval_interval": 20, "eval_steps": 2},
        checkpoint={"interval": 10, "keep_last": 1},
        evaluation={"interval": 20, "job": {"time": "10"}},
    )
    done = submit(config)
    assert done.returncode == 0, done.stderr
    run = workspace.run("it's a run")
    assert [end.cause for end in ends(run)] == ["done"]
    lines = list(read_json_lines(run.evaluations_view))
    assert [(line["iteration"], line["status"]) for line in lines] == [(20, "done"), (30, "done")], lines
    training = {
        line["iteration"]: line["validation"]["held-out"]
        for line in read_json_lines(run.metrics_view)
        if "validation" in line
    }
    for line in lines:
        found = line["results"]["held-out"]
        assert abs(found["loss"] - training[line["iteration"]]) < 1e-5, "the export computes what training did"
    assert not list(run.evaluations.glob("*/model*"))
    said = subprocess.run(
        [sys.executable, "-m", "relayrun.cli", "status", str(run.path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    ).stdout
    assert re.search(r"evaluations +iteration 30: held-out loss \S+ perplexity \S+ windows 16; 2 done", said), said


@pytest.mark.long
@pytest.mark.parametrize("kind", SHAPES)
def test_a_chain_that_trains_another_model_has_its_scores_by_tasks(tmp_path: Path, kind: str) -> None:
    """A chain that trains a Llama has one on Slurm, see tests/slurm."""
    workspace = Workspace.make(tmp_path)
    tasks = write_task(tmp_path / "tasks", documents=12)
    config = workspace.config(
        "run",
        model={"transformer": SHAPES[kind]},
        training={"steps": 20},
        checkpoint={"interval": 10},
        evaluation={
            "interval": 10,
            "tasks": ["tiny_choice"],
            "include_path": str(tasks),
            "keep_exported": True,
            "job": {"time": "10"},
        },
    )
    done = submit(config)
    assert done.returncode == 0, done.stderr
    run = workspace.run("run")
    assert [end.cause for end in ends(run)] == ["done"]
    lines = list(read_json_lines(run.evaluations_view))
    assert [(line["iteration"], line["status"]) for line in lines] == [(10, "done"), (20, "done")], lines
    for line in lines:
        assert line["results"]["tiny_choice"]["acc"] in [n / 12 for n in range(13)]
        (architecture,) = json.loads((Path(line["model"]) / "config.json").read_text())["architectures"]
        assert architecture == f"{kind}ForCausalLM"
