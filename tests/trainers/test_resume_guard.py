"""Checkpoints are kept from a program that was to go on from them, until it is known that it did."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import ResumePoint
from relayrun.control.rundir.records import AttemptOutcome
from relayrun.control.rundir.run import Run
from relayrun.control.trainers import checkpoint_cleanup
from relayrun.control.trainers.base import AttemptObserver
from relayrun.control.trainers.checkpoint_cleanup import ResumeGuard
from tests.history import began
from tests.trainers.test_command_trainer import follow, trainer

FORMS = ("step-{}.pt", "step-{}/weights")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(tmp_path: Path, form: str) -> Run:
    run = Run(tmp_path / "run")
    triggers.create_trigger_folder(run)
    for number in (20, 40):
        write(run, form, number)
    return run


def write(run: Run, form: str, number: int, text: str = "first life") -> None:
    """As programs do it that write under another name first."""
    path = run.checkpoints / form.format(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "new").write_text(text)
    os.rename(path.parent / "new", path)


def goes_on(run: Run, form: str, *, said: Sequence[str] = (), **settings: object) -> AttemptObserver:
    """The observer of an attempt that is to go on from 40; `said`: lines of its job's log."""
    base = str(run.checkpoints / form.format(40).partition("/")[0])
    made = trainer(run, pattern=form.format("{iteration}").partition("/")[0], **settings)
    began(run, 1, base=40, base_path=base)
    done = made.prepare(ResumePoint(iteration=40, path=base), attempt=1)
    assert done == [line.format(base=base) for line in said]
    return follow(run, made)


def texts(run: Run, form: str) -> list[str]:
    return [(run.checkpoints / form.format(number)).read_text() for number in (20, 40)]


def say(run: Run, *iterations: int) -> None:
    with (run.attempt(1).client / "steps.jsonl").open("a") as file:
        file.writelines(f'{{"iteration": {number}}}\n' for number in iterations)


def test_what_a_program_that_starts_over_wrote_is_taken_away_again(run: Run, form: str) -> None:
    observer = goes_on(run, form)
    assert not (run.checkpoints / form.format(20)).stat().st_mode & 0o200, "nobody but root writes into it"
    say(run, 1, 20)
    write(run, form, 20, "second life")
    (run.checkpoints / form.format(40)).unlink()
    observer.look()
    say(run, 21)
    observer.look()
    observer.conclude(137)
    outcome = AttemptOutcome.read(run.attempt(1).outcome)
    assert outcome is not None
    assert "iteration 1 first, and was to go on from iteration 40" in outcome.reason
    assert texts(run, form) == ["first life", "first life"]
    assert f"{form.format(20).partition('/')[0]}-0001" in os.listdir(run.checkpoints / ".quarantine")
    assert (run.checkpoints / form.format(20)).stat().st_mode & 0o200


def test_a_program_that_says_nothing_is_known_by_what_it_wrote_anew(run: Run, form: str) -> None:
    observer = goes_on(run, form)
    write(run, form, 20, "second life")
    write(run, form, 60)
    observer.look()
    observer.conclude(137)
    outcome = AttemptOutcome.read(run.attempt(1).outcome)
    assert outcome is not None
    assert f"wrote {form.format(20).partition('/')[0]} anew, and was to go on" in outcome.reason
    assert texts(run, form) == ["first life", "first life"]
    assert run.attempt(1).read_commits() == []


@pytest.mark.parametrize("by", ["step", "checkpoint"])
def test_a_program_that_resumed_may_remove_its_old_checkpoints(run: Run, form: str, by: str) -> None:
    observer = goes_on(run, form)
    if by == "step":
        say(run, 41)
    else:
        write(run, form, 60)
    observer.look()
    assert (run.checkpoints / form.format(20)).stat().st_mode & 0o200
    (run.checkpoints / form.format(20)).unlink()
    observer.conclude(0)
    assert not (run.checkpoints / form.format(20)).exists()
    assert not (run.checkpoints / ".kept").exists()


def test_the_next_attempt_puts_back_what_the_one_before_could_not(run: Run, form: str) -> None:
    """The batch script was killed with its watch."""
    goes_on(run, form)
    write(run, form, 40, "second life")
    base = ResumePoint(iteration=40, path=str(run.checkpoints / form.format(40).partition("/")[0]))
    began(run, 2, base=40, base_path=base.path)
    done = trainer(run, pattern=form.format("{iteration}").partition("/")[0]).prepare(base, attempt=2)
    assert "written anew" in done[0]
    assert done[1].endswith("is there again as it was")
    assert texts(run, form) == ["first life", "first life"]


def test_a_file_system_without_links_keeps_nothing_and_says_so_once(
    run: Run, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links")))
    observer = goes_on(
        run, form, said=["not kept from a program that begins anew: {base}: no hard link to its files: no links"]
    )
    assert ResumeGuard(run.checkpoints).replaced() == []
    say(run, 41)
    observer.look()
    assert texts(run, form) == ["first life", "first life"]


def test_checkpoints_beyond_the_limit_of_files_are_named(run: Run, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_cleanup, "KEPT_FILES", 1)
    older = run.checkpoints / form.format(20).partition("/")[0]
    goes_on(run, form, said=[f"not kept from a program that begins anew: {older} and older ones: more than 1 files"])
