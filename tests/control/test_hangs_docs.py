"""What docs/how-to/hangs.md and docs/explanation/drill-kills.md say is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.control.rundir.node_health import STRAGGLER_RATIO, STRAGGLER_SECTIONS, STRAGGLER_WINDOW
from relayrun.train.reporting import liveness
from tests.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
HANGS = (ROOT / "docs/how-to/hangs.md").read_text(encoding="utf-8")
DRILL = (ROOT / "docs/explanation/drill-kills.md").read_text(encoding="utf-8")


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page, re.M | re.S)


def test_its_config_and_command_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (part,) = blocks(HANGS, "yaml")
    (tmp_path / "whole.yaml").write_text(f"include: ['{Workspace.make(tmp_path).config('run')}']\n{part}")
    assert resolve.load_run_config(tmp_path / "whole.yaml").chain.hang_timeout == 300
    (command,) = blocks(HANGS, "bash")
    assert main(shlex.split(command)[1:]) == 0
    assert "hang_timeout" in capsys.readouterr().out


def test_its_numbers_are_those_of_the_code() -> None:
    text = " ".join(HANGS.split())
    assert f"99th percentile, at least {liveness.SHORTEST_STEP_LIMIT:.0f} s" in text
    assert f"the same, at least {liveness.SHORTEST_OTHER_LIMIT:.0f} s" in text
    assert f"until {liveness.MEASURED_STEPS} steps are measured" in text
    assert f"Every {STRAGGLER_WINDOW} steps" in text
    assert f"takes {STRAGGLER_RATIO} times as long" in text
    assert all(f"(`{section}`)" in text for section in STRAGGLER_SECTIONS)


@pytest.mark.slow
def test_the_drill_takes_the_options_that_its_page_shows() -> None:
    """The long test of the drill runs it; here make says what it would run."""
    for command in "".join(blocks(DRILL, "bash")).splitlines():
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run(
            [*shlex.split(command), "-n"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )
        (words,) = (shlex.split(line) for line in done.stdout.splitlines() if "benchmarks/kills.py" in line)
        assert words[1] == "benchmarks/kills.py"
        options = [word for word in words[2:] if word.startswith("--")]
        asked = subprocess.run(
            [*words[:2], "--help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
        )
        assert options
        assert all(option.partition("=")[0] in asked.stdout for option in options), options
