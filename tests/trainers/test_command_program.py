from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.trainers.base import ENDED_BY_ITSELF, ProgramEnding
from relayrun.control.trainers.command_program import ENDED_EARLY, CheckpointRule, CommandProgram, LogPattern
from relayrun.errors import RunDirError
from relayrun.files import file_sizes

PROGRESS = LogPattern(re.compile(r"step (?P<iteration>\d+) loss (?P<loss>\S+)"))


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
        "base": 0,
        "total_steps": None,
        "logs": [],
        "progress": None,
        "progress_file": None,
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
    assert file_sizes(tmp_path / "step.7.pt") == {".": 5}


def test_what_lies_beyond_the_base_is_moved_away(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10, whole=False)
    (said,) = rule(tmp_path).prepare(base=5, attempt=2)
    assert "state.json is missing" in said
    assert (tmp_path / ".quarantine" / "checkpoint-10-0002" / "weights").exists()
    assert [iteration for iteration, _ in rule(tmp_path).every()] == [5]
    assert file_sizes(tmp_path / "checkpoint-5") == {"state.json": 2, "weights": 5}


def test_steps_by_the_log_or_by_the_client(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of before: step 9\nstep 1 loss 2.5\nstep 1 loss 2.5\nstep 2 loss nan\nstep two\n")
    by_log = program(tmp_path, logs=[(str(log), 18)], progress=PROGRESS)
    said = [(1, {"loss": 2.5}), (1, {"loss": 2.5}), (2, {})]
    assert [(step.iteration, dict(step.metrics)) for step in by_log.steps()] == said
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


def iterations(found: CommandProgram) -> list[int]:
    return [step.iteration for step in found.steps()]


def test_a_line_that_is_cut_in_two_is_read_when_it_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step 1 loss 2.5\nstep 1")
    seen = program(tmp_path, logs=[(str(log), 0)], progress=PROGRESS)
    assert iterations(seen) == [1]
    with log.open("a") as file:
        file.write("2 loss 1.2")
    assert iterations(seen) == []
    with log.open("a") as file:
        file.write("5\n")
    (step,) = seen.steps()
    assert (step.iteration, dict(step.metrics)) == (12, {"loss": 1.25})


def test_a_progress_bar_that_never_ends_its_line_tells_of_its_steps(tmp_path: Path) -> None:
    log = tmp_path / "log"
    bars = [f"\r{n}%|\u2588\u2588 | {n}/100 [00:0{n}<01:00,  1.00it/s]" for n in range(1, 6)]
    log.write_text("".join(bars), encoding="utf-8")
    bar = LogPattern(re.compile(r"\| (?P<iteration>\d+)/100 \["))
    seen = program(tmp_path, logs=[(str(log), 0)], progress=bar)
    assert iterations(seen) == [1, 2, 3, 4]  # the newest may be half a line
    with log.open("a", encoding="utf-8") as file:
        file.write(bars[0].replace("1/", "6/"))
    assert iterations(seen) == [5]


def test_what_is_no_text_hides_no_step(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff\xfe\x00step 1 loss 2\n\xc3(step 2 loss 1\n")
    assert iterations(program(tmp_path, logs=[(str(log), 0)], progress=PROGRESS)) == [1, 2]


@pytest.mark.slow
def test_a_pattern_that_would_take_for_ever_on_a_line_passes_over_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    slow = f"step {'a' * 60}!\n"
    log.write_text("step 1 a\n" + slow + "step 2 a\n" + slow * 1000)
    pattern = LogPattern(re.compile(r"step (?P<iteration>\d+)|step (a+)+$"))
    seen = program(tmp_path, logs=[(str(log), 0)], progress=pattern)
    assert iterations(seen) == [1, 2]
    assert len(caplog.records) == 1
    assert "takes too long on a line of the log" in caplog.text
    with log.open("a") as file:
        file.write("step 3 a\n")
    assert iterations(seen) == [3]


def test_steps_of_a_file_of_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines: list[object] = [
        {"step": 1, "loss": 2.5, "eta": "soon", "lr": None, "nan": float("nan"), "ok": True},
        {"global_step": 2, "loss": 2.0, "epoch": 0.5},
        {"iteration": float("inf")},
        {"iteration": 10**400},
        {"loss": 3.0},
        [],
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "[" * 50_000 + "\n")
    found = program(tmp_path, progress_file=(file, 0)).steps()
    assert [(step.iteration, dict(step.metrics)) for step in found] == [
        (1, {"loss": 2.5}),
        (2, {"loss": 2.0, "epoch": 0.5}),
    ]
    assert program(tmp_path, progress_file=(file, file.stat().st_size)).steps() == []


def test_a_file_that_holds_half_of_its_json_makes_nothing_whole(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    for text in ("", '{"step": ', "[" * 100_000):
        (path / "state.json").write_text(text)
        assert rule(tmp_path).whole() == []
        assert rule(tmp_path).under_way() == 10
    (path / "state.json").write_text("[]\n")
    assert [found.iteration for found in rule(tmp_path).whole()] == [10]
    assert rule(tmp_path).under_way() is None


def tracked(folder: Path) -> CheckpointRule:
    return CheckpointRule(folder=folder, pattern="checkpoint-{iteration}", whole_when=None, tracker="latest")


@pytest.mark.parametrize("torn", ["", "garbage", "\u00ff", "/", "checkpoint-", "-1", "1e400", "\u0661"])
def test_a_tracker_that_is_torn_names_the_base_again(tmp_path: Path, torn: str) -> None:
    save(tmp_path, 5)
    (tmp_path / "latest").write_text(torn)
    assert tracked(tmp_path).whole() == []
    tracked(tmp_path).prepare(base=5, attempt=2)
    assert [found.iteration for found in tracked(tmp_path).whole()] == [5]


@pytest.mark.parametrize(
    ("former", "kept"),
    [
        ("step-00000060.pt\n", "step-00000040.pt"),
        ("out/step-00000060.pt", "out/step-00000040.pt"),
        ("00000060\n", "00000040"),
        ("60\n", "40"),
        ("", "step-00000040.pt"),
        ("release", "40"),
    ],
)
def test_a_tracker_keeps_the_name_that_is_found_on_disk(tmp_path: Path, former: str, kept: str) -> None:
    """A program that does not find what its tracker names starts from scratch, over its old files."""
    for iteration in (20, 40, 60):
        (tmp_path / f"step-{iteration:08d}.pt").write_text("weights")
    (tmp_path / "latest").write_text(former)
    rule = CheckpointRule(folder=tmp_path, pattern="step-{iteration}.pt", whole_when=None, tracker="latest")
    rule.prepare(base=40, attempt=2)
    assert (tmp_path / "latest").read_text().strip() == kept
    assert rule.tracked() == 40


def test_a_link_keeps_the_name_that_is_found_on_disk(tmp_path: Path) -> None:
    for iteration in (40, 60):
        (tmp_path / f"step-{iteration:08d}.pt").write_text("weights")
    (tmp_path / "latest").symlink_to("step-00000060.pt")
    rule = CheckpointRule(folder=tmp_path, pattern="step-{iteration}.pt", whole_when=None, tracker="latest")
    rule.prepare(base=40, attempt=2)
    assert (tmp_path / "latest").resolve(strict=True) == tmp_path / "step-00000040.pt"


def test_a_tracker_names_nothing_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("checkpoint-60")
    with pytest.raises(RunDirError, match="no checkpoint of iteration 40"):
        tracked(tmp_path).prepare(base=40, attempt=2)
    assert (tmp_path / "latest").read_text() == "checkpoint-60"


def test_a_file_of_progress_that_is_written_anew_on_resume_begins_with_old_lines(tmp_path: Path) -> None:
    """As a program does that cuts off what lies beyond its checkpoint: none is this attempt's."""
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 12)))
    assert iterations(program(tmp_path, base=10, progress_file=(file, 1000))) == [10, 11]
    assert iterations(program(tmp_path, base=20, progress_file=(file, 1000))) == list(range(1, 12))


def test_a_good_exit_code_is_an_end_on_purpose(tmp_path: Path) -> None:
    done = ProgramEnding(outcome="done", words="the program ended by itself, with exit code 0")
    assert program(tmp_path, exit_code_suffices=True).ending(0) == done
    early = program(tmp_path).ending(0)
    assert early is not None
    assert (early.outcome, early.words) == ("fatal", ENDED_EARLY)
    (tmp_path / "client").mkdir(exist_ok=True)
    (tmp_path / "client" / "steps.jsonl").write_text('{"iteration": 3}\n')
    spoke = program(tmp_path)
    spoke.steps()
    assert spoke.ending(0) == done
    left = program(tmp_path, asked_to_leave=lambda: True).ending(0)
    assert left is not None
    assert left.outcome == "left"
    assert program(tmp_path).ending(1) is None
    assert program(tmp_path).ending(None) is None


CRASH = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nValueError: bad row\n'


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        (CRASH, None),
        (CRASH + "step 1\n" * 9, "done"),
        (f"Exception ignored in: <f>\n{CRASH}", "done"),
        (f"Exception in thread Thread-1 (upload):\n{CRASH}", "done"),
        ("WARNING ConnectionError: upload failed\nConnectionError: upload failed\n", "done"),
        ("bash: line 3: 71 Killed   python train.py\n", None),
        ("bye\n", "done"),
    ],
)
def test_a_program_that_crashed_into_a_pipe_is_not_done(tmp_path: Path, last: str, outcome: str | None) -> None:
    save(tmp_path / "checkpoints", 5)
    (tmp_path / "job.out").write_text(f"step 1\n{last}")
    made = program(tmp_path, rule=rule(tmp_path / "checkpoints"), logs=[(str(tmp_path / "job.out"), 0)])
    ending = made.ending(0)
    assert (None if ending is None else ending.outcome) == outcome


def test_it_is_asked_for_a_checkpoint(tmp_path: Path) -> None:
    asked: list[int] = []
    program(tmp_path, save=lambda: asked.append(1)).ask_to_save()
    assert (tmp_path / "client" / "save").exists()
    assert asked == [1]


def test_a_program_that_ends_before_its_last_iteration_is_not_done(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 5)
    early = program(tmp_path, rule=rule(tmp_path / "checkpoints"), total_steps=10).ending(0)
    assert early is not None
    assert (early.outcome, early.words) == ("left", f"{ENDED_BY_ITSELF}, before iteration 10")
    save(tmp_path / "checkpoints", 10)
    done = program(tmp_path, rule=rule(tmp_path / "checkpoints"), total_steps=10).ending(0)
    assert done is not None
    assert done.outcome == "done"


@pytest.mark.parametrize("exit_code", [0, 143])
def test_a_program_that_is_asked_to_leave_at_its_last_iteration_is_done(tmp_path: Path, exit_code: int) -> None:
    save(tmp_path / "checkpoints", 10)
    checkpoints = rule(tmp_path / "checkpoints")
    ending = program(tmp_path, rule=checkpoints, total_steps=10, asked_to_leave=lambda: True).ending(exit_code)
    assert ending == ProgramEnding(outcome="done", words="the last iteration, 10, is saved")


@pytest.mark.parametrize(
    ("asked", "base", "said", "outcome"),
    [
        (True, 5, 10, "left"),  # as torchrun, and most that a signal ends
        (False, 5, 10, None),  # nobody asked: a crash
        (True, 5, 11, None),  # what it said last is not saved
        (True, 10, 10, None),  # it saved nothing in this attempt
    ],
)
def test_another_exit_code_is_one_on_purpose_where_it_was_asked_and_has_saved(
    tmp_path: Path, asked: bool, base: int, said: int, outcome: str | None
) -> None:
    save(tmp_path / "checkpoints", 10)
    (tmp_path / "log").write_text(f"step {said} loss 1\n")
    found = program(
        tmp_path,
        rule=rule(tmp_path / "checkpoints"),
        base=base,
        logs=[(str(tmp_path / "log"), 0)],
        progress=PROGRESS,
        asked_to_leave=lambda: asked,
    )
    found.steps()
    ending = found.ending(143)
    assert (None if ending is None else ending.outcome) == outcome


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


@pytest.mark.parametrize(
    ("pattern", "names", "found"),
    [
        ("epoch=*-step={iteration}.ckpt", ["epoch=0-step=20.ckpt", "epoch=1-step=40.ckpt", "last.ckpt"], [20, 40]),
        ("epoch={epoch}-step={iteration}.ckpt", ["epoch=0-step=20.ckpt", "epoch=0-step=20-v1.ckpt"], [20]),
        ("version_*/checkpoints/step={iteration}", ["version_1/checkpoints/step=20", "version_0/x/step=9"], [20]),
        ("*{iteration}.pt", [".quarantine/x-7.pt", ".x-7.pt", "x-8.pt"], [8]),
        ("step.{iteration}", ["step.00000020", "stepx21"], [20]),
    ],
)
def test_a_pattern_has_wildcards_and_folders(tmp_path: Path, pattern: str, names: list[str], found: list[int]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("12345")
    whole = CheckpointRule(folder=tmp_path, pattern=pattern, whole_when=None).whole()
    assert [checkpoint.iteration for checkpoint in whole] == found
    assert all(str(Path(checkpoint.path).relative_to(tmp_path)) in names for checkpoint in whole)


THEIRS: dict[str, tuple[dict[str, str | None], list[str], dict[str, str]]] = {
    "NeMo": (
        {"pattern": "*-step={iteration}-consumed_samples=*", "unfinished_when": "{name}-unfinished"},
        [
            "gpt--loss=2.31-epoch=0-step=20-consumed_samples=160.0/weights/.metadata",
            "gpt--loss=2.28-epoch=0-step=40-consumed_samples=320.0/weights/.metadata",
            "gpt--loss=2.20-epoch=0-step=60-consumed_samples=480.0/weights/__0_0.distcp",
            "gpt--loss=2.20-epoch=0-step=60-consumed_samples=480.0-unfinished",
        ],
        {},
    ),
    "Composer": (
        {"pattern": "ep*-ba{iteration}-rank0.pt", "tracker": "latest-rank0.pt"},
        ["ep0-ba20-rank0.pt", "ep1-ba40-rank0.pt", "ep1-ba60-rank0.pt"],
        {"latest-rank0.pt": "ep1-ba40-rank0.pt"},
    ),
    "GPT-NeoX": (
        {"pattern": "global_step{iteration}", "tracker": "latest"},
        [f"global_step{step}/mp_rank_00_model_states.pt" for step in (20, 40, 60)],
        {"latest": "global_step40"},
    ),
}
"""Rule, files and tracker of programs; the checkpoints of 20 and 40 are whole, that of 60 is not."""


@pytest.mark.parametrize("name", THEIRS)
def test_checkpoints_as_other_programs_write_them(tmp_path: Path, name: str) -> None:
    settings, files, trackers = THEIRS[name]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("12345")
    for tracker, newest in trackers.items():
        if name == "Composer":
            (tmp_path / tracker).symlink_to(newest)
        else:
            (tmp_path / tracker).write_text(newest)
    given: dict[str, Any] = {"whole_when": None} | settings
    theirs = CheckpointRule(folder=tmp_path, **given)
    assert [found.iteration for found in theirs.whole()] == [20, 40]
    theirs.prepare(base=20, attempt=2)
    assert [found.iteration for found in theirs.whole()] == [20]
    kept = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert kept == {files[0].partition("/")[0], *trackers}
    for tracker in trackers:
        path = tmp_path / tracker
        assert (os.readlink(path) if path.is_symlink() else path.read_text()) == files[0].partition("/")[0]


def test_of_two_names_of_an_iteration_the_last_changed_counts(tmp_path: Path) -> None:
    for name, when in (("epoch=1-step=20", 100), ("epoch=0-step=20", 200)):
        (tmp_path / name).write_text("12345")
        os.utime(tmp_path / name, (when, when))
    (found,) = CheckpointRule(folder=tmp_path, pattern="epoch=*-step={iteration}", whole_when=None).whole()
    assert Path(found.path).name == "epoch=0-step=20"


def test_a_file_beside_a_checkpoint_marks_it_as_whole_or_unfinished(tmp_path: Path) -> None:
    for name in ("step=20.ckpt", "step=40.ckpt", "step=20.ckpt.done", "step=40-unfinished", "step=60.ckpt"):
        (tmp_path / name).write_text("12345")
    done = CheckpointRule(folder=tmp_path, pattern="step={iteration}.ckpt", whole_when="{name}.done")
    assert [found.iteration for found in done.whole()] == [20]
    mark = {"whole_when": None, "unfinished_when": "{stem}-unfinished"}
    absent = CheckpointRule(folder=tmp_path, pattern="step={iteration}.ckpt", **mark)
    assert [found.iteration for found in absent.whole()] == [20, 60]
    said = absent.prepare(base=20, attempt=2)
    assert "step=40.ckpt ({stem}-unfinished is there) moved" in said[0]
    assert {path.name for path in tmp_path.glob("step*")} == {"step=20.ckpt", "step=20.ckpt.done"}


def test_a_mark_goes_with_its_checkpoint(tmp_path: Path) -> None:
    """Else the next checkpoint of that name counted as whole while it is written."""
    for name in ("step=20.ckpt", "step=20.ckpt.done"):
        (tmp_path / name).write_text("12345")
    done = CheckpointRule(folder=tmp_path, pattern="step={iteration}.ckpt", whole_when="{name}.done")
    done.prepare(base=0, attempt=2)
    (tmp_path / "step=20.ckpt").write_text("1")
    assert done.whole() == []


@pytest.mark.parametrize(
    ("pattern", "line", "iteration", "loss"),
    [
        (
            r"step:\s+(?P<iteration>\d+)\s+loss:\s+(?P<loss>\S+)",
            "\x1b[31mstep: 12  \x1b[32mloss:  2.3100\x1b[39m",
            12,
            2.31,
        ),
        (r"step:\s+(?P<iteration>[\d,]+)\s+loss:\s+(?P<loss>\S+)", "step: 1,200  loss:  2.31,", 1200, 2.31),
        (r"step (?P<iteration>\d+) loss (?P<loss>\S+)", "step 1,234,200 loss 2.31;", 1234200, 2.31),
        (r"loss (?P<loss>[\d.]+) at (?P<iteration>\d+)", "loss 2.31 at 1_200", 1200, 2.31),
        (r"(?P<iteration>\d+),(?P<loss>\S+)", "12,345", 12, 345.0),
    ],
)
def test_colours_and_separators_hide_no_number(pattern: str, line: str, iteration: int, loss: float) -> None:
    (step,) = LogPattern(re.compile(pattern)).steps([line])
    assert (step.iteration, dict(step.metrics)) == (iteration, {"loss": loss})


def test_what_matches_nothing_is_said_and_what_prints_lives(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"iteration {n} of 100\n" for n in range(70)))
    for name in ("a.pt", "b.pt", "latest"):
        (tmp_path / name).write_text("b.pt")
    files = CheckpointRule(folder=tmp_path, pattern="step-{iteration}.pt", whole_when=None, tracker="latest")
    seen = program(tmp_path, logs=[(str(log), 0)], progress=PROGRESS, rule=files)
    assert seen.unmatched() == [
        f"command.checkpoint.pattern step-{{iteration}}.pt matched none of 3 entries of {tmp_path}: a.pt, b.pt, log"
    ]
    assert iterations(seen) == []
    assert seen.is_printing()
    assert seen.unmatched()[-1] == "command.progress matched none of 64 lines or more"
    ending = seen.ending(0)
    assert ending is not None
    assert ending.words.startswith(ENDED_EARLY)
    assert "matched none of 64 lines" in ending.words
    assert iterations(seen) == []
    assert not seen.is_printing()
    with log.open("a") as file:
        file.write("iteration 3 of 100\n[relayrun 2026-01-01T00:00:00] a line of the chain\n")
    assert iterations(seen) == []
    assert not seen.is_printing(), "neither an old line nor one of the chain"
    for name in ("step-5.pt", "step-6.pt"):
        (tmp_path / name).write_text("5")
    assert seen.unmatched()[0] == "command.checkpoint.tracker latest holds 'b.pt', which names no checkpoint"
    with log.open("a") as file:
        file.write("step 3 loss 1\nanother line\n")
    assert iterations(seen) == [3]
    assert not seen.is_printing()
    assert seen.unmatched() == ["command.checkpoint.tracker latest holds 'b.pt', which names no checkpoint"]


def test_a_program_without_progress_lives_while_it_prints(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("starting\n" * 50)
    seen = program(tmp_path, logs=[(str(log), 0)])
    assert iterations(seen) == []
    assert seen.is_printing()
    assert seen.unmatched() == [
        "no command.progress is set, and relayrun.client reports no iteration in 32 lines or more"
    ]
    lost = program(tmp_path, logs=[(str(log), 0)], progress_file=(tmp_path / "steps", 0))
    lost.steps()
    assert lost.unmatched() == [f"command.progress_file {tmp_path / 'steps'} is not there"]


def test_a_mark_that_no_checkpoint_has_is_said(tmp_path: Path) -> None:
    save(tmp_path, 5, whole=False)
    save(tmp_path, 10, whole=False)
    assert program(tmp_path, rule=rule(tmp_path)).unmatched() == [
        "command.checkpoint.whole_when state.json: none of 2 checkpoints is complete by it"
    ]
