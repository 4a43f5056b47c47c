"""`relayrun.client`: a program that runs in a process of its own, with a copy of the file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun import client
from relayrun.files import read_json_lines

PROGRAM = """
import sys
from client import checkpoint, checkpoint_done, should_leave, should_save, step_done
step_done(1, loss=2.5, lr=1e-3, bad=float("nan"))
checkpoint_done(1, sys.argv[1])
print(checkpoint(), should_save(), should_save(), should_leave())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(client.__file__, tmp_path / "client.py")
    (tmp_path / "word").mkdir()
    return tmp_path


def run(folder: Path, **environment: str) -> str:
    clean = {"PATH": os.environ["PATH"]}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, "/c/1"],  # it imports the copy, from its working directory
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return found.stdout.strip() + found.stderr.strip()


def test_outside_of_a_chain_it_does_nothing(folder: Path) -> None:
    assert run(folder) == "None False False False"
    assert list((folder / "word").iterdir()) == []


def test_what_it_says_and_hears(folder: Path) -> None:
    word = folder / "word"
    (word / "save").touch()
    (folder / "stop").touch()
    surroundings = {client.FOLDER: str(word), client.STOP: str(folder / "stop"), "RELAYRUN_CHECKPOINT": "/c/0"}
    assert run(folder, **surroundings) == "/c/0 True False True"
    (step,) = read_json_lines(word / "steps.jsonl")
    assert step["metrics"] == {"loss": 2.5, "lr": 1e-3}
    (saved,) = read_json_lines(word / "checkpoints.jsonl")
    assert (saved["iteration"], saved["path"]) == (1, "/c/1")
    assert run(folder, **surroundings) == "/c/0 False False True"


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_other_ranks_say_nothing(folder: Path, variable: str) -> None:
    run(folder, **{client.FOLDER: str(folder / "word"), variable: "1"})
    assert list((folder / "word").iterdir()) == []


def test_a_torn_line_does_not_tear_the_next(folder: Path) -> None:
    steps = folder / "word" / "steps.jsonl"
    steps.write_text(json.dumps({"iteration": 1})[:5])
    run(folder, **{client.FOLDER: str(folder / "word")})
    assert [entry["iteration"] for entry in read_json_lines(steps)] == [1]


def test_a_folder_that_is_away_ends_nothing(folder: Path) -> None:
    said = run(folder, **{client.FOLDER: str(folder / "away")})
    assert said.startswith("None False False False")
    assert "steps.jsonl not written" in said
