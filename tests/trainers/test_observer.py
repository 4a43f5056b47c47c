"""The records that are written for a program that knows nothing of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from relayrun.files import read_lines
from relayrun.rundir import triggers
from relayrun.rundir.attempt import Attempt
from relayrun.rundir.records import AttemptStart, Heartbeat, Outcome
from relayrun.rundir.run import Run
from relayrun.trainers.base import Ending, FoundCheckpoint, ObservedStep
from relayrun.trainers.observer import Observer
from tests.history import began


class Script:
    """A program that has said and saved what a test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[ObservedStep] = []
        self.saved: list[int] = []
        self.under_way: int | None = None
        self.end: Ending | None = None
        self.asked = 0
        self.refuses: str | None = None
        self._given = 0

    def steps(self) -> Sequence[ObservedStep]:
        new, self._given = self.said[self._given :], len(self.said)
        return new

    def checkpoints(self) -> Sequence[FoundCheckpoint]:
        return [FoundCheckpoint(iteration=number, path=str(self._path(number))) for number in self.saved]

    def saving(self) -> int | None:
        return self.under_way

    def ask_to_save(self) -> str | None:
        self.asked += 1
        return self.refuses

    def ending(self, exit_code: int | None) -> Ending | None:
        return self.end

    def step(self, *iterations: int) -> None:
        self.said += [
            ObservedStep(iteration=n, seconds=0.5, consumed_samples=4 * n, metrics={"loss": 10.0 - n})
            for n in iterations
        ]

    def save(self, iteration: int) -> None:
        self._path(iteration).mkdir(parents=True)
        (self._path(iteration) / "weights").write_text("12345")
        self.saved.append(iteration)

    def again(self) -> Script:
        """The same program, for another process that reads it from its beginning."""
        other = Script(self.folder)
        other.said, other.saved, other.under_way, other.end = self.said, self.saved, self.under_way, self.end
        return other

    def _path(self, iteration: int) -> Path:
        return self.folder / f"iter_{iteration:07}"


class Scene:
    def __init__(self, run: Run) -> None:
        self.run = run
        triggers.create_folder(run)
        began(run, 1, base=0)
        self.attempt: Attempt = run.attempt(1)
        self.script = Script(run.checkpoints)
        self.left = 0
        self.observer = self.observe()

    def observe(self, script: Script | None = None, **change: object) -> Observer:
        begin = self.attempt.read_begin()
        assert begin is not None
        if change:
            begin = AttemptStart.of({**begin.__dict__, **change})
        return Observer(self.run, self.attempt, begin, script or self.script, leave=self._leave)

    def _leave(self) -> None:
        self.left += 1

    def lines(self) -> list[int]:
        return [line["iteration"] for line in read_lines(self.attempt.metrics)]

    def beat(self) -> Heartbeat:
        found = Heartbeat.read(self.attempt.heartbeats / "program.json")
        assert found is not None
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(Run(tmp_path / "run"))


def test_steps_and_checkpoints_become_the_records_of_the_native_trainer(scene: Scene) -> None:
    scene.observer.look()
    assert scene.beat().phase == "start"
    scene.script.step(1, 2)
    scene.observer.look()
    assert scene.beat().phase == "step"
    assert list(read_lines(scene.attempt.metrics))[1] | {"time": 0} == {
        "iteration": 2,
        "loss": 8.0,
        "time": 0,
        "step_seconds": 0.5,
        "consumed_samples": 8,
    }
    scene.script.under_way = 2
    scene.observer.look()
    assert (scene.beat().phase, scene.beat().iteration) == ("save", 2)
    scene.script.under_way = None
    scene.script.save(2)
    scene.observer.look()
    (commit,) = scene.attempt.read_commits()
    assert (commit.iteration, commit.consumed_samples, commit.files, commit.checksum) == (2, 8, {"weights": 5}, None)
    assert commit.seconds > 0
    assert scene.beat().save_p95 == commit.seconds


def test_a_program_that_stands_still_has_no_heartbeat(scene: Scene) -> None:
    scene.script.step(1)
    scene.observer.look()
    before = scene.beat()
    scene.observer.look()
    assert scene.beat() == before


@pytest.mark.parametrize("kills", [1, 2, 3])
def test_nothing_is_recorded_twice_or_left_out_whenever_the_observer_is_killed(scene: Scene, kills: int) -> None:
    for iteration in range(1, 7):
        scene.script.step(iteration)
        if iteration % 2 == 0:
            scene.script.save(iteration)
        if iteration % kills == 0:
            scene.observer = scene.observe(scene.script.again())
        scene.observer.look()
    scene.observe(scene.script.again()).conclude(0)
    assert scene.lines() == [1, 2, 3, 4, 5, 6]
    assert [commit.iteration for commit in scene.attempt.read_commits()] == [2, 4, 6]


def outcome(scene: Scene) -> tuple[str, str] | None:
    found = Outcome.read(scene.attempt.outcome)
    return None if found is None else (found.outcome, found.reason)


def test_the_end_of_a_program_that_obeyed(scene: Scene) -> None:
    scene.script.step(1, 2)
    scene.script.save(2)
    scene.script.end = Ending(outcome="left", words="SIGUSR2")
    scene.observer.conclude(0)
    assert outcome(scene) == ("saved", "SIGUSR2")


def test_why_the_batch_script_asked_stands_in_the_outcome(scene: Scene) -> None:
    scene.attempt.stop.write_text("SIGTERM\n")
    scene.script.end = Ending(outcome="left", words="SIGUSR2")
    scene.observer.conclude(0)
    assert outcome(scene) == ("saved", "SIGTERM")


def test_a_program_that_left_without_a_whole_checkpoint_has_no_outcome(scene: Scene) -> None:
    scene.script.step(1, 2, 3)
    scene.script.save(2)
    scene.script.end = Ending(outcome="left", words="SIGUSR2")
    scene.observer.conclude(0)
    assert outcome(scene) is None
    assert [commit.iteration for commit in scene.attempt.read_commits()] == [2]


@pytest.mark.parametrize("end", ["done", "fatal"])
def test_the_end_of_a_program_that_goes_by_itself(scene: Scene, end: str) -> None:
    scene.script.end = Ending(outcome=end, words="so it is")  # type: ignore[arg-type]
    scene.observer.conclude(0)
    assert outcome(scene) == (end, "so it is")
    scene.script.end = Ending(outcome="left", words="another")
    scene.observer.conclude(0)
    assert outcome(scene) == (end, "so it is")  # what is on record holds


def test_a_crash_leaves_no_outcome(scene: Scene) -> None:
    scene.script.step(1)
    scene.observer.conclude(0)
    assert outcome(scene) is None
    assert scene.lines() == [1]


def test_the_exit_trigger_asks_once_and_is_answered_behind_the_outcome(scene: Scene) -> None:
    triggers.touch(scene.run, "exit")
    scene.observer.look()
    scene.observer.look()
    assert scene.left == 1
    assert triggers.look(scene.run, "exit") is not None
    scene.script.step(1)
    scene.script.save(1)
    scene.script.end = Ending(outcome="left", words="SIGUSR2")
    scene.observer.conclude(0)
    found = outcome(scene)
    assert found is not None
    assert found[0] == "exit"
    assert triggers.look(scene.run, "exit") is None


def test_the_save_trigger_is_answered_when_a_checkpoint_has_come(scene: Scene) -> None:
    triggers.touch(scene.run, "save")
    scene.observer.look()
    scene.observer.look()
    assert scene.script.asked == 1
    assert triggers.look(scene.run, "save") is not None
    scene.script.step(1)
    scene.script.save(1)
    scene.observer.look()
    assert triggers.look(scene.run, "save") is None
    assert "saved iteration 1" in (scene.run.triggers / "save.done").read_text()


def test_a_program_that_cannot_save_says_so_in_the_answer(scene: Scene) -> None:
    scene.script.refuses = "it has no ears"
    triggers.touch(scene.run, "save")
    scene.observer.look()
    assert "refused: it has no ears" in (scene.run.triggers / "save.done").read_text()
    assert triggers.look(scene.run, "save") is None


@pytest.mark.parametrize(("left", "asked"), [(100.0, 0), (5.0, 1)])
def test_it_is_asked_to_leave_before_the_time_limit(scene: Scene, left: float, asked: int) -> None:
    observer = scene.observe(job_end_time=time.time() + left, lead=30.0)
    observer.look()
    assert scene.left == asked


def test_the_lead_follows_what_steps_and_saves_take(scene: Scene) -> None:
    """Two steps of 40 s, 1.5 saves and a margin of 10 s are more than the 30 s with which it began."""
    observer = scene.observe(job_end_time=time.time() + 80, lead=30.0, lead_floor=1.0, lead_ceiling=1000.0)
    observer.look()
    assert scene.left == 0
    scene.script.said.append(ObservedStep(iteration=1, seconds=40.0))
    scene.script.under_way = 1
    observer.look()
    scene.script.under_way = None
    scene.script.save(1)
    observer.look()
    assert scene.left == 1
