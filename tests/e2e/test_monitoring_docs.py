"""Every command of docs/how-to/monitoring.md runs; W&B's service is the stand-in of the loopback interface."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.readme import ROOT, copy_tracked, path_with_relayrun
from tests.waiting import read_line
from tests.wandb_service import WandBService
from tests.workspace import Workspace

PAGE = (ROOT / "docs/how-to/monitoring.md").read_text(encoding="utf-8")
KEY = "0123456789abcdef0123456789abcdef01234567"


def blocks() -> dict[str, str]:
    return dict(re.findall(r"^```bash ?(\w*)\n(.*?)^```$", PAGE, re.M | re.S))


def test_every_block_has_a_test() -> None:
    assert PAGE.count("```") == 2 * len(blocks())
    assert set(blocks()) == {"", "follow", "offline", "service", "copy", "tensorboard"}


@pytest.mark.long
def test_training_offline_sending_looking_and_debugging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_tracked(tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    workspace = Workspace.make(tmp_path / "made")
    (tmp_path / "data").mkdir()
    shutil.move(workspace.folder / "data", tmp_path / "data/my-mixture")
    shutil.move(workspace.folder / "tokenizer.json", tmp_path / "data/tokenizer")
    environment = {"PATH": path_with_relayrun(), "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}

    def run(block: str, **more: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", blocks()[block]],
            cwd=tmp_path,
            text=True,
            env=environment | more,
            capture_output=True,
            timeout=1000,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("offline")
    with WandBService() as service:
        out = run("service", WANDB_API_KEY=KEY, WANDB_BASE_URL=service.url)
        assert "the service had iteration 0, sent up to 40" in out
        (run_id,) = service.lines
        assert [row["_step"] for row in service.history(run_id)] == list(range(1, 41))
    (stream,) = json.loads((tmp_path / "logs/runs/my-project/my-run/streams.json").read_text())
    assert stream["id"] == run_id

    board = subprocess.Popen(
        [*shlex.split(blocks()["tensorboard"]), "--port=0"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = iter(lambda: read_line(board, board.stderr, 600), "")
        assert any("http://localhost:" in line for line in said)
    finally:
        board.kill()
        board.communicate(timeout=300)

    listed = run("").split()
    assert {"profile", "compute_environment.txt"} <= set(listed)
    assert (tmp_path / "logs/runs/my-project/debugged/code/0001/relayrun/cli/__init__.py").is_file()
    assert (tmp_path / "logs/runs/my-project/debugged/debug/0001/profile/rank-0000.json").is_file()


@pytest.mark.slow
def test_the_copy_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Read from a fake of `wandb.Api`."""
    import wandb

    asked: list[str] = []
    source = SimpleNamespace(
        id="f5v94x1q",
        name="a",
        config={},
        summary_metrics={},
        tags=[],
        notes=None,
        group=None,
        scan_history=lambda **_options: [{"_step": 1, "_timestamp": 1e9, "loss": 2.0}],
        history=lambda **_options: [],
        files=list,
    )
    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(run=lambda path: asked.append(path) or source))
    monkeypatch.chdir(tmp_path)
    script, *arguments = shlex.split(blocks()["copy"])
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with WandBService() as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        wandb.teardown()
        assert service.history("f5v94x1q")[0]["loss"] == 2.0
    assert asked == ["my-name/my-project/f5v94x1q"]
    assert capsys.readouterr().out == "f5v94x1q (baseline): 1 rows to my-team/paper\n"
