"""Checkpoints of other trainers: a command makes a folder of transformers of each, another one its score."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from relayrun import errors
from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.config.compose.schema import CommandConfig
from relayrun.control.rundir import evaluations
from relayrun.control.rundir.evaluations import EvaluationPolicy
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.errors import ENDING_SIGNALS, ConfigError, InputError
from relayrun.files import read_json_lines
from relayrun.places import CODE_ROOT as ROOT
from relayrun.places import PROJECT_MARKER
from relayrun.train.export import evaluate
from tests.config.test_trainer_configs import COMMAND, MEGATRON, written
from tests.export.models import make_hf, make_run
from tests.export.trained import make_trained
from tests.history import began
from tests.waiting import wait_for

CONVERT = """
import pathlib, sys
checkpoint, model = map(pathlib.Path, sys.argv[1:3])
model.mkdir()
(model / "config.json").write_text("{}")
(model / "weights").write_text(checkpoint.read_text())
"""
SCORE = """
import json, pathlib, sys
model, results, iteration = sys.argv[1:4]
value = float(pathlib.Path(model, "weights").read_text())
scores = {"results": {"own": {"acc,none": value, "alias": "own"}}, "n": int(iteration)}
pathlib.Path(results).write_text(json.dumps(scores))
"""


def command_run(folder: Path, **evaluation: Any) -> Run:
    """A run of trainer `command` with one checkpoint, of iteration 7."""
    for name, text in (("convert.py", CONVERT), ("score.py", SCORE)):
        (folder / name).write_text(text)
    given = {"interval": 7} | evaluation
    config = resolve.load_run_config(written(folder, COMMAND, evaluation=given))
    assert isinstance(config, CommandConfig)
    run = Run(folder / "run")
    run.attempt(1).path.mkdir(parents=True)
    run.config.mkdir()
    run.config_revision(1).write_text(resolve.dump_run_config(config))
    run.checkpoints.mkdir()
    checkpoint = run.checkpoints / "step-7"
    checkpoint.write_text("0.25")
    began(run, 1, start_time=0.0)
    commit = CheckpointCommit(iteration=7, path=str(checkpoint), consumed_samples=-1, time=1.0, seconds=1.0)
    run.attempt(1).append_commit(commit)
    run.evaluations.mkdir()
    EvaluationPolicy(interval=7, total_steps=0, hold=3, time_limit=60).write(run.evaluation_policy)
    return run


def words(folder: Path) -> dict[str, list[str]]:
    return {
        "convert": ["{python}", str(folder / "convert.py"), "{checkpoint}", "{model}"],
        "command": ["{python}", str(folder / "score.py"), "{model}", "{results}", "{iteration}"],
    }


@pytest.fixture(autouse=True)
def _signals() -> Any:
    before = [signal.getsignal(number) for number in ENDING_SIGNALS]
    yield
    for number, handler in zip(ENDING_SIGNALS, before, strict=True):
        signal.signal(number, handler)


def runs(process: int) -> bool:
    """Whether a process is there, and no zombie that init has not seen yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def evaluated(run: Run, **more: bool) -> dict[str, Any]:
    evaluate.evaluate_checkpoint(run, 7, 1, **more)
    (line,) = read_json_lines(run.evaluations_view)
    return line


def test_a_checkpoint_is_converted_and_scored(tmp_path: Path) -> None:
    run = command_run(tmp_path, **words(tmp_path))
    line = evaluated(run)
    assert (line["status"], line["error"]) == ("done", None)
    assert line["results"] == {"own": {"acc": 0.25}}
    assert line["settings"]["program"] == "score.py"
    folder = evaluations.evaluation_dir(run, 7, 1)
    assert folder.exported.exists()
    assert not folder.model.exists()


def test_a_converted_folder_is_kept_where_asked_and_plain_numbers_are_taken(tmp_path: Path) -> None:
    run = command_run(tmp_path, **words(tmp_path), keep_exported=True)
    (tmp_path / "score.py").write_text("import sys; open(sys.argv[2], 'w').write('{\"loss\": 2.5, \"ok\": true}')")
    line = evaluated(run)
    assert line["results"] == {"command": {"loss": 2.5}}
    assert line["model"] == str(evaluations.evaluation_dir(run, 7, 1).model)
    assert (Path(line["model"]) / "weights").read_text() == "0.25"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_native_run_is_exported_as_what_it_is_and_scored_by_a_command(tmp_path: Path) -> None:
    score = tmp_path / "score.py"
    score.write_text(
        "import json, pathlib, sys\n"
        "config = json.loads(pathlib.Path(sys.argv[1], 'config.json').read_text())\n"
        "scores = {config['model_type']: {'experts': config['num_local_experts']}}\n"
        "pathlib.Path(sys.argv[2]).write_text(json.dumps(scores))\n"
    )
    evaluation = {"interval": 7, "command": ["{python}", str(score), "{model}", "{results}"]}
    made = make_run(tmp_path / "run", make_hf(tmp_path / "hf", "Mixtral"), evaluation=evaluation)
    made.run.evaluations.mkdir()
    EvaluationPolicy(interval=7, total_steps=14, hold=3, time_limit=60).write(made.run.evaluation_policy)
    line = evaluated(made.run)
    assert (line["status"], line["results"]) == ("done", {"mixtral": {"experts": 4.0}}), line


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_checkpoint_of_megatron_lm_is_converted_as_the_page_says(tmp_path: Path) -> None:
    made = make_trained(tmp_path / "native", make_hf(tmp_path / "hf"))
    (tmp_path / "own").mkdir()
    run = command_run(tmp_path / "own", **words(tmp_path / "own"))
    shutil.rmtree(run.checkpoints)
    assert main(["export", "megatron", str(made.run.path), "--output", str(run.checkpoints)]) == 0
    (commit,) = run.attempt(1).read_commits()
    run.attempt(1).commits.unlink()
    run.attempt(1).append_commit(replace(commit, path=str(run.checkpoints / "iter_0000007")))
    page = (ROOT / "docs/how-to/export.md").read_text(encoding="utf-8")
    foreign = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)[1])["evaluation"]
    tokenizer = str(tmp_path / "hf/tokenizer.json")
    convert = [tokenizer if word == "/data/tokenizer" else word for word in foreign["convert"]]
    score = (
        "import pathlib, sys, hashlib; from safetensors.torch import load_file; "
        "tensors = load_file(sys.argv[1] + '/model.safetensors'); "
        "pathlib.Path(sys.argv[2]).write_text('{\"tensors\": %d}' % len(tensors))"
    )
    evaluation = {"interval": 7, "convert": convert, "command": ["{python}", "-c", score, "{model}", "{results}"]}
    config = resolve.load_run_config(written(tmp_path / "own", MEGATRON, evaluation=evaluation))
    run.config_revision(1).write_text(resolve.dump_run_config(config))
    line = evaluated(run)
    assert (line["status"], line["results"]) == ("done", {"command": {"tensors": 9.0 * 3 + 3}}), line


@pytest.mark.parametrize(
    ("changes", "scripts", "error"),
    [
        ({}, {"convert.py": "import sys; sys.exit(3)"}, "evaluation.convert: python"),
        ({}, {"convert.py": "import os; os.kill(os.getpid(), 9)"}, "ended with SIGKILL"),
        ({}, {"convert.py": "pass"}, "let evaluation.convert write into {model} itself"),
        ({"convert": []}, {}, "set evaluation.convert to a program that makes one of a checkpoint"),
        ({"convert": ["/no/such/program", "{model}"]}, {}, "/no/such/program cannot be started: No such file"),
        ({}, {"score.py": "pass"}, "evaluation.command has not written its results"),
        ({}, {"score.py": "import sys; open(sys.argv[2], 'w').write('{')"}, "are no JSON: "),
        ({}, {"score.py": "import sys; open(sys.argv[2], 'w').write('[1]')"}, "are no JSON object"),
        ({}, {"score.py": "import sys; open(sys.argv[2], 'w').write('{\"a\": \"b\"}')"}, "hold no numbers"),
        ({}, {"score.py": "import sys; open(sys.argv[2], 'w').write('{\"a\": NaN}')"}, "command: a is nan"),
    ],
)
def test_what_fails_is_recorded_with_its_reason(
    tmp_path: Path, changes: dict[str, Any], scripts: dict[str, str], error: str
) -> None:
    run = command_run(tmp_path, **words(tmp_path) | changes)
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    line = evaluated(run)
    assert line["status"] == "failed"
    assert error in line["error"] or error in str(line["error"]).replace("\n", " ")
    assert not evaluations.evaluation_dir(run, 7, 1).model.exists()


def test_a_checkpoint_that_is_such_a_folder_itself_stays_to_the_end(tmp_path: Path) -> None:
    run = command_run(tmp_path, command=words(tmp_path)["command"])
    checkpoint = run.checkpoints / "step-7"
    checkpoint.unlink()
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "weights").write_text("0.5")
    (tmp_path / "score.py").write_text(
        SCORE + "assert not pathlib.Path(results).with_name('exported').exists()\nassert 'step-7' in model\n"
    )
    assert evaluated(run)["results"] == {"own": {"acc": 0.5}}
    assert (checkpoint / "weights").exists()


def by_hand(run: Run) -> subprocess.Popen[str]:
    """Start the evaluation in an allocation of one's own."""
    command = [sys.executable, "-m", "relayrun.train.export.evaluate", f"--run-dir={run.path}"]
    return subprocess.Popen(
        [*command, "--iteration=7", "--attempt=1"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "41"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("released", [False, True], ids=["the checkpoint is there", "the checkpoint is gone"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_an_evaluation_by_hand_that_ended_is_gone_on_with(
    tmp_path: Path, number: signal.Signals, released: bool
) -> None:
    run = command_run(tmp_path, **words(tmp_path))
    whole = (tmp_path / "score.py").read_text()
    (tmp_path / "score.py").write_text(
        "import os, pathlib, sys, time\n"
        "ready = pathlib.Path(sys.argv[2] + '.pid')\n"
        "ready.with_suffix('.new').write_text(str(os.getpid()))\n"
        "ready.with_suffix('.new').rename(ready)\n"
        "time.sleep(600)\n"
    )
    first = by_hand(run)
    ready = evaluations.evaluation_dir(run, 7, 1).path / "scores.json.pid"
    wait_for(ready.exists)
    second = by_hand(run)
    said = second.communicate(timeout=600)[0]
    assert second.returncode == 1, said
    assert f"another process makes this: 'evaluate.py', process {first.pid} on " in said
    first.send_signal(number)
    said = first.communicate(timeout=600)[0]
    if number == signal.SIGTERM:
        assert first.returncode == 128 + number
        assert said.splitlines()[-1] == ("interrupted by SIGTERM: no result is on record; the same command goes on")
    child = int(ready.read_text())
    wait_for(lambda: not runs(child), words="the end of the command that scores")
    (tmp_path / "score.py").write_text(whole)
    if released:
        (run.checkpoints / "step-7").unlink()
    for _ in range(2):
        again = by_hand(run)
        said = again.communicate(timeout=600)[0]
        assert again.returncode == 0, said
        assert said == "iteration 7  own  acc 0.25\n" if _ else "iteration 7  own  acc 0.25\n" in said
        (line,) = read_json_lines(run.evaluations_view)
        assert (line["status"], line["results"]) == ("done", {"own": {"acc": 0.25}})
    left = sorted(path.name for path in ready.parent.iterdir())
    assert left == ["claim.json", "exported", "result.json", "scores.json", "scores.json.pid"]


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_with_the_job_its_command_ends_and_all_that_it_started(tmp_path: Path, number: signal.Signals) -> None:
    run = command_run(tmp_path, **words(tmp_path))
    (tmp_path / "score.py").write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "ready = pathlib.Path(sys.argv[2] + '.pid')\n"
        "ready.with_suffix('.new').write_text(str(child.pid))\n"
        "ready.with_suffix('.new').rename(ready)\n"
        "time.sleep(600)\n"
    )
    parent, ready = os.getpid(), evaluations.evaluation_dir(run, 7, 1).path / "scores.json.pid"
    watcher = os.fork()
    if watcher == 0:
        try:
            wait_for(ready.exists)
        finally:  # the parent waits for it
            os.kill(parent, number)
            os._exit(0)
    with errors._ending_signals():
        line = evaluated(run, in_job=True)
    wait_for(lambda: os.waitpid(watcher, os.WNOHANG)[0])
    assert (line["status"], line["error"].partition(":")[0]) == ("failed", number.name)
    child = int(ready.read_text())
    wait_for(lambda: not runs(child), words="the end of what the command has started")


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({}, "there is no mean loss on validation sets; set evaluation.tasks or evaluation.command"),
        ({"tasks": ["x"], "command": ["a", "{results}"]}, "two ways to a score"),
        ({"command": ["score"]}, r"command needs \{results\}, the file that it writes"),
        ({"tasks": ["x"], "convert": ["make"]}, r"convert needs \{model\}, the folder that it makes"),
        ({"command": ["a", "{results}", "{modle}"]}, r"\{modle\} is not filled in; did you mean \{model\}\?"),
    ],
)
def test_what_cannot_work_is_refused_with_the_setting(tmp_path: Path, evaluation: dict[str, Any], message: str) -> None:
    for values in (COMMAND, MEGATRON):
        with pytest.raises(ConfigError, match=message):
            resolve.load_run_config(written(tmp_path, values, evaluation={"interval": 7} | evaluation))


def test_paths_of_files_are_whole(tmp_path: Path) -> None:
    (tmp_path / PROJECT_MARKER).touch()
    (tmp_path / "score.py").write_text("")
    config = resolve.load_run_config(
        written(tmp_path, COMMAND, evaluation={"interval": 7, "command": ["score.py", "{results}"]})
    )
    assert config.evaluation is not None
    assert config.evaluation.command == [str(tmp_path / "score.py"), "{results}"]


def test_numbers_are_read_by_task_and_metric(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    path.write_text(json.dumps({"a": {"f1": 1, "name": "x"}, "b": {"name": "x"}, "loss": 2}))
    assert evaluate.read_scores(path) == {"a": {"f1": 1.0}, "command": {"loss": 2.0}}
    with pytest.raises(InputError, match="has not written"):
        evaluate.read_scores(tmp_path / "none")
