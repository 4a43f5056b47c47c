"""What a run will start besides its own program is rehearsed at a submit, as the ranks start it."""

from __future__ import annotations

from typing import Any

import pytest

from relayrun.config.compose import resolve
from relayrun.submit import submission
from relayrun.submit.check import rehearsal
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.check.rehearsal import Rehearsal
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
    made = Workspace.make(tmp_path_factory.mktemp("rehearsal"))
    (made.folder / "proj/my_own_team").mkdir(parents=True)
    (made.folder / "proj/my_own_team/__init__.py").touch()
    (made.folder / "proj/my_own_team/probes.py").write_text(TEAM)
    (made.folder / "proj/my_own_team/broken.py").write_text("import no_such_package_of_mine\n")
    return made


def found(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> dict[str, tuple[str, str, str]]:
    """Level, setting and words of what a check says of the ranks' Python and of a user's code."""
    monkeypatch.setattr(submission, "log_folder", lambda _: workspace.folder / "logs")
    given = resolve.read_settings(workspace.config("run", **sections))
    config = resolve.validate_settings(given)
    report = submission.check_submission(config, given=given, intent=SubmitIntent())
    return {
        each.name: (each.level, each.setting or "", f"{each.words} -> {each.remedy or ''}")
        for each in report.findings.all
        if each.name in ("node.python", "node.packages", "node.user_code")
    }


def test_pythonpath_of_the_site_is_where_ranks_look(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = {"hook": "my_own_team.probes:Boom", "options": {"at": 3}}
    python: dict[str, Any] = {"python": None}  # the Python that submits
    here = {"environment": {"PYTHONPATH": str(workspace.folder / "proj")}} | python
    levels = found(workspace, monkeypatch, training={"hooks": [hook]}, cluster=here)
    assert levels["node.user_code"][0] == "ok", levels
    assert levels["node.python"][0] == "ok"
    levels = found(workspace, monkeypatch, training={"hooks": [hook]}, cluster=python)
    level, setting, words = levels["node.packages"]
    assert (level, setting) == ("error", "training.hooks")
    assert "has no my_own_team, which the ranks import" in words
    assert "PYTHONPATH of cluster.environment" in words
    assert "node.user_code" not in levels


def test_a_fault_of_user_code_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Rehearsal(faults=[("training.loss", "my_own_team.probes:summed takes logits, losses")])
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_, **__: fault)
    here = {"environment": {"PYTHONPATH": str(workspace.folder / "proj")}, "python": None}
    own = {"training": {"loss": "my_own_team.probes:summed"}, "cluster": here}
    level, setting, words = found(workspace, monkeypatch, **own)["node.user_code"]
    assert (level, setting) == ("error", "training.loss")
    assert "takes logits, losses" in words
    level, _, _ = found(workspace, monkeypatch, job={"setup": ["true"]}, **own)["node.user_code"]
    assert level == "warning", "lines of job.setup may change what the ranks import"


def test_a_container_is_not_looked_into(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    container = {"runtime": "apptainer", "image": "/no/image.sif"}
    levels = found(workspace, monkeypatch, cluster={"container": container, "python": "/in/the/image/python"})
    assert levels["node.python"][0] == "not checked", "the Python of cluster.python lies in the container"
    assert "node.user_code" not in levels
