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


FAULTY = """
import errno, os, sys
import client

write, close, count = os.write, os.close, 0

def fail(kind):
    global count
    count += 1
    return kind if count % 3 else None

def faulty_write(file, data):
    kind = fail(sys.argv[1])
    if kind == "before":
        raise OSError(errno.EIO, "Input/output error")
    if kind == "part":
        return write(file, data[: len(data) * 2 // 3])
    if kind == "all-but-the-end":
        return write(file, data[:-1])
    write(file, data)
    if kind == "behind":
        raise OSError(errno.ESTALE, "Stale file handle")
    return len(data)

def faulty_close(file):
    close(file)
    if fail(sys.argv[1] if sys.argv[1] == "close" else None):
        raise OSError(errno.EIO, "Input/output error")

client.os.write, client.os.close = faulty_write, faulty_close
for iteration in range(1, 41):
    client.step_done(iteration, loss=1.0)
    if not iteration % 10:
        client.checkpoint_done(iteration, f"/c/{iteration}")
client.os.write, client.os.close = write, close
"""


@pytest.mark.parametrize("kind", ["before", "part", "all-but-the-end", "behind", "close"])
def test_lines_that_could_not_be_written_are_written_with_the_next_ones_once(folder: Path, kind: str) -> None:
    """At 5% errors a tenth of the lines was missing for good."""
    word = folder / "word"
    environment = {"PATH": os.environ["PATH"], client.FOLDER: str(word)}
    command = [sys.executable, "-c", FAULTY, kind]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, timeout=600, capture_output=True, text=True)
    assert ("not written yet" in done.stderr) == (kind in ("before", "behind", "close"))
    steps = [entry["iteration"] for entry in read_json_lines(word / "steps.jsonl")]
    assert steps == list(range(1, 41))
    assert [entry["iteration"] for entry in read_json_lines(word / "checkpoints.jsonl")] == [10, 20, 30, 40]


def test_only_so_many_lines_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(client.FOLDER, str(folder / "away"))
    monkeypatch.setattr(client, "MOST_UNWRITTEN", 3)
    monkeypatch.setattr(client, "_unwritten", {})
    for iteration in range(10):
        client.step_done(iteration)
    (folder / "away").mkdir()
    client.step_done(10)
    assert [entry["iteration"] for entry in read_json_lines(folder / "away/steps.jsonl")] == [8, 9, 10]
