"""The configs of sweeps and stages: which runs they mean, and what is refused before anything is written."""

from __future__ import annotations

from typing import Any

import pytest

from relayrun.config.compose import campaign, resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import RelayrunError
from relayrun.submit import campaign as submission
from tests.workspace import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.make(tmp_path_factory.mktemp("campaign"))


def sweep(workspace: Workspace, **section: Any) -> campaign.CampaignDescription:
    return campaign.describe_campaign(workspace.config("sweep", name="lr", sweep=section), kind="sweep")


def stages(workspace: Workspace, **section: Any) -> campaign.CampaignDescription:
    settings = {"checkpoint": {"interval": 5}, "optimizer": {"lr_decay_style": "constant"}}
    path = workspace.config("stages", name="plan", stages=section, **settings)
    described = campaign.describe_campaign(path, kind="stages")
    submission.check_stages(described, {})
    return described


def refused(workspace: Workspace, *words: str, line: str, kind: str = "sweep", **section: Any) -> None:
    """Refused, with the line of the file that has the text `line` last."""
    with pytest.raises(RelayrunError) as error:
        sweep(workspace, **section) if kind == "sweep" else stages(workspace, **section)
    text = str(error.value)
    assert all(word in text for word in words), text
    lines = (workspace.folder / f"{kind}.yaml").read_text().splitlines()
    number = next(number for number in range(len(lines), 0, -1) if line in lines[number - 1])
    assert f"{kind}.yaml:{number}:" in text, text
    assert not list(workspace.folder.glob(f"{kind}-*"))


def native(run: campaign.CampaignRunDescription) -> RunConfig:
    assert isinstance(run.config, RunConfig)
    return run.config


def test_a_product_with_a_list(workspace: Workspace) -> None:
    described = sweep(
        workspace,
        product={"optimizer.lr": [1e-3, 2e-3]},
        list=[{"training.seed": 1}, {"training.seed": 2, "optimizer.min_lr": 1e-4}],
        at_once=3,
    )
    assert [(run.name, run.settings) for run in described.runs] == [
        ("01", {"optimizer.lr": 1e-3, "training.seed": 1}),
        ("02", {"optimizer.lr": 2e-3, "training.seed": 1}),
        ("03", {"optimizer.lr": 1e-3, "training.seed": 2, "optimizer.min_lr": 1e-4}),
        ("04", {"optimizer.lr": 2e-3, "training.seed": 2, "optimizer.min_lr": 1e-4}),
    ]
    last = native(described.runs[-1])
    assert (last.optimizer.lr, last.optimizer.min_lr, last.training.seed) == (2e-3, 1e-4, 2)
    assert (last.name, last.run_dir) == ("lr-04", str(workspace.folder / "sweep-04"))
    assert (described.name, described.at_once, described.folder) == ("tests/lr", 3, workspace.folder / "sweep")


@pytest.mark.parametrize(
    ("section", "line", "words"),
    [
        ({"product": {"optimizer.lr": []}}, "optimizer.lr", ["list of values"]),
        ({"product": {"optimizer.lr": 1e-3}}, "optimizer.lr", ["list of values"]),
        ({"product": {"optimizer.lrr": [1e-3]}}, "optimizer.lrr", ["did you mean 'lr'"]),
        ({"product": {"optimizer.lr": [1e-3, "high"]}}, "optimizer.lr:", ["valid number", "run 02: optimizer.lr=high"]),
        ({"product": {"optimizer.lr": [1e-3, 0.001]}}, "optimizer.lr", ["twice"]),
        ({"product": {"lr": [1e-3]}}, "lr:", ["section.setting"]),
        ({"product": {"cluster.python": ["a"]}}, "cluster.python", ["one cluster"]),
        ({"product": {"optimizer.lr": [1e-3]}, "at_once": 0}, "at_once", ["no number of chains"]),
        ({"product": {"optimizer.lr": [1e-3]}, "at_onse": 2}, "at_onse", ["did you mean 'at_once'"]),
        ({"product": {"optimizer.lr": [1e-3]}, "filters": ["optimizer.lr > 1"]}, "filters", ["unknown"]),
        ({"product": {"optimizer.lr": [1e-3]}, "list": [{"optimizer.lr": 1}]}, "- optimizer.lr", ["`product` has"]),
        ({"product": {"training.seed": list(range(501))}}, "sweep:", ["501 runs", "at most 500"]),
        ({"list": [{}]}, "sweep:", ["no axis"]),
    ],
)
def test_a_sweep_that_is_refused_names_the_line(
    workspace: Workspace, section: dict[str, Any], line: str, words: list[str]
) -> None:
    refused(workspace, *words, line=line, **section)


def test_a_branch_with_decay_is_one_line(workspace: Workspace) -> None:
    described = stages(
        workspace,
        stable=None,
        **{
            "decay-10": {"from": "stable:10", "decay": 4},
            "decay-end": {"from": "stable", "decay": 8},
            "long": {"from": "decay-end", "training.steps": 40},
        },
    )
    runs = {run.name: run for run in described.runs}
    branch = native(runs["decay-10"])
    assert (branch.optimizer.lr_decay_style, branch.optimizer.lr_wsd_decay_steps, branch.training.steps) == (
        "WSD",
        4,
        14,
    )
    assert branch.checkpoint.load == f"{workspace.folder / 'stages-stable'}:10"
    assert native(runs["decay-end"]).training.steps == 28
    assert native(runs["decay-end"]).checkpoint.load == str(workspace.folder / "stages-stable")
    assert [(run.source, run.iteration) for run in described.runs] == [
        (None, None),
        ("stable", 10),
        ("stable", None),
        ("decay-end", None),
    ]


@pytest.mark.parametrize(
    ("section", "line", "words"),
    [
        ({"a": None, "b": {"from": "c"}}, "from:", ["no stage 'c' above"]),
        ({"b": {"from": "a"}, "a": None}, "from:", ["no stage 'a' above"]),
        ({"a": None, "b": {"from": "a:7", "training.steps": 30}}, "from:", ["saves every 5", "5"]),
        ({"a": None, "b": {"from": "a:25", "training.steps": 30}}, "from:", ["ends at iteration 20"]),
        ({"a": None, "b": {"from": "a"}}, "b:", ["stands at iteration 20", "ends at 20"]),
        ({"a": None, "b": {"from": "a:x"}}, "from:", ["STAGE:ITERATION"]),
        ({"a": None, "b": {"decay": 3}}, "decay:", ["known iteration"]),
        ({"a": None, "b": {"from": "a", "decay": 0}}, "decay:", ["no number of iterations"]),
        ({"a": None, "b": {"form": "a"}}, "form:", ["did you mean 'from'"]),
        ({"a": None, "b": {"from": "a", "after": "a"}}, "after:", ["`from` or `after`"]),
        ({"a": None, "b": {"from": "a", "evaluated": True}}, "evaluated:", ["nothing that a stage has"]),
        ({"a": None, "b": {"from": "a", "decay": 3, "training.seq_length": 32}}, "from:", ["no_load_data"]),
        ({"a": None, "b": {"from": "a", "decay": 3, "model.hidden_size": 32}}, "from:", ["stage b", "hidden_size"]),
        ({"a": None, "b": {"from": "a", "training.stepps": 30}}, "training.stepps", ["did you mean"]),
        (
            {"a": None, "b": {"from": "a", "training.steps": 30, "optimizer.name": "muon"}},
            "from:",
            ["stage b", "optimizer was adam", "is muon", "checkpoint.no_load_optim"],
        ),
        (
            {"a": {"optimizer.lr_decay_style": "cosine"}, "b": {"from": "a:10", "decay": 5}},
            "decay:",
            ["lr_decay_style cosine", "rise to 0.001 again"],
        ),
        (
            {"a": None, "b": {"from": "a", "decay": 5}, "c": {"from": "b", "decay": 5}},
            "decay:",
            ["lr_decay_style WSD"],
        ),
        (
            {"a": {"optimizer.lr": 5e-4}, "b": {"from": "a", "decay": 5, "optimizer.lr": 1e-3}},
            "decay:",
            ["optimizer.lr 0.0005", "begin at 0.001"],
        ),
    ],
)
def test_stages_that_are_refused_name_the_line(
    workspace: Workspace, section: dict[str, Any], line: str, words: list[str]
) -> None:
    refused(workspace, *words, line=line, kind="stages", **section)


def test_a_decay_begins_at_the_rate_of_the_stage_before(workspace: Workspace) -> None:
    described = stages(
        workspace,
        warm=None,
        mid={"from": "warm", "training.steps": 35, "optimizer.lr": 5e-4},
        last={"from": "mid", "decay": 6},
        other={"from": "warm", "decay": 6},
    )
    assert {run.name: native(run).optimizer.lr for run in described.runs} == {
        "warm": 1e-3,
        "mid": 5e-4,
        "last": 5e-4,
        "other": 1e-3,
    }


def test_a_plain_submit_of_several_runs_says_what_to_use(workspace: Workspace) -> None:
    path = workspace.config("sweep", sweep={"product": {"training.seed": [1]}})
    with pytest.raises(RelayrunError, match="relayrun sweep submit"):
        resolve.load_run_config(path)
    with pytest.raises(RelayrunError, match="relayrun sweep submit"):
        campaign.describe_campaign(path, kind="stages")


def test_a_run_that_is_refused_leaves_nothing_of_the_others(workspace: Workspace) -> None:
    path = workspace.config("half", sweep={"list": [{"training.seed": 1}, {"data.tokenizer": "/nowhere"}]})
    described = campaign.describe_campaign(path, kind="sweep")
    with pytest.raises(RelayrunError, match="nowhere"):
        submission.submit_campaign(described)
    assert [found.name for found in workspace.folder.glob("half*")] == ["half.yaml"]


def test_a_sweep_is_submitted_once(workspace: Workspace) -> None:
    path = workspace.config("once", sweep={"product": {"training.seed": [1, 2]}})
    assert submission.submit_campaign(campaign.describe_campaign(path, kind="sweep"))
    assert not submission.submit_campaign(campaign.describe_campaign(path, kind="sweep"))
    with pytest.raises(RelayrunError, match="submitted with other settings"):
        submission.submit_campaign(campaign.describe_campaign(path, ["training.steps=30"], kind="sweep"))
    other = workspace.config("once", sweep={"product": {"training.seed": [1, 3]}})
    with pytest.raises(RelayrunError, match="another sweep of this name"):
        submission.submit_campaign(campaign.describe_campaign(other, kind="sweep"))
