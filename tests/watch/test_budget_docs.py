"""What docs/how-to/budget.md and docs/how-to/prometheus.md show works, and has the names of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from relayrun.cli import main, parse
from relayrun.config.compose import resolve
from tests.workspace import Workspace

pytest.importorskip("prometheus_client")
HOW_TO = Path(__file__).resolve().parents[2] / "docs/how-to"
BUDGET = (HOW_TO / "budget.md").read_text(encoding="utf-8")
PROMETHEUS = (HOW_TO / "prometheus.md").read_text(encoding="utf-8")


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page, re.M | re.S)


def test_the_settings_of_the_budget_page_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (part,) = blocks(BUDGET, "yaml")
    (tmp_path / "whole.yaml").write_text(f"include: ['{Workspace.make(tmp_path).config('run')}']\n{part}")
    chain = resolve.load_run_config(tmp_path / "whole.yaml").chain
    assert (chain.max_node_hours, chain.deadline, chain.ask_above_node_hours) == (480, "2027-01-31T18:00", 100)
    (command,) = blocks(BUDGET, "bash")
    assert parse(shlex.split(command)[1:]).overrides == ["chain.max_node_hours=600"]
    assert main(["explain", "chain.deadline"]) == 0
    assert "after which no job of the chain runs" in " ".join(capsys.readouterr().out.split())


def test_the_metrics_page_has_every_metric_and_no_other() -> None:
    from relayrun.watch.prometheus import METRICS

    (table,) = re.findall(r"^\| metric .*?\n\n", PROMETHEUS, re.M | re.S)
    names = {name for row in table.strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert names == METRICS.keys()
    for command in blocks(PROMETHEUS, "bash(?: serve)?"):
        assert parse(shlex.split(command, comments=True)[1:]).command == "metrics"
    assert parse(shlex.split(blocks(PROMETHEUS, "bash goodput")[0])[1:]).json
    assert (HOW_TO / "grafana-dashboard.json").is_file()
