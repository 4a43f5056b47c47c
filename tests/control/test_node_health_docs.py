"""What docs/how-to/node-health.md says is there."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.config.compose.yaml_file import dump_yaml
from relayrun.config.sections.chain import NodeHealthLimits
from relayrun.control.rundir.node_health import HealthFinding
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError
from relayrun.submit.run_plan import make_plan
from tests.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/node-health.md").read_text(encoding="utf-8")
SLURM = {"name": "test", "scheduler": "slurm", "python": "/opt/python"}


LIMITS = {each.name for each in fields(NodeHealthLimits)}


def block(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)
    return str(found)


def test_the_page_is_short_and_its_config_is_one(tmp_path: Path) -> None:
    assert len(PAGE.splitlines()) <= 150
    path = Workspace.make(tmp_path).config("run", cluster=SLURM, training={"global_batch_size": 16})
    (tmp_path / "whole.yaml").write_text(f"include: ['{path}']\n{block('yaml')}", encoding="utf-8")
    plan = make_plan(resolve.load_run_config(tmp_path / "whole.yaml"), Run(tmp_path / "run"), tmp_path, revision=1)
    assert (plan.chain.node_health, plan.chain.node_health_command) == ("warn", ["/opt/site/nhc"])


@pytest.mark.slow
def test_its_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(block("bash"))[1:]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in LIMITS)


def test_its_checks_settings_and_fields_are_those_of_the_code() -> None:
    table = PAGE.partition("| check |")[2].partition("\n\n")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    source = (ROOT / "relayrun/control/rundir/node_health.py").read_text(encoding="utf-8")
    checks = source.partition("check: str")[2].partition("value: float")[0]
    assert named == set(re.findall(r"`(\w+)`", checks))
    settings = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[4:5][0] if row else "")
    }
    assert settings == LIMITS
    record = PAGE.partition("## On record")[2]
    known = {field.name for field in fields(HealthFinding)} | {"warned", "ended"}
    assert set(re.findall(r"`(\w+)`", record)) == known


def test_nobody_looks_where_it_is_off(tmp_path: Path) -> None:
    path = Workspace.make(tmp_path).config("run", chain={"node_health": "off"})
    assert (
        make_plan(resolve.load_run_config(path), Run(tmp_path / "run"), tmp_path, revision=1).chain.node_health == "off"
    )


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        ({"node_health": "on"}, "node_health"),
        ({"node_health_limits": {"clock_seconds": 0}}, "clock_seconds"),
        ({"node_health_limits": {"command_seconds": 60}}, "command_seconds"),
        ({"node_health_limits": {"tmp_gb": "all"}}, "tmp_gb"),
        ({"node_health_command": ["a\nb"]}, "control character"),
    ],
)
def test_what_is_no_limit_is_refused(tmp_path: Path, chain: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve.load_run_config(Workspace.make(tmp_path).config("run", chain=chain))


def test_a_check_that_nothing_would_run_is_refused(tmp_path: Path) -> None:
    own = {"trainer": "command", "command": {"run": ["true"]}, "chain": {"node_health_command": ["/opt/site/nhc"]}}
    path = tmp_path / "run.yaml"
    run = {"project": "p", "name": "n", "job": {"nodes": 1, "time": 10}, "cluster": SLURM}
    path.write_text(dump_yaml(run | own), encoding="utf-8")
    assert resolve.load_run_config(path, ["chain.recovery=node"]).chain.node_health_command
    with pytest.raises(ConfigError, match="the trainer native alone checks nodes"):
        resolve.load_run_config(path)
