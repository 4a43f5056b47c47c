"""The program of an evaluation job: lm_eval on a local task, failures that are recorded, one claim."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir.evaluations import EvaluationPolicy, evaluation_dir
from relayrun.files import read_json_lines
from tests.export.models import Imported, make_hf, make_run, write_task
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]


def prepared(folder: Path, **evaluation: Any) -> Imported:
    made = make_run(folder / "run", make_hf(folder / "hf"), evaluation={"interval": 7, **evaluation})
    made.run.evaluations.mkdir()
    EvaluationPolicy(interval=7, total_steps=14, hold=3, time_limit=60).write(made.run.evaluation_policy)
    return made


def start(made: Imported, **environment: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "relayrun.train.export.evaluate",
        f"--run-dir={made.run.path}",
        "--iteration=7",
        "--attempt=1",
        "--in-job",
    ]
    home = str(made.hf.parent / "home")  # caches of the libraries
    return subprocess.Popen(
        command,
        env=os.environ | {"HOME": home, "HF_HUB_OFFLINE": "1"} | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_local_task_is_evaluated_once(tmp_path: Path) -> None:
    tasks = write_task(tmp_path / "tasks", documents=12)
    made = prepared(tmp_path, tasks=["tiny_choice"], include_path=str(tasks), num_fewshot=0)
    done = start(made)
    said, errors = done.communicate(timeout=900)
    assert done.returncode == 0, errors
    (line,) = read_json_lines(made.run.evaluations_view)
    assert (line["iteration"], line["attempt"], line["status"], line["model"]) == (7, 1, "done", None)
    assert line["results"]["tiny_choice"]["acc"] in [n / 12 for n in range(13)]
    assert f"tiny_choice  {'  '.join(f'{k} {v:.6g}' for k, v in line['results']['tiny_choice'].items())}" in said
    before = made.run.evaluations_view.read_bytes()
    again = start(made)
    assert again.communicate(timeout=900)[0] == said.splitlines()[-1] + "\n"
    assert again.returncode == 0
    assert made.run.evaluations_view.read_bytes() == before


@pytest.mark.parametrize("kind", ["Qwen3", "Mixtral", "Apertus"])
def test_each_class_has_the_score_that_transformers_gives_the_original(tmp_path: Path, kind: str) -> None:
    documents = 40
    hf = make_hf(tmp_path / "hf", kind)
    tasks = write_task(tmp_path / "tasks", documents=documents)
    made = make_run(
        tmp_path / "run", hf, evaluation={"interval": 7, "tasks": ["tiny_choice"], "include_path": str(tasks)}
    )
    made.run.evaluations.mkdir()
    EvaluationPolicy(interval=7, total_steps=14, hold=3, time_limit=60).write(made.run.evaluation_policy)
    done = start(made)
    _, errors = done.communicate(timeout=900)
    assert done.returncode == 0, errors
    (line,) = read_json_lines(made.run.evaluations_view)

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    assert type(model).__name__ == f"{kind}ForCausalLM"
    lines = [json.loads(text) for text in (tasks / "test.jsonl").read_text().splitlines()]
    right = 0
    for document in lines:
        ids = [int(word.removeprefix("w")) for word in document["prompt"].split()]
        choices = [int(word.removeprefix("w")) for word in document["choices"]]
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, -1, choices]
        right += int(scores.argmax()) == document["label"]
    assert line["results"]["tiny_choice"]["acc"] == right / documents
    assert 0 < right < documents, "a score that every model has would show nothing"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        pytest.param({"tasks": ["no_such_task"]}, "no_such_task", id="unknown-task"),
        pytest.param({}, "nothing to evaluate on: neither evaluation.tasks nor a validation set", id="nothing"),
    ],
)
def test_what_fails_is_recorded_with_its_reason(tmp_path: Path, settings: dict[str, Any], error: str) -> None:
    made = prepared(tmp_path, **settings)
    done = start(made)
    _, errors = done.communicate(timeout=900)
    assert done.returncode == 1
    (line,) = read_json_lines(made.run.evaluations_view)
    assert line["status"] == "failed"
    assert error in line["error"]
    assert errors.splitlines()[-1].startswith("error: ") or "error: " in errors
    folder = evaluation_dir(made.run, 7, 1)
    assert sorted(path.name for path in folder.path.iterdir()) == ["claim.json", "exported", "result.json"]


def test_the_end_of_the_job_is_recorded(tmp_path: Path) -> None:
    tasks = write_task(tmp_path / "tasks", documents=12)
    made = prepared(tmp_path, tasks=["tiny_choice"], include_path=str(tasks))
    job = start(made, SLURM_JOB_ID="1")
    folder = evaluation_dir(made.run, 7, 1)

    def exported() -> bool:
        assert job.poll() is None
        return folder.exported.exists()

    wait_for(exported, 600, step=0.01)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=600)
    assert job.returncode == 1
    result = json.loads(folder.result.read_text())
    assert (result["status"], result["error"].partition(":")[0]) == ("failed", "SIGTERM")
    assert not folder.model.exists()
