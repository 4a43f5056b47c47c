"""What a coordinator finds that somebody asks of the ranks, and how the agent of a node has it told to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.control.agent import requests
from relayrun.control.agent.requests import LOOK_SECONDS, Requests
from relayrun.control.rundir import triggers
from relayrun.control.rundir.records import Hang
from relayrun.control.rundir.run import Run
from tests.control.test_spare_nodes import Nodes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(requests.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.attempt(1).path.mkdir(parents=True)
    triggers.create_trigger_folder(run)
    return run


def looking(run: Run, *, of_ranks: bool = True) -> tuple[Requests, list[str]]:
    said: list[str] = []
    return Requests(run, run.attempt(1), of_ranks=of_ranks, say=said.append), said


@pytest.mark.parametrize("what", ["stop", "save", "exit"])
def test_it_is_seen_at_the_first_look_after_a_second(run: Run, clock: list[float], what: str) -> None:
    found, said = looking(run)
    assert found.asked, "nobody has looked"
    assert found.look()
    assert not found.asked
    path = run.attempt(1).stop if what == "stop" else run.triggers / what
    path.touch()
    clock[0] += LOOK_SECONDS / 2
    assert not found.look()  # a look for each message of each agent would be many
    assert not found.asked
    clock[0] += LOOK_SECONDS / 2
    assert found.look()
    assert found.asked
    path.unlink()
    clock[0] += LOOK_SECONDS
    assert found.look()
    assert not found.asked
    assert said == []


def test_the_ranks_of_a_foreign_program_are_told_nothing(run: Run, clock: list[float]) -> None:
    found, _ = looking(run, of_ranks=False)
    triggers.touch_trigger(run, "save")
    assert found.look()
    assert not found.asked


def test_where_files_cannot_be_looked_at_ranks_look_themselves_and_it_is_said_once(
    run: Run, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, said = looking(run)
    found.look()
    Hang(iteration=1, phase="step", seconds=9.0, silent=[], time=0.0).write(run.attempt(1).hang)

    def fail(*_: object) -> bool:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(triggers, "is_trigger_touched", fail)
    for _ in range(3):
        clock[0] += LOOK_SECONDS
        found.look()
        assert found.asked
        assert found.hang is not None, "one file says nothing of the other"
    assert said == ["could not look for stop and triggers: [Errno 116] Stale file handle"]


def test_the_node_of_rank_0_is_told_each_second_whichever_it_is(tmp_path: Path, clock: list[float]) -> None:
    nodes = Nodes(tmp_path, spare=1)
    triggers.create_trigger_folder(nodes.run)
    nodes.hello(0, 1, 2)

    def told() -> list[list[bool]]:
        clock[0] += LOOK_SECONDS
        for link in nodes.all.values():
            link.sent.clear()
        nodes.coordinator.look()
        return [[sent["asked"] for sent in link.sent if sent["kind"] == "requests"] for link in nodes.all.values()]

    assert told() == [[False], [], []]
    triggers.touch_trigger(nodes.run, "save")
    assert told() == [[True], [], []]
    (nodes.run.triggers / "save").unlink()
    assert told() == [[False], [], []]
    nodes.lose(0)
    nodes.end(1, 2)
    assert nodes.places() == [None, 1, 0]
    assert told() == [[], [], [False]]
    nodes.attempt.stop.touch()
    assert told() == [[], [], [True]]


def test_a_word_that_cannot_be_left_is_no_word(tmp_path: Path) -> None:
    requests.tell_ranks(tmp_path / "none", asked=False)
    assert not requests.nothing_asked(tmp_path / "none")
    requests.tell_ranks(tmp_path, asked=False)
    assert requests.nothing_asked(tmp_path)
    requests.tell_ranks(tmp_path, asked=True)
    requests.tell_ranks(tmp_path, asked=True)
    assert not requests.nothing_asked(tmp_path)
