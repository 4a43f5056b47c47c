"""What the settings of a user's program make of an attempt."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from signal import Signals

import pytest

from relayrun.config.sections.command import CommandSection
from relayrun.config.sections.dataclass_section import read_section
from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import BEGINNING, ResumePoint, resume_point
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.base import AttemptObserver
from relayrun.control.trainers.command import CommandTrainer
from relayrun.files import read_json_lines
from tests.history import began


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    triggers.create_trigger_folder(run)
    run.checkpoints.mkdir()
    return run


def trainer(run: Run, /, **settings: object) -> CommandTrainer:
    """A trainer with these settings, those of its checkpoints among them."""
    rule = {
        name: settings.pop(name) for name in [*settings] if name in ("pattern", "whole_when", "tracker", "keep_last")
    }
    section = read_section(CommandSection, {"run": ["train"], "checkpoint": rule, **settings}, "command")
    return CommandTrainer(run, section, total_steps=None)


def follow(run: Run, trainer: CommandTrainer, number: int = 1, signals: list[Signals] | None = None) -> AttemptObserver:
    begin = run.attempt(number).read_begin()
    assert begin is not None
    send: Callable[[Signals], None] = (signals if signals is not None else []).append
    observer = trainer.follow(begin, signal_ranks=send)
    assert observer is not None
    return observer


def save(run: Run, iteration: int) -> Path:
    path = run.checkpoints / f"step-{iteration}"
    path.mkdir()
    (path / "weights").write_text("12345")
    return path


def test_its_command_says_where_to_go_on(run: Run) -> None:
    made = trainer(
        run, run=["train", "--out={checkpoints}", "{other}", "{iteration}"], resume=["--from", "{checkpoint}"]
    )
    first = began(run, 1)
    assert made.command(first) == ["train", f"--out={run.checkpoints}", "{other}", "0"]
    second = began(run, 2, base=7)
    assert made.command(second)[3:] == ["7", "--from", str(run.checkpoint(7))]


def test_all_attempts_are_one_run_of_wandb(run: Run) -> None:
    environments = [trainer(run).environment(began(run, number, job_name="p-r-0123")) for number in (1, 2)]
    assert {environment["WANDB_RESUME"] for environment in environments} == {"allow"}
    assert len({environment["WANDB_RUN_ID"] for environment in environments}) == 1


def test_a_file_that_asks_to_leave_is_there_as_soon_as_anybody_asks(run: Run) -> None:
    made = trainer(run, leave_file="{checkpoints}/STOP", leave_signal=None)
    stop = run.checkpoints / "STOP"
    for number in (1, 2):  # what asked the first attempt does not ask the second
        began(run, number)
        made.prepare(BEGINNING, attempt=number)
        assert not stop.exists()
        run.attempt(number).stop.write_text("SIGUSR2\n")
        assert stop.exists()
    stop.unlink()  # by the program
    assert run.attempt(2).stop.exists()


def test_a_file_and_a_signal_ask_for_a_checkpoint(run: Run) -> None:
    made = trainer(run, save_file="ask/SAVE", save_signal="SIGUSR1", pattern="step-{iteration}")
    (run.path / "ask").mkdir()
    (run.path / "ask/SAVE").touch()  # of an attempt that was killed before it heard
    began(run, 1)
    made.prepare(BEGINNING, attempt=1)
    assert not (run.path / "ask/SAVE").exists()
    signals: list[Signals] = []
    observer = follow(run, made, signals=signals)
    observer.look()
    assert not (run.path / "ask/SAVE").exists()
    triggers.touch_trigger(run, "save")
    observer.look()
    assert (run.path / "ask/SAVE").exists()
    assert signals == [Signals.SIGUSR1]


def test_a_file_of_progress_is_read_from_where_the_attempt_began(run: Run) -> None:
    made = trainer(run, progress_file="metrics.jsonl")
    file = run.path / "metrics.jsonl"
    file.write_text('{"step": 9, "loss": 1}\n')  # of an attempt that was killed, and is repeated
    began(run, 1)
    made.prepare(BEGINNING, attempt=1)
    observer = follow(run, made)
    observer.look()
    with file.open("a") as more:
        more.write('{"step": 1, "loss": 3}\n')
    observer.look()
    follow(run, made).look()  # by a watch that starts again
    assert [(line["iteration"], line["loss"]) for line in read_json_lines(run.attempt(1).metrics)] == [(1, 3.0)]


def test_it_goes_on_from_an_older_one_where_the_program_removed_its_newest(run: Run) -> None:
    made = trainer(run, pattern="step-{iteration}")
    began(run, 1)
    observer = follow(run, made)
    for iteration in (5, 10):
        save(run, iteration)
        observer.look()
        observer.look()
    assert resume_point(run).iteration == 10
    shutil.rmtree(run.checkpoints / "step-10")
    base = resume_point(run)
    assert base == ResumePoint(iteration=5, path=str(run.checkpoints / "step-5"))
    began(run, 2, base=5, base_path=base.path)
    assert made.prepare(base, attempt=2) == []
    assert made.environment(run.attempt(2).read_begin())["RELAYRUN_CHECKPOINT"] == base.path  # type: ignore[arg-type]


def test_another_runs_checkpoint_leaves_nothing_of_this_run_to_go_on_from(run: Run, tmp_path: Path) -> None:
    made = trainer(run, pattern="step-{iteration}")
    save(run, 3)
    began(run, 1)
    other = ResumePoint(iteration=100, path=str(tmp_path / "other/step-100"))
    (said,) = made.prepare(other, attempt=1)
    assert "step-3 (no attempt has it on record)" in said
