"""A rank of the real training program that is slower than its peers is named, with the section."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.rundir.node_health import Straggler
from relayrun.files import read_json_lines
from tests.workspace import Workspace, ends

from .test_local_recovery import SETTINGS, with_kills
from .test_local_training import submit

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize(("section", "seconds"), [("data", 1.0), ("forward", 1.0), ("optimizer", 1.0), ("save", 5.0)])
def test_a_slow_rank_is_named_with_its_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, seconds: float
) -> None:
    workspace = Workspace.make(tmp_path)
    hook = {"hook": "tests.training.slow_ranks:Slow", "options": {"section": section, "rank": 1, "seconds": seconds}}
    values = with_kills() | {
        "training": {"steps": 20, "hooks": [hook]},
        "checkpoint": SETTINGS["checkpoint"] | {"async_save": section == "save"},
        "chain": {},
    }
    done = submit(workspace.config("slow", **values))
    run = workspace.run("slow")
    assert [end.cause for end in ends(run)] == ["done"], done.stderr
    *_, last = (line for line in read_json_lines(run.attempt(1).metrics) if "loss" in line)
    assert last["slowest_rank_ratio"] == last["straggler"]["ratio"]
    found = Straggler.of(last["straggler"])
    assert (found.rank, found.section) == (1, section)
    assert found.ratio >= 1.3
    capsys.readouterr()
    assert main(["status", str(run.path)]) == 0
    assert f"straggler rank 1 on {found.node} takes " in " ".join(capsys.readouterr().out.split())
