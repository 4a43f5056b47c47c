"""`relayrun config`, `explain` and `diff`: what is set, where, and what it means."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from relayrun.cli import main
from relayrun.config.compose import describe, resolve
from relayrun.control.rundir.run import Run
from tests.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "configs/runs/demo-slurm.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "configs/runs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_resolved_config_can_be_submitted_again(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", str(path), "--set", "cluster.environment.A=1:30"]) == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    assert resolve.load_run_config(tmp_path / "again.yaml") == resolve.load_run_config(
        path, ["cluster.environment.A=1:30"]
    )


def test_every_value_says_where_it_was_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    main(["config", DEMO, "--set", "optimizer={lr: 1e-3}", "--set", "training.steps=50"])
    lines = dict(line.split(" # ") for line in capsys.readouterr().out.splitlines() if " # " in line)
    found = {line.strip(): place for line, place in lines.items()}
    assert found["steps: 50"] == "--set training.steps=50"
    assert found["lr: 0.001"] == "--set optimizer={lr: 1e-3}"
    assert found["adam_beta1: 0.9"] == found["clip_grad: 1.0"] == "default"
    assert found["num_layers: 5"] == "configs/models/llama-3m.yaml:3"
    assert found["MASTER_ADDR: 127.0.0.1"] == "configs/clusters/test.yaml:7"
    assert found["partition: debug"] == "configs/clusters/test.yaml:5"


def test_a_run_shows_any_of_its_revisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = Workspace.make(tmp_path)
    run = Run(tmp_path / "run")
    run.config.mkdir(parents=True)
    run.manifest.write_text("{}")
    for number, steps in ((1, 4), (2, 9)):
        config = resolve.load_run_config(workspace.config("a", training={"steps": steps}))
        run.config_revision(number).write_text(resolve.dump_run_config(config))
    for name, steps in ((f"{run.path}:1", 4), (f"{run.path}:2", 9), (str(run.path), 9)):
        assert main(["config", name]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["training"]["steps"] == steps
    assert main(["config", f"{run.path}:3"]) == 1
    assert "this run has no revision 3 of its config; there are: 1, 2" in capsys.readouterr().err
    assert main(["diff", f"{run.path}:1", str(run.path)]) == 1
    assert capsys.readouterr().out == "training.steps: 4 -> 9\n"
    assert main(["diff", f"{run.path}:2", str(run.path)]) == 0
    assert capsys.readouterr().out == "the settings of both are the same\n"


def test_a_config_file_that_is_not_there_is_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "nowhere.yaml"]) == 1
    assert "nowhere.yaml: there is no such config file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_setting_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "training.micro_batch_size"]) == 0
    assert capsys.readouterr().out == (
        "training.micro_batch_size: integer above 0, must be given\n"
        "  Samples that a data-parallel rank processes at a time.\n"
        "  In the launchers: MBS\n"
    )
    assert main(["explain", "job.cpus_per_task"]) == 0
    assert "As an option of sbatch: --cpus-per-task" in capsys.readouterr().out
    assert main(["explain", "chain"]) == 0
    assert "  mode: singleton | requeue, default singleton; `singleton`: a successor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "nearest"), [("training.lr", "optimizer.lr"), ("checkpoint.intervall", "checkpoint.interval")]
)
def test_a_setting_that_there_is_not_has_a_nearest_one(
    name: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", name]) == 1
    assert f"there is no setting '{name}'\n  -> did you mean {nearest}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stages.warm.decay", "stages.<name>.decay: integer above 0"),
        ("sweep.at_once", "sweep.at_once: integer above 0"),
        ("data.mixture.web.weight", "data.mixture.<name>.weight: number above 0"),
        ("optimizer.groups.0.lr_mult", "optimizer.groups: list of OptimizerGroup"),
    ],
)
def test_names_of_the_users_and_sections_of_plans_are_explained(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", name]) == 0
    assert capsys.readouterr().out.startswith(words)


def test_every_setting_has_words() -> None:
    assert [setting.name for setting in describe.describe_settings() if not setting.words] == []


@pytest.mark.slow
def test_the_tree_has_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    out = capsys.readouterr().out
    for setting in describe.describe_settings():
        assert setting.name.rpartition(".")[2] in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.slow
def test_the_json_schema_takes_every_config_file_and_names_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "--json-schema"]) == 0
    validator = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    validator.check_schema(validator.schema)
    for path in [*(ROOT / "configs/runs").glob("*.yaml"), *(ROOT / "configs/models").glob("*.yaml")]:
        values = resolve.yaml_file.read_yaml(path).values
        assert [error.message for error in validator.iter_errors(values)] == [], path
    wrong = {"training": {"stepps": 3, "steps": 0}, "checkpoint": {"interval": "often"}}
    assert len(list(validator.iter_errors(wrong))) == 3


@pytest.mark.slow
def test_the_page_of_settings_shows_what_its_commands_print(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/settings.md").read_text(encoding="utf-8")
    commands = re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "relayrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m relayrun "$@"\n')
    (tmp_path / "relayrun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    printed = [
        subprocess.run(
            ["bash", "-c", block], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        for block in commands
    ]
    assert [(each.returncode, each.stderr) for each in printed] == [(1, ""), (0, "")]  # diff found something
    (shown,) = re.findall(r"^```\n(training:.*?)^```$", page, re.M | re.S)
    assert [line for line in shown.splitlines() if line not in printed[0].stdout.splitlines()] == []
    assert "parallel.tensor_model_parallel_size: 1 -> 4" in printed[0].stdout
