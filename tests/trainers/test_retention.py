"""Which checkpoints of a program that removes none go, when, and what a kill leaves of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from relayrun.control.rundir.run import Run
from relayrun.control.trainers import checkpoint_cleanup
from relayrun.control.trainers.base import ProgramEnding
from relayrun.control.trainers.checkpoint_cleanup import CheckpointRetention
from relayrun.control.trainers.observer import ProgramObserver
from tests.history import began

from .test_observer import Scene


class Kept(Scene):
    """A scene whose observer removes checkpoints."""

    keep_last = 2
    keep_every: int | None = None
    named: int | None = None

    def observe(self, script: object = None, **change: object) -> ProgramObserver:
        begin = self.attempt.read_begin()
        assert begin is not None
        kept = CheckpointRetention(
            self.run,
            self.attempt,
            begin,
            keep_last=self.keep_last,
            keep_every=self.keep_every,
            tracked=lambda: self.named,
        )
        return ProgramObserver(self.run, self.attempt, begin, self.script, leave=self._leave, retention=kept)

    def there(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.run.checkpoints.glob("iter_*"))

    def look(self) -> None:
        self.script.saved = self.there()
        self.observer.look()

    def make(self, *iterations: int) -> None:
        for iteration in iterations:
            self.script.step(iteration)
            self.script.save(iteration)
            self.look()


@pytest.fixture
def scene(tmp_path: Path) -> Kept:
    return Kept(Run(tmp_path / "run"))


def test_the_newest_stay(scene: Kept) -> None:
    scene.make(1, 2)
    assert scene.there() == [1, 2]
    scene.make(3, 4, 5)
    assert scene.there() == [4, 5]
    assert list((scene.run.checkpoints / ".removing").iterdir()) == []


def test_multiples_stay(scene: Kept) -> None:
    scene.keep_every = 4
    scene.observer = scene.observe()
    scene.make(2, 4, 6, 8, 10, 12, 14)
    assert scene.there() == [4, 8, 12, 14]


def test_nothing_goes_while_a_save_is_under_way(scene: Kept) -> None:
    scene.make(1, 2)
    scene.script.under_way = 4
    scene.make(3)
    assert scene.there() == [1, 2, 3]
    scene.script.under_way = None
    scene.look()
    assert scene.there() == [2, 3]


def test_the_one_that_the_tracker_names_stays(scene: Kept) -> None:
    """A person has chosen it, to go back there with the next job."""
    scene.make(1, 2)
    scene.named = 1
    scene.make(3, 4, 5)
    assert scene.there() == [1, 4, 5]


def test_what_nobody_has_on_record_stays(scene: Kept) -> None:
    """It may be another program's, or of a line that was left; `begin` sees to it."""
    stranger = scene.run.checkpoints / "iter_0000002"
    stranger.mkdir(parents=True)
    began(scene.run, 2, base=0)
    scene.attempt = scene.run.attempt(2)
    scene.observer = scene.observe()
    scene.observer._committed = 2
    scene.make(3, 4, 5)
    assert scene.there() == [2, 4, 5]


def test_an_attempt_that_has_been_overtaken_removes_nothing(scene: Kept) -> None:
    scene.make(1, 2)
    began(scene.run, 2, base=2)
    scene.make(3, 4)
    assert scene.there() == [1, 2, 3, 4]


def test_the_last_look_of_a_run_that_is_done_removes_too(scene: Kept) -> None:
    scene.make(1, 2)
    scene.script.step(3)
    scene.script.save(3)
    scene.script.end = ProgramEnding(outcome="done", words="all of it")
    scene.observer.conclude(0)
    assert scene.there() == [2, 3]
    assert list((scene.run.checkpoints / ".removing").iterdir()) == []


class Killed(BaseException):
    """What a kill looks like from inside."""


def kill_after(patch: pytest.MonkeyPatch, allowed: int) -> None:
    """Let so many changes of the file system happen, then die."""
    left = allowed

    def counted(real: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object, **options: object) -> None:
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            real(*arguments, **options)

        return call

    for name in ("rename", "unlink", "rmdir"):
        patch.setattr(os, name, counted(getattr(os, name)))


def test_a_kill_at_any_point_leaves_no_half_checkpoint_under_its_name(tmp_path: Path) -> None:
    killed = 0
    for allowed in range(12):
        scene = Kept(Run(tmp_path / f"run-{allowed}"))
        scene.make(1, 2)
        for iteration in (1, 2):
            (scene.run.checkpoint(iteration) / "optimizer").write_text("12345")
        scene.script.step(3, 4)
        scene.script.save(3)
        scene.script.save(4)
        scene.script.saved = scene.there()
        scene.observer._record()
        kept = scene.observer.retention
        assert kept is not None
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, allowed)
            try:
                kept.look(scene.script.checkpoints(), saving=False)
            except Killed:
                killed += 1
        for iteration in set(scene.there()) & {1, 2}:
            assert sorted(path.name for path in scene.run.checkpoint(iteration).iterdir()) == ["optimizer", "weights"]
        scene.observer = scene.observe()  # by the watch that is started again
        scene.look()
        assert scene.there() == [3, 4]
        assert list((scene.run.checkpoints / ".removing").iterdir()) == []
    assert killed == 8  # two renames, four files, two folders


def test_a_look_removes_for_a_short_time_only(scene: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_cleanup, "REMOVE_SECONDS", -1.0)
    scene.keep_last = 1
    scene.observer = scene.observe()
    scene.script.step(1)
    scene.script.save(1)
    for number in range(5):
        (scene.run.checkpoint(1) / f"{number}.distcp").write_text("x")
    scene.make(2)
    left = list((scene.run.checkpoints / ".removing" / "iter_0000001").iterdir())
    assert len(left) == 5  # of six: one file a look
    for _ in range(6):
        scene.look()
    assert list((scene.run.checkpoints / ".removing").iterdir()) == []


def test_a_link_goes_and_what_it_leads_to_stays(scene: Kept, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("x")
    scene.make(1)
    (scene.run.checkpoint(1) / "weights").unlink()
    scene.run.checkpoint(1).rmdir()
    scene.run.checkpoint(1).symlink_to(elsewhere)
    scene.make(2, 3)
    assert scene.there() == [2, 3]
    assert (elsewhere / "weights").read_text() == "x"
