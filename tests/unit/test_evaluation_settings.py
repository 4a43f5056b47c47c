"""From the section `evaluation` to a job script; what cannot work is refused before anything is submitted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from relayrun import ROOT
from relayrun.config import compose
from relayrun.config.schema import RunConfig
from relayrun.errors import ConfigError
from relayrun.rundir.run import Run
from relayrun.submit import check, submission
from tests.workspace import Workspace


def config(folder: Path, evaluation: dict[str, Any], **sections: Any) -> RunConfig:
    if not (folder / "data").exists():
        Workspace.make(folder)
    made = {"checkpoint": {"interval": 10}, "evaluation": evaluation, "cluster": {"python": None}} | sections
    return compose.load(Workspace(folder).config("run", **made))


SLURM = {
    "name": "site",
    "scheduler": "slurm",
    "environment": {"HF_HOME": "/it's here"},
    "modules": ["a module"],
    "srun_options": ["--environment=x y"],
    "python": "/env/bin/python",
}
JOB = {
    "time": "5",
    "nodes": 8,
    "ntasks_per_node": 4,
    "gpus_per_node": 4,
    "cpus_per_task": 7,
    "mem": "400G",
    "account": "a1",
    "partition": "large",
    "exclude": "n7",
}


def test_the_job_is_one_node_one_task_and_one_gpu_with_the_rest_as_in_the_run(tmp_path: Path) -> None:
    made = config(
        tmp_path,
        {"interval": 20, "tasks": ["x"], "job": {"time": "02:00:00", "partition": "small"}},
        job=JOB,
        cluster=SLURM,
        training={"global_batch_size": 64},
    )
    run = Run(tmp_path / "run")
    script = submission.evaluation_script(made, submission.make_plan(made, run, revision=1, root=ROOT), run)
    options = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {
        "time=0-02:00:00",
        "nodes=1",
        "ntasks-per-node=1",
        "cpus-per-task=7",
        "gpus-per-node=1",
        "account=a1",
        "partition=small",
        "exclude=n7",
        "no-requeue",
    } <= set(options)
    assert not [option for option in options if option.startswith(("mem", "dependency", "signal"))]
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "module"):  # the script says what it would start
        (folder / name).write_text(f'#!/bin/sh\necho "$HF_HOME"; for a in {name} "$@"; do echo "[$a]"; done\n')
        (folder / name).chmod(0o755)
    (tmp_path / "script").write_text(script)
    command = ["bash", str(tmp_path / "script"), "--iteration=20", "--attempt=1"]
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": path})
    module, srun = done.stdout.split("/it's here\n")[1:]
    assert module == "[module]\n[load]\n[a module]\n"
    assert srun.splitlines()[-7:] == [
        "[--environment=x y]",
        "[/env/bin/python]",
        "[-m]",
        "[relayrun.export.evaluate]",
        f"[--run-dir={run.path}]",
        "[--iteration=20]",
        "[--attempt=1]",
    ]


def test_what_cannot_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"evaluation.interval 15 is no multiple of checkpoint.interval 10"):
        config(tmp_path, {"interval": 15})
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        check.check(config(tmp_path, {"interval": 20}))
    with pytest.raises(ConfigError, match="no such folder"):
        check.check(config(tmp_path, {"interval": 20, "tasks": ["x"], "include_path": str(tmp_path / "none")}))
    named = config(tmp_path, {"interval": 20, "tasks": ["x"], "include_path": str(tmp_path)})
    check.check(named)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    with pytest.raises(ConfigError, match=r"pip install 'relayrun\[evaluate\]'"):
        check.check(named)
    data = {"tokenizer": str(tmp_path / "tokenizer.json"), "datasets": [str(tmp_path / "data")], "split": 0.1}
    check.check(config(tmp_path, {"interval": 20}, data=data))
