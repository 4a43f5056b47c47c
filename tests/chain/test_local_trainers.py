"""A program of the user's own from its run config to the end of its chain: submit, resume, status, on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.config.compose import yaml_file
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.files import read_json_lines
from relayrun.submit import submission

from .test_local_chain import ends

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys
# What it has trained stands in its checkpoint, and what that is called in a tracker.
folder, last, crash, *resume = sys.argv[1:]
start = int(open(os.path.join(resume[0], "state")).read()) if resume else 0
for iteration in range(start + 1, int(last) + 1):
    print(f"step {iteration} loss={1 / iteration:.4f}", flush=True)
    if iteration % 5 == 0 and os.environ["RANK"] == "0":
        path = os.path.join(folder, f"step-{iteration}")
        os.makedirs(path)
        with open(os.path.join(path, "state"), "w") as file:
            file.write(str(iteration))
        if iteration == int(crash) and not resume:
            os.kill(os.getpid(), 9)
        with open(os.path.join(folder, "latest"), "w") as file:
            file.write(f"step-{iteration}")
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(submission, "log_folder", lambda _: tmp_path / "logs")
    (tmp_path / "train.py").write_text(PROGRAM)
    values: dict[str, Any] = {
        "project": "tests",
        "name": "own",
        "run_dir": str(tmp_path / "run"),
        "trainer": "command",
        "command": {
            "run": ["{python}", str(tmp_path / "train.py"), "{checkpoints}", "20", "0"],
            "resume": ["{checkpoint}"],
            "checkpoint": {"pattern": "step-{iteration}", "tracker": "latest"},
            "progress": r"step (?P<iteration>\d+) loss=(?P<loss>\S+)",
            "leave_signal": None,
        },
        "chain": {"auto_requeue": True},
        "job": {"time": "5", "ntasks_per_node": 1},
        "cluster": {"name": "local", "scheduler": "local", "python": sys.executable},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml_file.dump_yaml(values), encoding="utf-8")
    return path


def test_a_killed_program_goes_on_behind_the_checkpoint_that_its_tracker_names_and_a_resume_trains_further(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    words = f"command.run=['{{python}}', {tmp_path}/train.py, '{{checkpoints}}', '20', '15']"
    assert main(["submit", str(config), "--set", words, "--set", "command.steps=20"]) == 0
    first, second = ends(run)
    assert (first.cause, first.durable_iteration) == ("failed", 10)
    assert (second.cause, second.durable_iteration) == ("done", 20)
    assert (run.checkpoints / ".quarantine/step-15-0002/state").read_text() == "15"
    assert [line["iteration"] for line in read_json_lines(run.metrics_view)] == list(range(1, 21))
    assert (stop_reason(run) or "").startswith("the last iteration, 20, is saved")
    assert main(["submit", str(config)]) == 1
    assert "the chain of this run has ended: the last iteration, 20, is saved" in capfd.readouterr().err

    # the config of the run, not the file, is what a resume goes on with
    words = f"command.run=['{{python}}', {tmp_path}/train.py, '{{checkpoints}}', '30', '0']"
    assert main(["resume", str(run.path), "--set", words, "--set", "command.steps=null"]) == 0
    assert "changed: command.steps: 20 -> null" in capfd.readouterr().err
    assert (ends(run)[-1].cause, ends(run)[-1].durable_iteration) == ("done", 30)
    assert Plan.load(run).total_steps is None
    assert run.revisions() == [1, 2]
    assert main(["status", str(run.path), "--json"]) == 0
    status = json.loads(capfd.readouterr().out)
    assert (status["iteration"], status["durable_iteration"], status["state"]) == (30, 30, "done")
    assert status["loss"] == pytest.approx(1 / 30, abs=1e-4)


def test_a_program_that_no_rank_can_start_ends_the_chain_with_its_name(config: Path, tmp_path: Path) -> None:
    main(["submit", str(config), "--set", "command.run=[no-such-program]", "--set", "job.setup=['true']"])
    (end,) = ends(Run(tmp_path / "run"))
    assert end.cause == "fatal"
    assert end.reason.startswith("fatal: no-such-program is not found on any rank"), end


@pytest.mark.long
def test_its_checkpoints_are_converted_and_scored_beside_the_chain(config: Path, tmp_path: Path) -> None:
    convert = (
        "import pathlib, shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2]); "
        "pathlib.Path(sys.argv[2], 'config.json').write_text('{}')"
    )
    score = (
        "import json, pathlib, sys; state = int(pathlib.Path(sys.argv[1], 'state').read_text()); "
        "pathlib.Path(sys.argv[2]).write_text(json.dumps({'own': {'state': state}}))"
    )
    evaluation = {
        "interval": 10,
        "convert": ["{python}", "-c", convert, "{checkpoint}", "{model}"],
        "command": ["{python}", "-c", score, "{model}", "{results}"],
    }
    values = yaml_file.read_yaml(config).values | {"evaluation": evaluation}
    values["command"] = values["command"] | {"steps": 20}
    config.write_text(yaml_file.dump_yaml(values), encoding="utf-8")
    assert main(["submit", str(config)]) == 0
    run = Run(tmp_path / "run")
    lines = list(read_json_lines(run.evaluations_view))
    assert [(line["iteration"], line["status"]) for line in lines] == [(10, "done"), (20, "done")], lines
    assert [line["results"] for line in lines] == [{"own": {"state": 10.0}}, {"own": {"state": 20.0}}]
