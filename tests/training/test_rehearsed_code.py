"""A rehearsal refuses the user code that ranks would refuse, and knows the learning rate of the next step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.submit import submission
from relayrun.submit.check import rehearsal as asked
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.train import rehearsal
from tests.workspace import Workspace

TEAM = """
from relayrun.train.hooks import Hook

class Boom(Hook):
    def __init__(self, at=10):
        self.at = at

class NoHook:
    pass

def summed(logits, losses):
    return losses

def halved(losses, mask):
    return losses / 2
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace.make(tmp_path_factory.mktemp("rehearsed"))
    (made.folder / "my_rehearsed_team.py").write_text(TEAM)
    (made.folder / "my_broken_team.py").write_text("import no_such_package_of_mine\n")
    return made


def native(path: Path) -> RunConfig:
    return resolve.require_native(resolve.load_run_config(path))


@pytest.mark.parametrize(
    ("sections", "setting", "words"),
    [
        ({"training": {"loss": "my_rehearsed_team:halved"}}, "", ""),
        ({"training": {"loss": "my_rehearsed_team:summed"}}, "training.loss", "a loss takes either"),
        ({"training": {"loss": "my_rehearsed_team:none"}}, "training.loss", "has no attribute 'none'"),
        ({"training": {"hooks": [{"hook": "my_broken_team:X"}]}}, "training.hooks", "No module named 'no_such_pack"),
        ({"training": {"hooks": [{"hook": "my_rehearsed_team:NoHook"}]}}, "training.hooks", "no class that inherits"),
        (
            {"training": {"hooks": [{"hook": "my_rehearsed_team:Boom", "options": {"att": 1}}]}},
            "training.hooks",
            "unexpected keyword argument 'att'",
        ),
        (
            {"optimizer": {"class": "torch.optim:NAdam", "arguments": {"momentum_decai": 0.1}}},
            "optimizer.class",
            "momentum_decai",
        ),
        ({"data": {"order": "my_rehearsed_team:nothing"}}, "data.order", "cannot be imported"),
    ],
)
def test_user_code_is_refused_as_by_ranks(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], setting: str, words: str
) -> None:
    monkeypatch.syspath_prepend(workspace.folder)
    found = list(rehearsal.user_code_faults(native(workspace.config("run", **sections))))
    assert [name for name, _ in found] == ([setting] if setting else [])
    assert all(words in said for _, said in found)


def test_the_rate_of_the_next_step(workspace: Workspace) -> None:
    config = native(workspace.config("run", optimizer={"lr_decay_style": "linear", "lr_warmup_steps": 4}))
    at = [TrainingProgress(config.training.batch_sizes, iteration=n, consumed_samples=8 * n) for n in (0, 4, 12, 20)]
    steps = [(config.model_dump(mode="json"), progress.state()) for progress in at]
    rates = rehearsal.rehearse({"configs": [], "steps": steps})["rates"]
    assert rates == pytest.approx([0.0, 1e-3, 0.5e-3, 0.0])


@pytest.fixture
def asked_here(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a check asks the ranks' Python is answered in this process, which has imported torch."""

    def answer(config: RunConfig, module: str, request: Any, *, limit: float) -> dict[str, Any]:
        assert module == "relayrun.train.rehearsal"
        return rehearsal.rehearse(json.loads(json.dumps(request)))

    monkeypatch.setattr(asked, "ask_ranks", answer)
    monkeypatch.setattr(submission, "log_folder", lambda _: workspace.folder / "logs")


@pytest.mark.usefixtures("asked_here")
def test_a_plan_shows_the_rate_before_and_behind_each_edge(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workspace.config(
        "plan",
        name="plan",
        optimizer={"lr": 2e-3, "lr_decay_style": "constant"},
        checkpoint={"interval": 5},
        stages={
            "warm": None,
            "mid": {"from": "warm", "training.steps": 35, "optimizer.lr": 1e-3},
            "last": {"from": "mid", "decay": 6},
            "longer": {"from": "warm:10", "decay": 5, "training.steps": 40},
            "curve": {"from": "warm", "training.steps": 40, "optimizer.lr_decay_style": "cosine"},
            "again": {"from": "curve", "training.steps": 80, "optimizer.lr_decay_style": "cosine"},
        },
    )
    assert main(["check", str(path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    names = ("stage.learning_rate", "stage.decay")
    found = {
        name: [(each["level"], each["words"]) for each in run["findings"] if each["name"] in names]
        for name, run in runs.items()
    }
    assert found["warm"] == []
    assert found["mid"][0][1].startswith("learning rate 0.002 at step 20, 0.001 at the next one")
    assert found["last"] == [("ok", "learning rate 0.001 at step 35, 0.001 at the next one")], "it decays from mid's"
    assert found["longer"][1] == ("ok", "25 steps at a constant rate come before the decay of 5 steps")
    level, words = found["again"][0]
    assert level == "warning", words
    assert words.startswith("learning rate 3.42e-06 at step 40, 0.00104 at the next one; with the settings"), words
