"""The dry load: what ranks would refuse in a checkpoint is refused before the queue."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from relayrun.cli import main
from relayrun.config.compose import campaign as campaigns
from relayrun.config.compose import resolve
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError
from relayrun.submit import campaign, submission
from relayrun.submit.check import rehearsal
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.check.rehearsal import Rehearsal
from relayrun.submit.initial_checkpoint import find_initial_checkpoint
from tests.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Two data sets of one vocabulary: `data`, and `other/data`; jobs log below `root`."""
    monkeypatch.setattr(submission, "log_folder", lambda _: tmp_path / "root/logs/slurm/training")
    silent = Rehearsal(silent="no Python was asked")
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_, **__: silent)  # tests/training/test_rehearsed_code.py asks it
    Workspace.make(tmp_path / "other", seed=2)
    return Workspace.make(tmp_path)


def plan(workspace: Workspace, **stages: Any) -> Path:
    settings = {"checkpoint": {"interval": 5}, "optimizer": {"lr_decay_style": "constant"}}
    return workspace.config("plan", name="plan", stages=stages, **settings)


def checked(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, dict[str, Any]]]]:
    """Exit code of a check, and the findings of each run that are no `ok`, by name."""
    code = main(["check", str(path), "--json"])
    runs = json.loads(capsys.readouterr().out)["runs"]
    return code, {
        name: {each["name"]: each for each in run["findings"] if each["level"] in ("warning", "error")}
        for name, run in runs.items()
    }


def test_a_stage_on_other_data_is_refused_with_both_ways_out(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [str(workspace.folder / "other/data")]
    path = plan(
        workspace,
        warm=None,
        mid={"from": "warm", "training.steps": 35, "data.datasets": other},
        last={"from": "mid", "decay": 6, "data.datasets": other},
        back={"from": "mid", "decay": 6},
    )
    code, found = checked(path, capsys)
    assert code == 1
    refused = {name: each["stage.checkpoint"] for name, each in found.items() if "stage.checkpoint" in each}
    assert sorted(refused) == ["back", "mid"], "the data of `last` are those of `mid`"
    assert "data order differs" in refused["mid"]["words"]
    assert "fingerprint of data set 'train'" in refused["mid"]["words"]
    assert all(way in refused["mid"]["remedy"] for way in ("checkpoint.no_load_data=true", "data.mixture"))
    assert refused["mid"]["where"].endswith(f"plan.yaml:{_line(path, 'from: warm')}")
    assert main(["stages", "submit", str(path), "--dry-run"]) == 1
    assert "data order differs" in capsys.readouterr().out
    with pytest.raises(RelayrunError, match="stage mid: the data order differs"):
        campaign.submit_campaign(campaigns.describe_campaign(path, kind="stages"))
    assert not list(workspace.folder.glob("plan-*")), "a refused submit leaves nothing"


def test_annealing_on_other_data_has_two_ways(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {"web": str(workspace.folder / "data"), "best": str(workspace.folder / "other/data")}
    mixture = {name: {"path": [path], "weight": 1.0} for name, path in paths.items()}
    anneal = {"data.datasets": [], "data.mixture": {"best": mixture["best"]}}
    path = plan(
        workspace,
        warm={"data.datasets": [], "data.mixture": {"web": mixture["web"]}},
        named={"from": "warm", "decay": 6} | anneal,
        both={"from": "warm", "decay": 6, "data.datasets": [], "data.mixture": mixture},
        anew={"from": "warm", "decay": 6, "data.datasets": [paths["best"]], "checkpoint.no_load_data": True},
    )
    code, found = checked(path, capsys)
    assert code == 0, found
    assert not any("stage.checkpoint" in each for each in found.values())


def test_a_plan_is_checked_run_by_run(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    path = plan(workspace, a=None, b={"from": "a", "decay": 3, "data.datasets": [str(workspace.folder / "dat")]})
    code, found = checked(path, capsys)
    assert code == 1
    assert "leads to no folder" in next(each["words"] for each in found["b"].values() if each["level"] == "error")
    assert not any(each["level"] == "error" for each in found["a"].values())
    with pytest.raises(RelayrunError, match=r"stage b: .*leads to no"):
        campaign.submit_campaign(campaigns.describe_campaign(path, kind="stages"))
    assert main(["check", str(path)]) == 1
    assert "2 runs, 1 error: submit would refuse this" in capsys.readouterr().out


def test_two_plans_are_compared_run_by_run(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    one = plan(workspace, warm=None, last={"from": "warm", "decay": 6})
    first = one.rename(workspace.folder / "first.yaml")
    second = plan(workspace, warm={"training.seed": 7}, more={"after": "warm"})
    assert main(["diff", str(first), str(first)]) == 0
    capsys.readouterr()
    assert main(["diff", str(first), str(second)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["warm: training.seed: 28 -> 7", "last: only in the first", "more: only in the second"]
    campaign.submit_campaign(campaigns.describe_campaign(second, kind="stages"))
    capsys.readouterr()
    assert main(["diff", str(second), str(workspace.folder / "plan")]) == 0, "what a submit writes out is no change"


def test_changes_that_nobody_made_are_not_listed(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    path = workspace.config("run")
    config = resolve.load_run_config(path)
    with submission.prepared_run(config, SubmitIntent()):
        pass
    assert main(["check", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == []
    assert main(["check", str(path), "--json", "--set", "training.seed=3"]) == 1
    assert json.loads(capsys.readouterr().out)["changes"] == ["training.seed: 28 -> 3"]


def test_a_folder_of_another_model_is_refused_by_its_shapes(workspace: Workspace) -> None:
    """It says nothing of its model but the shapes of its weights; the ranks would compare them in the job."""
    model = resolve.load_run_config(workspace.config("run")).model
    hidden, layers = model.hidden_size, model.num_layers
    shapes = {
        "embedding.word_embeddings.weight": (384, hidden),
        "decoder.final_layernorm.weight": (hidden,),
        "decoder.layers.mlp.linear_fc2.weight": (layers, hidden, model.ffn_hidden_size),
    }
    folder = workspace.folder / "bare/iter_0000010"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    load = f"checkpoint.load={folder}"

    def check() -> list[str]:
        (folder / ".metadata").write_bytes(_metadata(shapes))
        given = resolve.read_settings(workspace.config("run"), [load])
        found = submission.check_submission(resolve.validate_settings(given), given=given, intent=SubmitIntent())
        return [each.words for each in found.findings.errors]

    assert check() == []
    for name, shape in list(shapes.items()):
        shapes[name] = (*shape[:-1], shape[-1] + 8)
        (words,) = check()
        assert "is of another model" in words
        assert f"{name} is {[*shapes[name]]} there and {[*shape]} here" in words
        shapes[name] = shape
    load = f"checkpoint.load={folder.parent}"
    with pytest.raises(RelayrunError, match="no run directory") as above:
        find_initial_checkpoint(resolve.load_run_config(workspace.config("run"), [load]), Run(workspace.folder), None)
    assert above.value.hint == f"did you mean {folder}?"
    load = f"checkpoint.load={folder}"
    shapes["decoder.layers.mlp.linear_fc2.weight"] = (layers + 1, hidden, model.ffn_hidden_size)
    assert "is of another model" in check()[0]


def _metadata(shapes: dict[str, tuple[int, ...]]) -> bytes:
    kinds = {
        name: TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), [])
        for name, shape in shapes.items()
    }
    return pickle.dumps(Metadata(kinds, None, {}))  # type: ignore[arg-type]


def _line(path: Path, text: str) -> int:
    return 1 + next(number for number, line in enumerate(path.read_text().splitlines()) if text in line)
