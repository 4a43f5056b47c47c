"""A run that begins with another run's checkpoint, through the real chain on one machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.records import AttemptStart
from relayrun.files import read_json_lines
from tests.checkpoints import contents, raw
from tests.workspace import Workspace, steps

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = {"training": {"steps": 8}, "checkpoint": {"interval": 4}}


def submit(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "relayrun.cli", "submit", str(config), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """With a run `source` of 8 iterations, saved at 4 and 8."""
    made = Workspace.make(tmp_path_factory.mktemp("load"))
    done = submit(made.config("source", **SETTINGS))
    assert done.returncode == 0, done.stderr
    return made


def test_a_run_goes_on_exactly_where_another_one_stood(workspace: Workspace) -> None:
    source, run = workspace.run("source"), workspace.run("branch")
    done = submit(workspace.config("branch", **SETTINGS), "--load", f"{source.path}:4")
    assert done.returncode == 0, done.stderr
    assert steps(run) == {number: step for number, step in steps(source).items() if number > 4}
    begin = AttemptStart.read(run.attempt(1).begin)
    assert begin is not None
    assert (begin.base_iteration, begin.base_path) == (4, str(source.checkpoint(4)))
    assert source.checkpoint(4).is_dir()
    assert resume_point(run).path == str(run.checkpoint(8))


def checked(
    config: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, tuple[str, str, str]]]:
    """Exit code of a check; level, words and remedy of each finding about the run."""
    code = main(["check", str(config), "--json", *options])
    found = json.loads(capsys.readouterr().out)["findings"]
    return code, {
        each["name"]: (each["level"], each["words"], each["remedy"] or "")
        for each in found
        if each["name"].startswith("run.")
    }


def test_what_ranks_would_refuse_is_refused_before_the_queue(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, other = workspace.run("source"), Workspace.make(tmp_path, seed=3)
    load = {"checkpoint": {"interval": 4, "load": f"{source.path}:4"}, "training": {"steps": 12}}
    code, found = checked(workspace.config("muon", **load, optimizer={"name": "muon"}), capsys)
    level, words, remedy = found["run.initial_checkpoint"]
    assert (code, level) == (1, "error")
    assert "optimizer was adam when this checkpoint was saved, and is muon" in words
    assert "checkpoint.no_load_optim=true" in remedy
    data = {"datasets": [str(other.folder / "data")], "tokenizer": str(workspace.folder / "tokenizer.json")}
    code, found = checked(workspace.config("data", **load, data=data), capsys)
    level, words, remedy = found["run.initial_checkpoint"]
    assert (code, level) == (1, "error")
    assert "the data order differs from the checkpoint's" in words
    assert "checkpoint.no_load_data=true" in remedy
    free = ["--set", "checkpoint.no_load_data=true"]
    assert checked(workspace.folder / "data.yaml", capsys, *free)[0] == 0
    copy = tmp_path / "iter_0000004"  # as `checkpoint restore` makes one, without the run around it
    shutil.copytree(source.checkpoint(4), copy)
    code, found = checked(workspace.folder / "muon.yaml", capsys, "--set", f"checkpoint.load={copy}")
    assert (code, found["run.initial_checkpoint"][0]) == (1, "error")
    code, found = checked(workspace.config("source", **SETTINGS, optimizer={"name": "muon"}), capsys, "--resume")
    assert (code, found["run.initial_checkpoint"][0]) == (1, "error"), "nor does a run itself go on with it"


@pytest.mark.long
def test_a_data_set_of_another_name_begins_behind_the_samples_of_the_checkpoint(
    workspace: Workspace, tmp_path: Path
) -> None:
    """The way of docs/how-to/stages.md to anneal on other data, for the ranks as for the check."""
    other, run = Workspace.make(tmp_path, seed=3), workspace.run("anneal")
    mixture = {"best": {"path": [str(other.folder / "data")], "weight": 1.0}}
    data = {"datasets": [], "mixture": mixture, "tokenizer": str(workspace.folder / "tokenizer.json")}
    config = workspace.config("anneal", **SETTINGS, data=data)
    done = submit(config, "--load", f"{workspace.run('source').path}:4")
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_json_lines(run.metrics_view) if "loss" in line]
    assert [(line["iteration"], line["consumed_samples"]) for line in lines] == [(n, 8 * n) for n in (5, 6, 7, 8)]
    whole = workspace.run("source")
    assert all(step != steps(whole)[number] for number, step in steps(run).items()), "other data"


def test_a_resume_says_what_it_changes(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    path = workspace.config("source", **SETTINGS)
    code, found = checked(path, capsys, "--resume")
    assert (code, found["run.stop_after"][0]) == (1, "error")
    assert "iteration 8 is done already, and the run ends at 8: nothing is left to train" in found["run.stop_after"][1]
    code, found = checked(path, capsys, "--resume", "--set", "training.steps=16")
    assert code == 0
    assert found["run.steps"] == ("ok", "8 of 16 steps are done: 8 steps with 64 samples are left", "")
    level, words, _ = found["run.learning_rate"]
    assert level == "warning", "behind a cosine that has ended the rate rises"
    assert words.startswith("learning rate 6.7e-05 at step 8, 0.0006"), words
    in_samples = ["--set", "training.steps=null", "--set", "training.samples=128"]
    code, found = checked(path, capsys, "--resume", *in_samples)
    assert (code, found["run.steps"][1]) == (0, "8 of 16 steps are done: 8 steps with 64 samples are left")
    code, found = checked(path, capsys, "--resume", *in_samples, "--set", "training.global_batch_size=4")
    assert (code, found["run.steps"][1]) == (1, "with the batch sizes so far, 128 samples are 24 steps, not 32")
    code, found = checked(path, capsys, "--resume", "--set", "training.steps=16", "--set", "tracking.log_interval=5")
    assert "run.learning_rate" in found


def test_progress_txt_has_the_lines_of_megatron_lm(workspace: Workspace) -> None:
    lines = [line.split("\t") for line in workspace.run("source").progress.read_text().splitlines()]
    assert [line[3] for line in lines] == ["Starting job", "Saved checkpoint", "Saved checkpoint"]
    assert all(line[1].startswith("Job ID: ") and line[2] == "# GPUs: 2" for line in lines)
    assert [line[4] for line in lines[1:]] == ["Iteration: 4", "Iteration: 8"]
    assert all(line[5].startswith("Job throughput: ") and line[5].endswith(" TFLOP/s/GPU") for line in lines[1:])
    work = [float(line[7].removeprefix("Floating-point operations: ")) for line in lines[1:]]
    assert work[1] == pytest.approx(2 * work[0], rel=0.01)
    assert lines[2][8] == "Tokens (in billions): 0.00"


def test_finetune_takes_the_weights_alone(workspace: Workspace) -> None:
    config = workspace.config(
        "tuned",
        training={"steps": 1},
        optimizer={"lr": 1e-30, "lr_warmup_steps": 0},
        checkpoint={"interval": 4, "finetune": True},
    )
    done = submit(config, "--load", str(workspace.run("source").path))
    assert done.returncode == 0, done.stderr
    run = workspace.run("tuned")
    (step,) = (line for line in read_json_lines(run.metrics_view) if "loss" in line)
    assert (step["iteration"], step["consumed_samples"]) == (1, 8)
    loaded, saved = contents(workspace.run("source").checkpoint(8)), contents(run.checkpoint(1))
    weights = [key for key in loaded if key.startswith(("decoder", "embedding", "output")) and "extra" not in key]
    assert len(weights) > 10
    assert all(raw(loaded[key]) == raw(saved[key]) for key in weights), "a step too small to change a weight"
    moments = next(key for key in loaded if key.startswith("optimizer.state.exp_avg.") and loaded[key].any())
    assert raw(loaded[moments]) != raw(saved[moments])


@pytest.mark.long
def test_without_optimizer_and_data_position_the_iterations_go_on(workspace: Workspace) -> None:
    left_out = {"no_load_optim": True, "no_load_data": True}
    run = workspace.run("other-data")
    config = workspace.config("other-data", training={"steps": 6, "seed": 5}, checkpoint={"interval": 1} | left_out)
    refused = submit(
        workspace.config("refused", training={"steps": 6, "seed": 5}, checkpoint={"interval": 1}),
        "--load",
        f"{workspace.run('source').path}:4",
    )
    assert "seed was 28, is 5" in refused.stderr
    assert "checkpoint.no_load_data=true" in refused.stderr
    assert not workspace.run("refused").path.exists(), "before anything is queued"
    done = submit(config, "--load", f"{workspace.run('source').path}:4")
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_json_lines(run.metrics_view) if "loss" in line]
    assert [(line["iteration"], line["consumed_samples"]) for line in lines] == [(5, 8), (6, 16)]
    more = submit(
        workspace.config("other-data", training={"steps": 8, "seed": 5}, checkpoint={"interval": 1}), "--resume"
    )
    assert more.returncode == 0, more.stderr
    lines = [line for line in read_json_lines(run.metrics_view) if "loss" in line]
    assert [(line["iteration"], line["consumed_samples"]) for line in lines][2:] == [(7, 24), (8, 32)]


@pytest.mark.parametrize(
    ("name", "sections", "says"),
    [
        (":5", {}, "no checkpoint of iteration 5"),
        (":8", {}, "stands at iteration 8, and training.steps is 8"),
        (
            ":4",
            {"model": {"num_layers": 4, "ffn_hidden_size": 256}},
            "num_layers is 2 there and 4 here; ffn_hidden_size is 128 there and 256 here",
        ),
        ("/checkpoints/iter_0000004:4", {}, "of which no iteration can be chosen"),
        ("/nowhere", {}, "there is no such run"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_submission(
    workspace: Workspace, name: str, sections: dict[str, Any], says: str
) -> None:
    refused = submit(workspace.config("no", **(SETTINGS | sections)), "--load", f"{workspace.run('source').path}{name}")
    assert refused.returncode == 1
    assert says in refused.stderr
    assert refused.stderr.count("error: ") == 1
    assert not workspace.run("no").plan.exists()


@pytest.mark.long
def test_a_job_that_meets_a_damaged_checkpoint_goes_on_from_the_one_before(workspace: Workspace) -> None:
    """The supervisor beside it has read begin.json before; its views have no gap, and status tells the reason."""
    run = workspace.run("flipped")
    assert submit(workspace.config("flipped", **SETTINGS)).returncode == 0
    piece = max(run.checkpoint(8).glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(piece.read_bytes())
    data[len(data) // 2] ^= 16
    piece.write_bytes(data)
    done = submit(workspace.config("flipped", **(SETTINGS | {"training": {"steps": 12}})), "--resume")
    assert done.returncode == 0, done.stderr
    assert [attempt.number for attempt in map(run.attempt, run.attempt_numbers())] == [1, 2]
    begin, end = run.attempt(2).read_begin(), run.attempt(2).read_end()
    assert begin is not None
    assert end is not None
    assert (begin.base_iteration, end.cause, end.progress) == (4, "done", True)
    lines = [line["iteration"] for line in read_json_lines(run.metrics_view) if "loss" in line]
    assert lines == list(range(1, 13))
    status = [sys.executable, "-m", "relayrun.cli", "status", str(run.path)]
    said = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600).stdout
    assert "8, computed again since: " in said
    words = " ".join(said.split())
    assert "are not those that were saved" in words or "is not what was saved" in words
