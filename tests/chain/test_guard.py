"""The end of a job: its watch ends what it has started, and the guard queues the job again unless somebody ended it."""

from __future__ import annotations

import subprocess
from unittest.mock import Mock

import pytest

from relayrun.control.chain import watch
from relayrun.control.rundir.plan import Plan
from tests.plans import plan_with

from .exhaustion import Reached, run_child
from .test_exhaustion import Stage, fresh_begin, guarded, stage  # noqa: F401 - a fixture


@pytest.fixture
def begun(stage: Stage) -> Stage:  # noqa: F811
    """An attempt has begun in job 1, which queues itself."""
    plan_with(Plan.load(stage.run), mode="requeue", fallback_job=False).write(stage.run.plan)
    assert fresh_begin(stage).code == 0
    return stage


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The guard is on the batch host, and Slurm waits half a second between SIGTERM and SIGKILL."""
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    monkeypatch.setattr("relayrun.control.scheduler.slurm.Slurm.kill_wait", lambda _self: 0.5)
    return monkeypatch


def job_ends(stage: Stage, guard: pytest.MonkeyPatch, *, script_lives: bool, cancelled: bool) -> Reached:  # noqa: F811
    """Slurm sends SIGTERM to the guard of the attempt."""
    guard.setattr(watch, "is_process_alive", lambda _pid: script_lives)

    def asked(_slurm: object, job: str, *, nodes: str) -> bool:
        started = stage.run.attempt(4).read_begin()
        assert started is not None
        assert (job, nodes) == ("1", started.nodes)
        return cancelled

    guard.setattr("relayrun.control.scheduler.slurm.Slurm.cancelled", asked)

    return guarded(stage)


@pytest.mark.parametrize(
    ("script_lives", "cancelled", "words"),
    [
        (False, False, "the batch script of attempt 4 was killed"),
        (False, True, "the batch script of attempt 4 was killed"),  # a job that a person cancels still has its script
        (True, False, "the batch script of attempt 4 does not end"),
    ],
)
def test_a_job_that_nobody_cancelled_is_queued_again(
    begun: Stage, guard: pytest.MonkeyPatch, *, script_lives: bool, cancelled: bool, words: str
) -> None:
    reached = job_ends(begun, guard, script_lives=script_lives, cancelled=cancelled)
    assert begun.slurm.pending() == ["1"]
    assert f"{words}; job 1 is queued again" in reached.output


def test_a_cancelled_job_stays_cancelled(begun: Stage, guard: pytest.MonkeyPatch) -> None:
    job_ends(begun, guard, script_lives=True, cancelled=True)
    assert not begun.slurm.pending()


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_guard_on_another_node_does_not_judge_by_the_process_id_of_the_batch_script(
    begun: Stage, guard: pytest.MonkeyPatch, *, forgotten: bool
) -> None:
    guard.setenv("SLURMD_NODENAME", "n1")
    if forgotten:
        guard.setattr("relayrun.control.scheduler.slurm.Slurm.query", lambda _self, _job: None)
    reached = job_ends(begun, guard, script_lives=False, cancelled=True)
    assert "from n1: this is not the batch host" in reached.output
    assert not begun.slurm.pending()


def test_a_job_whose_attempt_is_closed_is_left_alone(begun: Stage, guard: pytest.MonkeyPatch) -> None:
    begun.run.attempt(4).end.write_text("{}")
    job_ends(begun, guard, script_lives=False, cancelled=False)
    assert not begun.slurm.pending()


def test_a_batch_script_that_still_closes_its_attempt_is_waited_for(begun: Stage, guard: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def closes_at_the_second_look(pid: int) -> bool:
        looks.append(pid)
        if len(looks) == 2:
            begun.run.attempt(4).end.write_text("{}")
        return True

    guard.setattr(watch, "is_process_alive", closes_at_the_second_look)
    guard.setattr("relayrun.control.scheduler.slurm.Slurm.cancelled", lambda *_, **__: False)
    guarded(begun)
    assert not begun.slurm.pending()


def test_nothing_is_judged_before_slurm_says_that_the_job_ends(begun: Stage, guard: pytest.MonkeyPatch) -> None:
    alive = [True]
    guard.setattr(watch, "is_process_alive", lambda _pid: alive[0])
    guard.setattr(watch.signal, "sigwait", lambda _signals: alive.__setitem__(0, False))
    reached = guarded(begun)
    assert "the batch script of attempt 4 was killed" in reached.output


def test_the_watch_of_an_attempt_follows_its_program(begun: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Mock()
    monkeypatch.setattr(watch, "trainer_of", lambda *_: program)
    assert watch.Watch(begun.run, 4)._observing() is not None
    assert watch.Watch(begun.run, 5)._observing() is None  # one that has not begun


def test_a_job_with_a_successor_is_left_alone(begun: Stage, guard: pytest.MonkeyPatch) -> None:
    plan_with(Plan.load(begun.run), mode="singleton").write(begun.run.plan)
    assert not begun.run.attempt(4).retry_successor.exists()
    job_ends(begun, guard, script_lives=False, cancelled=False)
    assert begun.slurm.jobs()["1"]["state"] == "RUNNING"


def test_a_successor_that_is_still_owed_is_the_job_itself(begun: Stage, guard: pytest.MonkeyPatch) -> None:
    plan_with(Plan.load(begun.run), mode="singleton").write(begun.run.plan)
    begun.run.attempt(4).retry_successor.touch()
    job_ends(begun, guard, script_lives=False, cancelled=False)
    assert begun.slurm.pending() == ["1"]


def test_an_order_in_the_jobs_comment_ends_the_chain(begun: Stage, guard: pytest.MonkeyPatch) -> None:
    begun.slurm.set("1", comment="relayrun:stopped-by=ann")
    reached = job_ends(begun, guard, script_lives=False, cancelled=False)
    assert begun.slurm.jobs()["1"]["state"] == "RUNNING"
    assert "the chain ends: stopped by ann" in reached.output


def test_the_watch_ends_with_the_batch_script_and_with_it_what_it_has_started(
    begun: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()

    def watched() -> int:
        found = watch.Watch(begun.run, 4)
        for name in ("_notices", "_copier", "_hasher"):
            monkeypatch.setattr(getattr(found, name), "finish", lambda name=name: print(f"ended {name}", flush=True))
        found.loop(gone.pid)
        return 0

    reached = run_child(watched, begun.run_path, begun.slurm)
    assert reached.code == 0, reached.output
    for name in ("_notices", "_copier", "_hasher"):
        assert f"ended {name}" in reached.output
