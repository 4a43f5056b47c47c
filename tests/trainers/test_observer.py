"""The records that are written for a program that knows nothing of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from relayrun.control.rundir import triggers
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import is_checkpoint_of, resume_point
from relayrun.control.rundir.records import AttemptOutcome, AttemptStart, Heartbeat, StartTimes
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.base import FoundCheckpoint, ObservedStep, ProgramEnding
from relayrun.control.trainers.checkpoint_cleanup import CheckpointRetention
from relayrun.control.trainers.observer import ProgramObserver
from relayrun.files import read_json_lines
from tests.history import began


class Script:
    """A program that has said and saved what a test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[ObservedStep] = []
        self.saved: list[int] = []
        self.under_way: int | None = None
        self.end: ProgramEnding | None = None
        self.asked = 0
        self.refuses: str | None = None
        self.may_change = False
        self.prints = False
        self.fits_nothing: list[str] = []
        self._given = 0

    def steps(self) -> Sequence[ObservedStep]:
        new, self._given = self.said[self._given :], len(self.said)
        return new

    def checkpoints(self) -> Sequence[FoundCheckpoint]:
        return [
            FoundCheckpoint(iteration=number, path=str(self._path(number)), may_change=self.may_change)
            for number in self.saved
        ]

    def saving(self) -> int | None:
        return self.under_way

    def is_printing(self) -> bool:
        return self.prints

    def unmatched(self) -> list[str]:
        return self.fits_nothing

    def ask_to_save(self) -> str | None:
        self.asked += 1
        return self.refuses

    def ending(self, exit_code: int | None) -> ProgramEnding | None:
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
        triggers.create_trigger_folder(run)
        began(run, 1, base=0)
        self.attempt: Attempt = run.attempt(1)
        self.script = Script(run.checkpoints)
        self.left = 0
        self.observer = self.observe()

    def observe(
        self, script: Script | None = None, *, keep_last: int | None = None, **change: object
    ) -> ProgramObserver:
        begin = self.attempt.read_begin()
        assert begin is not None
        if change:
            begin = AttemptStart.of({**begin.__dict__, **change})
        retention = (
            None if keep_last is None else CheckpointRetention(self.run, self.attempt, begin, keep_last=keep_last)
        )
        return ProgramObserver(
            self.run, self.attempt, begin, script or self.script, leave=self._leave, retention=retention
        )

    def _leave(self) -> None:
        self.left += 1

    def lines(self) -> list[int]:
        return [line["iteration"] for line in read_json_lines(self.attempt.metrics)]

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
    assert list(read_json_lines(scene.attempt.metrics))[1] | {"time": 0} == {
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


def test_the_start_is_over_with_the_first_step(scene: Scene) -> None:
    """So the end of the attempt does not say that its time limit was too short to start in."""
    scene.observer.look()
    assert not scene.attempt.started.exists()
    before = time.time()
    scene.script.step(1)
    scene.observer.look()
    started = StartTimes.read(scene.attempt.started)
    assert started is not None
    assert started.loaded >= before
    scene.script.step(2)
    scene.observer.look()
    assert StartTimes.read(scene.attempt.started) == started


def test_a_program_that_stands_still_has_no_heartbeat(scene: Scene) -> None:
    scene.script.step(1)
    scene.observer.look()
    before = scene.beat()
    scene.observer.look()
    assert scene.beat() == before


def test_output_of_unknown_progress_is_a_sign_of_life_and_what_fits_nothing_is_said(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.script.prints, scene.script.fits_nothing = True, ["command.progress matched none of 64 lines or more"]
    scene.observer.look()
    first = scene.beat().time
    time.sleep(0.01)
    scene.observer.look()
    assert scene.beat().time > first
    assert scene.attempt.read_unmatched() == scene.script.fits_nothing
    assert capsys.readouterr().err.count("nothing fits so far: command.progress matched none of 64") == 1
    scene.script.prints, scene.script.fits_nothing = False, []
    last = scene.beat().time
    scene.observer.look()
    assert scene.beat().time == last
    assert scene.attempt.read_unmatched() == []


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
    found = AttemptOutcome.read(scene.attempt.outcome)
    return None if found is None else (found.outcome, found.reason)


def test_the_end_of_a_program_that_obeyed(scene: Scene) -> None:
    scene.script.step(1, 2)
    scene.script.save(2)
    scene.script.end = ProgramEnding(outcome="left", words="SIGUSR2")
    scene.observer.conclude(0)
    assert outcome(scene) == ("saved", "SIGUSR2")


def test_why_the_batch_script_asked_stands_in_the_outcome(scene: Scene) -> None:
    scene.attempt.stop.write_text("SIGTERM\n")
    scene.script.end = ProgramEnding(outcome="left", words="SIGUSR2")
    scene.observer.conclude(0)
    assert outcome(scene) == ("saved", "SIGTERM")


def test_a_program_that_left_without_a_whole_checkpoint_has_no_outcome(scene: Scene) -> None:
    scene.script.step(1, 2, 3)
    scene.script.save(2)
    scene.script.end = ProgramEnding(outcome="left", words="SIGUSR2")
    scene.observer.conclude(0)
    assert outcome(scene) is None
    assert [commit.iteration for commit in scene.attempt.read_commits()] == [2]


@pytest.mark.parametrize("end", ["done", "fatal"])
def test_the_end_of_a_program_that_goes_by_itself(scene: Scene, end: str) -> None:
    scene.script.end = ProgramEnding(outcome=end, words="so it is")  # type: ignore[arg-type]
    scene.observer.conclude(0)
    assert outcome(scene) == (end, "so it is")
    scene.script.end = ProgramEnding(outcome="left", words="another")
    scene.observer.conclude(0)
    assert outcome(scene) == (end, "so it is")  # what is on record holds


def test_a_crash_leaves_no_outcome(scene: Scene) -> None:
    scene.script.step(1)
    scene.observer.conclude(0)
    assert outcome(scene) is None
    assert scene.lines() == [1]


def test_the_exit_trigger_asks_once_and_is_answered_behind_the_outcome(scene: Scene) -> None:
    triggers.touch_trigger(scene.run, "exit")
    scene.observer.look()
    scene.observer.look()
    assert scene.left == 1
    assert triggers.read_trigger(scene.run, "exit") is not None
    scene.script.step(1)
    scene.script.save(1)
    scene.script.end = ProgramEnding(outcome="left", words="SIGUSR2")
    scene.observer.conclude(0)
    found = outcome(scene)
    assert found is not None
    assert found[0] == "exit"
    assert triggers.read_trigger(scene.run, "exit") is None


@pytest.mark.parametrize("again", [False, True])
def test_a_program_that_trains_on_has_not_heard_it_and_is_asked_again(scene: Scene, again: bool) -> None:
    """The batch script writes why it asks, and its signal may be lost: before a handler is there, say."""
    begin = scene.attempt.read_begin()
    assert begin is not None
    scene.observer = ProgramObserver(scene.run, scene.attempt, begin, scene.script, leave=scene._leave, ask_again=again)
    scene.script.step(1)
    scene.attempt.stop.write_text("SIGUSR2\n")
    scene.observer.look()
    scene.script.step(2)
    scene.observer.look()
    assert scene.left == 0
    scene.script.step(3)
    scene.observer.look()
    scene.observer.look()
    assert scene.left == again
    scene.script.step(4, 5)
    scene.observer.look()
    assert scene.left == 2 * again


def test_the_save_trigger_is_answered_when_a_checkpoint_has_come(scene: Scene) -> None:
    triggers.touch_trigger(scene.run, "save")
    scene.observer.look()
    scene.observer.look()
    assert scene.script.asked == 1
    assert triggers.read_trigger(scene.run, "save") is not None
    scene.script.step(1)
    scene.script.save(1)
    scene.observer.look()
    assert triggers.read_trigger(scene.run, "save") is None
    assert "saved iteration 1" in (scene.run.triggers / "save.done").read_text()


def test_a_program_that_cannot_save_says_so_in_the_answer(scene: Scene) -> None:
    scene.script.refuses = "it has no ears"
    triggers.touch_trigger(scene.run, "save")
    scene.observer.look()
    assert "refused: it has no ears" in (scene.run.triggers / "save.done").read_text()
    assert triggers.read_trigger(scene.run, "save") is None


@pytest.mark.parametrize(("left", "asked"), [(100.0, 0), (5.0, 1)])
def test_it_is_asked_to_leave_before_the_time_limit(scene: Scene, left: float, asked: int) -> None:
    observer = scene.observe(job_end_time=time.time() + left, grace_period=30.0)
    observer.look()
    assert scene.left == asked


def test_the_lead_follows_what_steps_and_saves_take(scene: Scene) -> None:
    """Two steps of 40 s, 1.5 saves and a margin of 10 s are more than the 30 s with which it began."""
    observer = scene.observe(
        job_end_time=time.time() + 80, grace_period=30.0, min_grace_period=1.0, max_grace_period=1000.0
    )
    observer.look()
    assert scene.left == 0
    scene.script.said.append(ObservedStep(iteration=1, seconds=40.0))
    scene.script.under_way = 1
    observer.look()
    scene.script.under_way = None
    scene.script.save(1)
    observer.look()
    assert scene.left == 1


def test_a_checkpoint_into_which_files_still_come_is_recorded_when_they_have_come(scene: Scene) -> None:
    scene.script.may_change = True
    scene.script.save(2)
    scene.observer.look()
    assert (scene.attempt.read_commits(), scene.beat().phase) == ([], "save")
    late = scene.run.checkpoints / "iter_0000002/rng_state_1.pth"  # another rank's
    late.write_text("1")
    scene.observer.look()
    late.write_text("123")
    scene.observer.look()
    assert scene.attempt.read_commits() == []
    scene.observer.look()
    (commit,) = scene.attempt.read_commits()
    assert commit.files == {"rng_state_1.pth": 3, "weights": 5}
    assert scene.beat().phase == "start"


def test_nothing_more_comes_when_the_ranks_have_gone(scene: Scene) -> None:
    scene.script.may_change = True
    scene.script.save(2)
    scene.observer.conclude(0)
    assert [commit.iteration for commit in scene.attempt.read_commits()] == [2]


def test_a_program_whose_steps_go_back_lives(scene: Scene) -> None:
    """As one that goes back by itself: the iterations that are new are recorded."""
    scene.script.step(4, 5)
    scene.observer.look()
    for iteration in (3, 4, 5):
        before = scene.beat()
        scene.script.step(iteration)
        scene.observer.look()
        assert scene.beat() != before
        assert scene.beat().iteration == 5
    scene.script.step(6)
    scene.observer.look()
    assert scene.lines() == [4, 5, 6]


def goes_on(scene: Scene, base: int) -> tuple[ProgramObserver, list[str]]:
    """An observer of an attempt that goes on from `base`, and what it has ended."""
    begin = scene.attempt.read_begin()
    assert begin is not None
    begin = AttemptStart.of({**begin.__dict__, "base_iteration": base, "base_path": f"checkpoints/iter_{base:07}"})
    ended: list[str] = []
    end = partial(ended.append, "ranks")
    return ProgramObserver(scene.run, scene.attempt, begin, scene.script, leave=scene._leave, end=end), ended


@pytest.mark.parametrize(
    "looks", [[(1,), (2,)], [(0, 1), (2,)], [(10, 20), (30,)], [(1,), (50,)], [(40, 80, 120)], [tuple(range(1, 121))]]
)
def test_a_program_that_does_not_go_on_from_the_base_is_ended_before_it_saves(
    scene: Scene, looks: list[tuple[int, ...]]
) -> None:
    """Else it trains from scratch over its old files, and its checkpoints count as if it had gone on."""
    observer, ended = goes_on(scene, 100)
    said = [*looks[0]]
    scene.script.save(120)
    for steps in looks:
        assert ended == []
        scene.script.step(*steps)
        observer.look()
        if steps != looks[-1]:
            assert scene.attempt.read_commits() == [], "not before it is known whether it went on"
    triggers.touch_trigger(scene.run, "save")
    assert ended == ["ranks"]
    assert scene.attempt.read_commits() == []
    assert scene.lines() == []
    found = outcome(scene)
    assert found is not None
    assert found[0] == "fatal"
    assert f"iteration {said[-1] if said[0] == 0 else said[0]} first, and was to go on from iteration 100" in found[1]
    observer.look()
    observer.conclude(137)
    assert (ended, scene.script.asked, scene.left) == (["ranks"], 0, 0)
    assert scene.attempt.read_commits() == []


@pytest.mark.parametrize(
    "looks",
    [[(3,), (101,), (102,)], [(3, 101, 102)], [(50, 60), (101, 102)], [(90,), (101, 102)], [(10, 20, 110, 120)]],
)
def test_a_program_whose_log_names_an_older_iteration_first_goes_on(scene: Scene, looks: list[tuple[int, ...]]) -> None:
    """Many say the last evaluation, or the history of the run, before the first step of their own."""
    observer, ended = goes_on(scene, 100)
    for steps in looks:
        scene.script.step(*steps)
        observer.look()
    scene.script.save(looks[-1][-1])
    observer.look()
    observer.look()
    assert ended == []
    assert outcome(scene) is None
    assert [commit.iteration for commit in scene.attempt.read_commits()] == [looks[-1][-1]]


@pytest.mark.parametrize("said", [(101,), (110, 120), (100, 101), (0, 101)])
def test_a_program_goes_on_that_says_its_first_iteration_behind_the_base(scene: Scene, said: tuple[int, ...]) -> None:
    """Many say every tenth iteration alone, count from 0, or draw a progress bar before they have loaded anything."""
    observer, ended = goes_on(scene, 100)
    for iteration in said:
        scene.script.step(iteration)
        observer.look()
    scene.script.step(99, 130)  # one that goes back by itself later
    observer.look()
    assert ended == []
    assert scene.lines()[-1] == 130
    assert outcome(scene) is None


def test_ranks_that_could_not_be_ended_are_ended_by_the_next_look(scene: Scene) -> None:
    observer, ended = goes_on(scene, 100)

    def away() -> None:
        raise OSError("no answer")

    observer.end = away
    scene.script.step(1)
    observer.look()
    scene.script.step(2)
    with pytest.raises(OSError, match="no answer"):
        observer.look()
    observer.end = partial(ended.append, "ranks")
    observer.look()
    assert ended == ["ranks"]


def test_a_program_that_began_anew_and_is_gone_already_has_no_checkpoint_of_this_run(scene: Scene) -> None:
    observer, _ = goes_on(scene, 100)
    scene.script.step(*range(1, 121))
    scene.script.save(120)
    observer.conclude(0)
    assert scene.attempt.read_commits() == []
    found = outcome(scene)
    assert found is not None
    assert found[0] == "fatal"


def test_an_iteration_that_is_said_again_is_no_sign_of_life(scene: Scene) -> None:
    """A progress bar writes itself anew every ten seconds, also where nothing moves."""
    scene.script.step(5)
    scene.observer.look()
    before = scene.beat()
    scene.script.step(5, 5)
    scene.observer.look()
    assert scene.beat() == before


def test_the_time_of_a_step_is_seen_where_the_program_does_not_say_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("relayrun.control.trainers.observer.time.monotonic", lambda: now)
    for iterations in ((1,), (2, 3), (4,)):
        scene.script.said += [ObservedStep(iteration=iteration) for iteration in iterations]
        scene.observer.look()
        now += 8.0
    assert scene.beat().step_p95 == 8.0
    assert "step_seconds" not in list(read_json_lines(scene.attempt.metrics))[-1]


def test_it_is_asked_to_leave_also_where_its_files_cannot_be_read(scene: Scene) -> None:
    def away() -> Sequence[FoundCheckpoint]:
        raise OSError("stale file handle")

    scene.script.checkpoints = away  # type: ignore[method-assign]
    triggers.touch_trigger(scene.run, "exit")
    with pytest.raises(OSError, match="stale"):
        scene.observer.look()
    assert scene.left == 1


def on_disk(scene: Scene) -> list[str]:
    return sorted(path.name for path in scene.run.checkpoints.iterdir() if path.name != ".removing")


def test_old_checkpoints_go_where_that_is_asked_for_and_what_others_removed_does_not_count(scene: Scene) -> None:
    scene.observer = scene.observe(keep_last=2)
    for iteration in (1, 2, 3, 4):
        scene.script.save(iteration)
        scene.observer.look()
    assert on_disk(scene) == ["iter_0000003", "iter_0000004"]
    shutil.rmtree(scene.run.checkpoints / "iter_0000004")  # by the program itself
    scene.script.saved.remove(4)
    assert resume_point(scene.run).iteration == 3
    (scene.run.checkpoints / ".removing" / "iter_0000002").mkdir(parents=True, exist_ok=True)  # of a killed process
    (scene.run.checkpoints / "final").mkdir()  # nothing has it on record
    scene.script.save(5)
    scene.observer.look()
    assert on_disk(scene) == ["final", "iter_0000003", "iter_0000005"]
    scene.observer.look()
    assert list((scene.run.checkpoints / ".removing").glob("*")) == []


def test_of_a_checkpoint_that_is_a_link_the_link_alone_is_removed(scene: Scene, tmp_path: Path) -> None:
    scene.observer = scene.observe(keep_last=1)
    scene.script.save(1)
    scene.observer.look()
    moved = tmp_path / "archive"
    (scene.run.checkpoints / "iter_0000001").rename(moved)
    (scene.run.checkpoints / "iter_0000001").symlink_to(moved)
    assert resume_point(scene.run).iteration == 1
    assert is_checkpoint_of(scene.run, resume_point(scene.run))  # the run does not begin anew
    scene.script.save(2)
    scene.observer.look()
    assert on_disk(scene) == ["iter_0000002"]
    assert (moved / "weights").exists()


def test_without_that_the_program_alone_removes_checkpoints(scene: Scene) -> None:
    for iteration in (1, 2, 3, 4):
        scene.script.save(iteration)
        scene.observer.look()
    assert len(on_disk(scene)) == 4
