"""From the section `evaluation` to a job script; what cannot work is refused before anything is submitted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError
from relayrun.places import CODE_ROOT as ROOT
from relayrun.submit import policies, run_plan
from relayrun.submit.check.report import check_config
from tests.workspace import Workspace


def config(folder: Path, evaluation: dict[str, Any], **sections: Any) -> RunConfig:
    if not (folder / "data").exists():
        Workspace.make(folder)
    made = {"checkpoint": {"interval": 10}, "evaluation": evaluation, "cluster": {"python": None}} | sections
    return resolve.load_run_config(Workspace(folder).config("run", **made))


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
    script = policies.evaluation_script(made, run_plan.make_plan(made, run, revision=1, root=ROOT), run)
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
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": path}, timeout=600)
    module, srun = done.stdout.split("/it's here\n")[1:]
    assert module == "[module]\n[load]\n[a module]\n"
    assert "[--cpus-per-task=7]" in srun.splitlines()  # srun does not take it over from sbatch
    assert srun.splitlines()[-8:] == [
        "[--environment=x y]",
        "[/env/bin/python]",
        "[-m]",
        "[relayrun.train.export.evaluate]",
        f"[--run-dir={run.path}]",
        "[--in-job]",
        "[--iteration=20]",
        "[--attempt=1]",
    ]


def test_its_log_lies_in_the_run_where_the_folder_of_logs_is_away(tmp_path: Path) -> None:
    """Slurm would end the job without a word."""
    made = config(
        tmp_path, {"interval": 20, "tasks": ["x"]}, job=JOB, cluster=SLURM, training={"global_batch_size": 64}
    )
    run = Run(tmp_path / "run")
    run.path.mkdir(exist_ok=True)
    plan = replace(run_plan.make_plan(made, run, revision=1, root=ROOT), log_folder="/dev/null/away")
    script = policies.evaluation_script(made, plan, run)
    assert "#SBATCH --output=/dev/null\n" in script
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "module"):
        (folder / name).write_text('#!/bin/sh\necho "$@"\n')
        (folder / name).chmod(0o755)
    (tmp_path / "script").write_text(script)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "j-20"}
    done = subprocess.run(
        ["bash", str(tmp_path / "script")], capture_output=True, text=True, check=True, env=environment, timeout=600
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert "relayrun.train.export.evaluate" in (run.path / "j-20-7.out").read_text()
    assert f"this log is in {run.path} of " in (run.path / "j-20-7.err").read_text()


def test_what_cannot_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"evaluation.interval 15 is no multiple of checkpoint.interval 10"):
        config(tmp_path, {"interval": 15})
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        check_config(config(tmp_path, {"interval": 20})).raise_errors()
    with pytest.raises(ConfigError, match="no such folder"):
        check_config(
            config(tmp_path, {"interval": 20, "tasks": ["x"], "include_path": str(tmp_path / "none")})
        ).raise_errors()
    named = config(tmp_path, {"interval": 20, "tasks": ["x"], "include_path": str(tmp_path)})
    check_config(named).raise_errors()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    with pytest.raises(ConfigError, match=r"pip install 'relayrun\[evaluate\]'"):
        check_config(named).raise_errors()
    data = {"tokenizer": str(tmp_path / "tokenizer.json"), "datasets": [str(tmp_path / "data")], "split": 0.1}
    check_config(config(tmp_path, {"interval": 20}, data=data)).raise_errors()
