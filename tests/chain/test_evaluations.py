"""Evaluation jobs of the local scheduler: beside the chain, one a checkpoint, on real exports and real lm_eval."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.files import read_lines
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
        data={
            "tokenizer": str(tmp_path / "tokenizer.json"),
            "datasets": [str(tmp_path / "data")],
            "validation": {"held-out": [str(held_out.folder / "data")]},
        },
        model={"make_vocab_size_divisible_by": 100},  # a vocabulary without padding, which only training has
        training={"steps": 50, "eval_interval": 20, "eval_steps": 2},
        checkpoint={"interval": 10, "keep_last": 1},
        evaluation={"interval": 20, "job": {"time": "10"}},
    )
    done = submit(config)
    assert done.returncode == 0, done.stderr
    run = workspace.run("it's a run")
    assert [end.cause for end in ends(run)] == ["done"]
    lines = list(read_lines(run.evaluations_view))
    assert [(line["iteration"], line["status"]) for line in lines] == [(20, "done"), (40, "done"), (50, "done")], lines
    training = {
        line["iteration"]: line["validation"]["held-out"]
        for line in read_lines(run.metrics_view)
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
    ).stdout
    assert re.search(r"evaluations +iteration 50: held-out loss \S+ perplexity \S+ windows 16; 3 done", said), said
