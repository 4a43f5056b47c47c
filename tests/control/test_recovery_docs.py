"""What docs/explanation/recovery.md says is there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.config.compose.schema import CommandConfig
from relayrun.control.agent.restart import restart_ranks_exited_line
from relayrun.control.rundir.restarts import RESTART_SECONDS, FailedRestart
from tests.config.test_trainer_configs import COMMAND, written
from tests.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/explanation/recovery.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_page_is_short_and_its_configs_are_some(tmp_path: Path) -> None:
    assert len(PAGE.splitlines()) <= 150
    config = Workspace.make(tmp_path).config("run")
    assert len(blocks("yaml")) == 2
    for part in blocks("yaml"):
        (tmp_path / "whole.yaml").write_text(f"include: ['{config}']\n{part}", encoding="utf-8")
        assert resolve.load_run_config(tmp_path / "whole.yaml").chain.recovery == "node"


def test_the_config_of_other_trainers_is_one(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/recovery-of-other-trainers.md").read_text(encoding="utf-8")
    part, spare = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    config = written(tmp_path, COMMAND)
    (tmp_path / "whole.yaml").write_text(f"include: ['{config}']\n{part}", encoding="utf-8")
    made = resolve.load_run_config(tmp_path / "whole.yaml")
    assert (made.trainer, made.chain.recovery) == ("command", "node")
    torchrun = ROOT / "examples/command/ddp.yaml"
    (tmp_path / "spare.yaml").write_text(f"include: ['{torchrun}']\ncluster: generic\n{spare}", encoding="utf-8")
    made = resolve.load_run_config(tmp_path / "spare.yaml")
    assert isinstance(made, CommandConfig)
    assert (made.world_size, made.job.spare_nodes, made.command.leave_signal) == (4, 1, None)
    assert restart_ranks_exited_line(4) in page


@pytest.mark.slow
def test_its_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    (commands,) = blocks("bash")
    for command in commands.splitlines():
        assert main(command.split()[1:]) == 0
    assert "recovery" in capsys.readouterr().out


def test_the_fields_that_it_names_are_those_of_the_record() -> None:
    known = {field.name for field in fields(FailedRestart)}
    records = (ROOT / "docs/reference/run-directory.md").read_text(encoding="utf-8")
    section = records.partition("\n## Restarts\n")[2].partition("\n## ")[0].partition("`attempts/")[2]
    named = set(re.findall(r"`(\w+)`", section.partition("| name |")[0]))
    assert named <= known, named - known
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(RESTART_SECONDS)
