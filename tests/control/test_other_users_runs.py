"""What a command that acts does with the run directory of another user: neither his links nor his plan lead it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from relayrun.cli.run import stop
from relayrun.control.chain import jobs
from relayrun.control.rundir import triggers
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, is_stopped
from relayrun.control.scheduler.base import Job, Scheduler
from relayrun.errors import RunDirError
from tests.history import make_history
from tests.owners import give_away


class Queue:
    """A scheduler with jobs of the name that the plan of another user gives: this user's own jobs."""

    def __init__(self, state: str) -> None:
        self.job = Job(id="7", name="mine", state=state, nodes="")
        self.orders: list[str] = []

    def jobs(self, plan: Plan, *, anyone: bool = False) -> list[Job]:
        return [self.job]

    def live_fallback_jobs(self, plan: Plan, *, anyone: bool = False) -> list[Job]:
        return [self.job]

    def cancel_together(self, job_ids: list[str]) -> bool:
        self.orders += job_ids
        return True

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *words, **_: self.orders.append(f"{name} {words}")


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = make_history(tmp_path / "theirs", lines=6, attempts=1)
    run.triggers.mkdir(exist_ok=True)
    give_away(monkeypatch, run.path, run.plan)
    return run


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_plan_that_names_the_jobs_of_this_user_ends_none(theirs: Run, state: str) -> None:
    queue = Queue(state)
    scheduler: Scheduler = queue  # type: ignore[assignment]
    with pytest.raises(RunDirError, match="you may not write here"):
        jobs.cancel_chain(theirs, scheduler, user="me")
    stop.request_stop(theirs, scheduler, user="me")
    assert triggers.is_trigger_touched(theirs, "exit")
    assert queue.orders == []
    assert not is_stopped(theirs)


def test_no_job_is_ended_either_where_the_trigger_cannot_be_made(theirs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue("RUNNING")
    scheduler: Scheduler = queue  # type: ignore[assignment]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(triggers, "touch_trigger", full)
    with pytest.raises(OSError, match="No space"):
        stop.request_stop(theirs, scheduler, user="me")
    assert queue.orders == []


@pytest.mark.parametrize("name", triggers.TRIGGER_NAMES)
def test_a_trigger_is_not_touched_through_a_link(tmp_path: Path, name: triggers.TriggerName) -> None:
    """A member of the group may make links in `triggers/`; whoever owns a run directory, that folder a link."""
    run, mine = Run(tmp_path / "run"), tmp_path / "mine"
    run.triggers.mkdir(parents=True)
    mine.mkdir()
    (mine / "old").touch()
    os.utime(mine / "old", (1.0, 1.0))
    for target in ("made", "old"):
        (run.triggers / name).symlink_to(mine / target)
        triggers.touch_trigger(run, name)
        assert triggers.is_trigger_touched(run, name), "the link itself is a trigger"
        (run.triggers / name).unlink()
    run.triggers.rmdir()
    run.triggers.symlink_to(mine)
    with pytest.raises(NotADirectoryError):
        triggers.touch_trigger(run, name)
    assert [(path.name, path.stat().st_mtime) for path in mine.iterdir()] == [("old", 1.0)]


def test_a_run_directory_that_its_owner_closed_stays_closed(tmp_path: Path) -> None:
    """As docs/explanation/trust.md says: a later submit opens `triggers/` again, and no folder above it."""
    run = Run(tmp_path / "run")
    run.path.mkdir(mode=0o755)
    triggers.create_trigger_folder(run)
    run.path.chmod(0o744)
    run.triggers.chmod(0o700)
    triggers.create_trigger_folder(run)
    assert (run.path.stat().st_mode & 0o777, run.triggers.stat().st_mode & 0o7777) == (0o744, 0o2770)
