from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from relayrun.files import sizes
from relayrun.trainers.base import Ending
from relayrun.trainers.command.checkpoints import CheckpointRule
from relayrun.trainers.command.program import CommandProgram


def rule(folder: Path, whole_when: str | None = "state.json") -> CheckpointRule:
    return CheckpointRule(folder=folder, pattern="checkpoint-{iteration}", whole_when=whole_when)


def save(folder: Path, iteration: int, *, whole: bool = True) -> Path:
    path = folder / f"checkpoint-{iteration}"
    path.mkdir(parents=True)
    (path / "weights").write_text("12345")
    if whole:
        (path / "state.json").write_text("{}")
    return path


def program(tmp_path: Path, **change: object) -> CommandProgram:
    settings: dict[str, object] = {
        "client": tmp_path / "client",
        "folder": tmp_path / "checkpoints",
        "logs": [],
        "progress": None,
        "rule": None,
        "save": None,
        "asked_to_leave": lambda: False,
    }
    return CommandProgram(**(settings | change))  # type: ignore[arg-type]


def test_what_is_written_last_makes_a_checkpoint_whole(tmp_path: Path) -> None:
    assert rule(tmp_path / "none").whole() == []
    save(tmp_path, 10)
    save(tmp_path, 5)
    save(tmp_path, 15, whole=False)
    (tmp_path / "checkpoint-best").mkdir()
    assert [found.iteration for found in rule(tmp_path).whole()] == [5, 10]
    assert [found.iteration for found in rule(tmp_path, None).whole()] == [5, 10, 15]
    assert program(tmp_path, rule=rule(tmp_path)).saving() == 15


def test_a_pattern_is_no_regular_expression(tmp_path: Path) -> None:
    (tmp_path / "step.7.pt").write_text("12345")
    (tmp_path / "stepx8ypt").write_text("12345")
    found = CheckpointRule(folder=tmp_path, pattern="step.{iteration}.pt", whole_when=None).whole()
    assert [checkpoint.iteration for checkpoint in found] == [7]
    assert sizes(tmp_path / "step.7.pt") == {".": 5}


def test_what_lies_beyond_the_base_is_moved_away(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10, whole=False)
    (said,) = rule(tmp_path).prepare(base=5, attempt=2)
    assert "state.json is missing" in said
    assert (tmp_path / ".quarantine" / "checkpoint-10-0002" / "weights").exists()
    assert [iteration for iteration, _ in rule(tmp_path).every()] == [5]
    assert sizes(tmp_path / "checkpoint-5") == {"state.json": 2, "weights": 5}


def test_steps_by_the_log_or_by_the_client(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of before: step 9\nstep 1 loss 2.5\nstep 1 loss 2.5\nstep 2 loss nan\nstep two\n")
    progress = re.compile(r"step (?P<iteration>\d+) loss (?P<loss>\S+)")
    by_log = program(tmp_path, logs=[(str(log), 18)], progress=progress)
    assert [(step.iteration, dict(step.metrics)) for step in by_log.steps()] == [(1, {"loss": 2.5}), (2, {})]
    assert by_log.steps() == []

    (tmp_path / "client").mkdir()
    lines = [
        {"iteration": 1, "metrics": {"loss": 1, "step_seconds": 0.5, "consumed_samples": 8}},
        {"iteration": "x"},
        3,
    ]
    (tmp_path / "client" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (step,) = program(tmp_path).steps()
    assert (step.iteration, step.seconds, step.consumed_samples, dict(step.metrics)) == (1, 0.5, 8, {"loss": 1.0})


def test_checkpoints_by_the_client_lie_in_the_folder_of_the_run(tmp_path: Path) -> None:
    own, other = save(tmp_path / "checkpoints", 5), save(tmp_path / "elsewhere", 10)
    (tmp_path / "client").mkdir()
    lines = [
        {"iteration": 5, "path": str(own)},
        {"iteration": 10, "path": str(other)},
        {"iteration": 15, "path": "/no"},
    ]
    (tmp_path / "client" / "checkpoints.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [found.iteration for found in program(tmp_path).checkpoints()] == [5]


def test_a_good_exit_code_is_an_end_on_purpose(tmp_path: Path) -> None:
    assert program(tmp_path).ending(0) == Ending(outcome="done", words="the program ended by itself, with exit code 0")
    left = program(tmp_path, asked_to_leave=lambda: True).ending(0)
    assert left is not None
    assert left.outcome == "left"
    assert program(tmp_path).ending(1) is None
    assert program(tmp_path).ending(None) is None


def test_it_is_asked_for_a_checkpoint(tmp_path: Path) -> None:
    asked: list[int] = []
    program(tmp_path, save=lambda: asked.append(1)).ask_to_save()
    assert (tmp_path / "client" / "save").exists()
    assert asked == [1]


@pytest.mark.parametrize("text", ["10", "checkpoint-10\n", "/elsewhere/checkpoint-10"])
def test_a_tracker_names_the_newest_whole_one(text: str, tmp_path: Path) -> None:
    for iteration in (5, 10, 15):
        save(tmp_path, iteration, whole=iteration != 5)
    tracked = CheckpointRule(folder=tmp_path, pattern="checkpoint-{iteration}", whole_when=None, tracker="latest")
    assert tracked.whole() == []  # nothing is named yet
    (tmp_path / "latest").write_text(text)
    assert [found.iteration for found in tracked.whole()] == [5, 10]
    assert program(tmp_path, rule=tracked).saving() == 15
    both = CheckpointRule(folder=tmp_path, pattern="checkpoint-{iteration}", whole_when="state.json", tracker="latest")
    assert [found.iteration for found in both.whole()] == [10]

    moved, set_back = tracked.prepare(base=5, attempt=2)[-2:]
    assert "checkpoint-15 (latest does not name it) moved to" in moved
    assert set_back == f"{tmp_path / 'latest'} named iteration 10; it names 5 now"
    assert (tmp_path / "latest").read_text().strip() == text.strip().replace("10", "5")
    assert [found.iteration for found in tracked.whole()] == [5]
    assert tracked.prepare(base=5, attempt=3) == []
    tracked.prepare(base=0, attempt=4)
    assert not (tmp_path / "latest").exists()
    assert tracked.prepare(base=0, attempt=5) == []


def test_a_tracker_may_be_a_link_and_may_be_lost(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10)
    tracked = CheckpointRule(folder=tmp_path, pattern="checkpoint-{iteration}", whole_when=None, tracker="latest")
    (tmp_path / "latest").symlink_to("checkpoint-10")
    assert [found.iteration for found in tracked.whole()] == [5, 10]
    tracked.prepare(base=5, attempt=2)
    assert (tmp_path / "latest").readlink() == Path("checkpoint-5")
    (tmp_path / "latest").unlink()
    assert tracked.prepare(base=5, attempt=3) == [f"{tmp_path / 'latest'} named iteration None; it names 5 now"]
    assert [found.iteration for found in tracked.whole()] == [5]
    (tmp_path / "latest").write_text("no checkpoint")
    assert tracked.whole() == []
