"""Every command of docs/how-to/training.md, optimizers.md and logging.md does what the page says; their sections of a
run config are some."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from relayrun import cli
from relayrun.config.compose import resolve
from relayrun.config.sections.optimizer import OptimizerSection
from relayrun.config.sections.training import TrainingSection
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from tests.readme import ROOT, copy_tracked, path_with_relayrun
from tests.workspace import Workspace

NAMES = ("training", "optimizers", "logging")
PAGES = [(ROOT / f"docs/how-to/{name}.md").read_text(encoding="utf-8") for name in NAMES]
PAGE = PAGES[0]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", "\n".join(PAGES), re.M | re.S)


def test_every_block_has_a_test_and_the_page_is_short() -> None:
    assert "".join(PAGES).count("```") == 2 * sum(len(blocks(kind)) for kind in ("bash", "bash colleague", "yaml"))
    assert max(len(page.splitlines()) for page in PAGES) <= 150


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_section_is_one_of_a_run_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"include: ['{ROOT}/configs/runs/my-run.yaml']\n{text}")
    resolve.load_run_config(tmp_path / "run.yaml", ["optimizer.lr_warmup_steps=0", "training.global_batch_size=1024"])


def test_a_run_of_a_colleague_is_taken_over_by_these_commands() -> None:
    """tests/slurm/test_users.py runs them as two people."""
    (block,) = blocks("bash colleague")
    stop, submit = (cli.parse(line.split()[1:]) for line in block.splitlines())
    assert stop.command == "stop"
    assert submit.take_over


def test_styles_and_policies_are_those_that_there_are() -> None:
    names = [name for line in PAGE.splitlines() if line.startswith("| `") for name in re.findall(r"`([\w-]+)`", line)]
    for style in ("lr_decay_style", "lr_wsd_decay_style"):
        assert set(OptimizerSection.model_json_schema()["properties"][style]["enum"]) <= set(names), style
    for policy in ("on_nan", "on_spike"):
        (said,) = re.findall(rf"^  {policy}: \w+ +# (.*)$", PAGE, re.M)
        field = TrainingSection.model_json_schema()["properties"][policy]
        assert re.findall(r"\w+", said.replace("(default)", "")) == field["enum"]
        assert said.startswith(f"{field['default']} (default)")


@pytest.mark.slow
@pytest.mark.long
def test_ramp_warm_up_evaluations_branch_and_fine_tuning(tmp_path: Path) -> None:
    copy_tracked(tmp_path)
    workspace = Workspace.make(tmp_path / "made")
    (tmp_path / "data/tokens/my-tokenizer").mkdir(parents=True)
    held_out = Workspace.make(tmp_path / "held-out", seed=2).folder / "data"
    shutil.move(held_out, tmp_path / "data/tokens/my-tokenizer/heldout")
    shutil.move(workspace.folder / "data", tmp_path / "data/my-mixture")
    shutil.move(workspace.folder / "tokenizer.json", tmp_path / "data/tokenizer")
    environment = {"PATH": path_with_relayrun(), "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    script = "set -euo pipefail\n" + "\n".join(blocks("bash"))
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=1000
    )
    assert done.returncode == 0, done.stderr

    def lines(name: str) -> list[dict[str, Any]]:
        return list(read_json_lines(Run(tmp_path / "logs/runs/my-project" / name).metrics_view))

    def begin(name: str) -> AttemptStart:
        found = AttemptStart.read(Run(tmp_path / "logs/runs/my-project" / name).attempt(1).begin)
        assert found is not None
        return found

    first = [line for line in lines("my-run") if "loss" in line]
    assert [line["global_batch_size"] for line in first] == [8] * 8 + [16] * 32
    # 40,960 tokens are 160 samples: 8 iterations of 8 samples, 6 of 16
    assert max(first, key=lambda line: line["lr"])["iteration"] == 15
    assert [line["lr"] for line in first[:14]] == pytest.approx([3e-3 * step / 14 for step in range(14)])
    evaluated = [line for line in lines("my-run") if "validation" in line]
    assert [(line["iteration"], set(line["validation"])) for line in evaluated] == [
        (20, {"heldout"}),
        (40, {"heldout"}),
    ]

    branch = [line for line in lines("my-run-annealed") if "loss" in line]
    assert (begin("my-run-annealed").base_iteration, branch[0]["iteration"], len(branch)) == (20, 21, 10)
    assert branch[0]["consumed_samples"] == first[20]["consumed_samples"]
    assert branch[0]["lr"] == 3e-3
    assert branch[-1]["lr"] == pytest.approx(3e-3 - 0.9 * (3e-3 - 3e-4))

    tuned = [line for line in lines("my-run-tuned") if "loss" in line]
    assert [line["iteration"] for line in tuned] == list(range(1, 31))
    assert tuned[0]["loss"] < first[0]["loss"] - 0.5
