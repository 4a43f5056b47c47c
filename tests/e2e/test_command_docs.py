"""Every command of docs/how-to/command.md runs, and its configs are some."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import CommandConfig
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.run import Run
from tests.readme import ROOT, copy_tracked, path_with_relayrun

PAGE = (ROOT / "docs/how-to/command.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "examples/command"
BATCH_SCRIPT = """#!/bin/bash
#SBATCH --time=10
mkdir -p out
for step in 10 20; do echo "step $step"; echo "$step $*" > "out/epoch=0-step=$step.ckpt"; sleep 2; done
"""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)


def test_every_block_has_a_test_and_the_page_is_short() -> None:
    assert PAGE.count("```") == 2 * sum(len(blocks(kind)) for kind in ("bash", "bash wrap", "yaml", "python"))
    assert len(PAGE.splitlines()) <= 195


def test_the_configs_of_the_page_are_some(tmp_path: Path) -> None:
    whole, part = blocks("yaml")
    assert whole == (EXAMPLES / "plain.yaml").read_text(encoding="utf-8")
    (tmp_path / "run.yaml").write_text(f"include: ['{EXAMPLES / 'plain.yaml'}']\n{part}", encoding="utf-8")
    config = resolve.load_run_config(tmp_path / "run.yaml")
    assert isinstance(config, CommandConfig)
    assert config.command.checkpoint.whole_when == "trainer_state.json"


def test_the_config_of_torchrun_is_that_of_the_example() -> None:
    page = (ROOT / "docs/reference/trainers-of-others.md").read_text(encoding="utf-8")
    assert f"```yaml\n{(EXAMPLES / 'ddp.yaml').read_text(encoding='utf-8')}```\n" in page


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_has_a_config_that_finds_it(path: Path) -> None:
    config = resolve.load_run_config(path)
    assert isinstance(config, CommandConfig)
    assert str(EXAMPLES / f"{path.stem}.py") in config.command.run


def test_what_the_page_says_of_the_client_is_there() -> None:
    loop, agreeing = blocks("python")
    compile(loop, "loop", "exec")
    compile(agreeing, "agreeing", "exec")
    script = (EXAMPLES / "plain.py").read_text(encoding="utf-8")
    (imported,) = re.findall(r"^from relayrun.client import .*$", loop, re.M)
    assert imported in script
    for line in agreeing.splitlines():
        assert line.replace("dist.", "") in (EXAMPLES / "ddp.py").read_text(encoding="utf-8").replace("dist.", "")


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    copy_tracked(tmp_path)
    environment = {"PATH": path_with_relayrun(), "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    (wrap,) = blocks("bash wrap")
    (tmp_path / "train.sbatch").write_text(BATCH_SCRIPT)
    wrap = wrap.replace("relayrun wrap", "relayrun wrap --cluster local")
    script = "\n".join(["set -euo pipefail", *blocks("bash"), wrap])
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1000
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(tmp_path / "logs/runs/my-project/plain")
    assert resume_point(run).iteration == 200
    assert "the last iteration, 200, is saved" in done.stdout
    assert resume_point(Run(tmp_path / "logs/runs/wrapped/train")).iteration == 20
