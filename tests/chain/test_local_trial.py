"""`relayrun trial`: a program is run, killed, resumed and asked to leave, and each promise is said to hold or not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from relayrun import places
from relayrun.cli import main
from relayrun.config.compose.yaml_file import dump_yaml

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROGRAM = Path(__file__).with_name("restarted_program.py")


def config(folder: Path, **command: Any) -> Path:
    """A run of a program that saves every fifth iteration, and goes on where `resume` names a checkpoint."""
    settings = {
        "run": [sys.executable, str(PROGRAM), "{checkpoints}", "100000"],
        "resume": ["--resume", "{checkpoint}"],
        "checkpoint": {"pattern": "step-{iteration}", "whole_when": "done"},
        "progress": r"^step (?P<iteration>\d+) loss (?P<loss>\S+)",
    }
    values = {
        "project": "tests",
        "name": folder.name,
        "trainer": "command",
        "command": settings | command,
        "chain": {"max_failed_attempts": 2},
        "job": {"time": "30", "ntasks_per_node": 1},
        "cluster": {"name": "local", "scheduler": "local"},
    }
    path = folder / "run.yaml"
    path.write_text(dump_yaml(values), encoding="utf-8")
    return path


def tried(path: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    (project / places.PROJECT_MARKER).touch()
    monkeypatch.chdir(project)
    code = main(["trial", str(path), "--minutes", "2"])
    said = capsys.readouterr()
    return code, said.out.splitlines()[-4:], said.err


def test_a_program_that_resumes_and_leaves_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines, err = tried(config(tmp_path), tmp_path, monkeypatch, capsys)
    assert code == 0, (lines, err)
    assert [line.partition(": ")[0] for line in lines] == ["ok"] * 4
    assert "checkpoints: step-5" in lines[1]
    assert "was to go on from iteration" in lines[2]
    code, _, err = tried(tmp_path / "run.yaml", tmp_path, monkeypatch, capsys)
    assert (code, "there is a trial already" in err) == (1, True)


def test_a_program_that_begins_anew_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines, err = tried(config(tmp_path, resume=[]), tmp_path, monkeypatch, capsys)
    assert code == 1, (lines, err)
    assert [line.partition(": ")[0] for line in lines] == ["ok", "ok", "NOT OK", "NOT OK"]
    assert "its first iteration was 1" in lines[2] or "it reported no iteration" in lines[2]


def test_a_pattern_that_fits_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(
        tmp_path, run=[sys.executable, str(PROGRAM), "{checkpoints}", "100"], progress=r"^Step (?P<iteration>\d+)"
    )
    code, lines, _ = tried(path, tmp_path, monkeypatch, capsys)
    assert code == 1
    assert lines[0].startswith("NOT OK: no iteration was reported; nothing fits ")
