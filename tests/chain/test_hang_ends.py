"""Ranks that hang: the watch asks for their stacks, and ends them or leaves that to the agents."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.control.chain import watch
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import Hang, Heartbeat
from tests.history import began, make_history
from tests.plans import plan_with


class Signals:
    """The scheduler of the job, which keeps the signals to its ranks and the guards that it starts."""

    def __init__(self) -> None:
        self.sent: list[signal.Signals] = []
        self.guards = 0

    def current_job_id(self) -> str:
        return "1"

    def signal_ranks(self, _job: str, number: signal.Signals) -> None:
        self.sent.append(number)

    def guard(self, _job: str, _command: list[str], *, log: Path) -> None:
        self.guards += 1


Watching = tuple[watch.Watch, Signals, list[Heartbeat]]


def watching(folder: Path, monkeypatch: pytest.MonkeyPatch, **chain: object) -> Watching:
    """The watch of an attempt with one heartbeat, at a time when it must have changed."""
    run = make_history(folder / "run", lines=10, attempts=1)
    plan_with(Plan.load(run), **chain).write(run.plan)
    began(run, 2, base=10)
    beat = Heartbeat(node="n0", iteration=11, phase="step", time=0.0, step_p95=1.0, save_p95=None, interval=0.0)
    run.attempt(2).heartbeats.mkdir(parents=True, exist_ok=True)
    beat.write(run.attempt(2).heartbeats / "n0.json")
    found, signals = watch.Watch(run, 2), Signals()
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 0.0)
    found.scheduler = signals  # type: ignore[assignment]
    found._look_for_hang()
    found._next_beats, found._changed = 0.0, found._changed - 10_000
    return found, signals, [beat]


def test_ranks_that_hang_are_asked_for_their_stacks_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, signals, _ = watching(tmp_path, monkeypatch, recovery="job")
    found._look_for_hang()
    assert signals.sent == [signal.SIGUSR1, signal.SIGKILL]
    hang = Hang.read(found.attempt.hang)
    assert hang is not None
    assert (hang.iteration, hang.phase) == (11, "step")
    found._look_for_hang()
    assert len(signals.sent) == 2


@pytest.mark.parametrize(("recovery", "more"), [("job", 0.0), ("node", watch.AGENTS_FIRST_SECONDS)])
def test_the_watch_waits_longer_where_agents_look_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recovery: str, more: float
) -> None:
    found, signals, (beat,) = watching(tmp_path, monkeypatch, recovery=recovery)
    limit = watch.stall_limit([beat], found.plan.chain) + more
    for still, hangs in ((limit - 5, False), (limit + 5, True)):
        found._next_beats, found._changed = 0.0, time.monotonic() - still
        found._look_for_hang()
        assert bool(signals.sent) is hangs


def test_agents_end_ranks_that_hang_unless_they_do_not_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, signals, _ = watching(tmp_path, monkeypatch, recovery="node")
    found._look_for_hang()
    found._look_for_hang()
    assert signals.sent == [signal.SIGUSR1]
    assert found._handed_over is not None
    found._handed_over -= watch.AGENT_SECONDS + 1
    found._look_for_hang()
    assert signals.sent == [signal.SIGUSR1, signal.SIGKILL]


def test_ranks_that_agents_have_restarted_do_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, signals, _ = watching(tmp_path, monkeypatch, recovery="node")
    found._look_for_hang()
    found.attempt.hang.unlink()
    found._look_for_hang()
    found._look_for_hang()
    assert (found._handed_over, signals.sent) == (None, [signal.SIGUSR1])


def test_ranks_that_go_on_while_they_are_asked_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, signals, (beat,) = watching(tmp_path, monkeypatch, recovery="job")
    later = replace(beat, iteration=12)
    monkeypatch.setattr(time, "sleep", lambda _: later.write(found.attempt.heartbeats / "n0.json"))
    found._look_for_hang()
    assert signals.sent == [signal.SIGUSR1]
    assert not found.attempt.hang.exists()


def test_ranks_that_left_and_do_not_end_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, signals, _ = watching(tmp_path, monkeypatch, recovery="job")
    found.attempt.outcome.write_text("{}")
    found._look_for_hang()
    assert not signals.sent
    assert found._left is not None
    found._left -= max(found.plan.chain.hang_timeout, watch.LEAVE_SECONDS) + 1
    found._look_for_hang()
    assert signals.sent == [signal.SIGKILL]
    assert not found.attempt.hang.exists()


@pytest.mark.parametrize(
    ("mode", "owed", "guards"), [("requeue", False, 1), ("singleton", True, 1), ("singleton", False, 0)]
)
def test_a_job_without_a_successor_has_a_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, owed: bool, guards: int
) -> None:
    found, signals, _ = watching(tmp_path, monkeypatch, mode=mode, auto_requeue=True)
    if owed:
        found.attempt.retry_successor.touch()
    found._guard(7)
    found._guard(7)
    assert signals.guards == guards
