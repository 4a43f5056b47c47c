"""Agents that come late or never, and ranks that do not end: what the coordinator does, without processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from relayrun.control.agent import coordinator as module
from relayrun.control.agent.coordinator import Coordinator
from relayrun.control.rundir import restarts
from relayrun.control.rundir.records import Hang
from tests.control.test_spare_nodes import Nodes, one  # noqa: F401


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let so many seconds pass for who asks `time.monotonic`."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + seconds)


def begun_without_the_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Two of three nodes train, of which one was to be a spare one: the first has not come within a minute."""
    nodes = Nodes(folder, spare=1)
    nodes.hello(1, 2)
    later(monkeypatch, 61)
    nodes.coordinator.look()
    return nodes


@pytest.mark.parametrize("late", [65, 119, 290])
def test_a_late_agent_without_which_none_can_begin_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    nodes = Nodes(tmp_path, spare=0)
    nodes.hello(0)
    later(monkeypatch, late)
    nodes.coordinator.look()
    assert nodes.coordinator.code is None
    nodes.hello(1)
    assert nodes.places() == [0, 1]


def test_a_late_agent_without_which_the_others_began_is_a_spare_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = begun_without_the_first(tmp_path, monkeypatch)
    assert nodes.places() == [None, 0, 1]
    assert nodes.said == ["n0 has not said hello for 61 s; the others begin without it"]
    nodes.hello(0)
    assert nodes.said[-1] == "n0 came late, and is a spare node"
    nodes.lose(2)
    nodes.end(0, 1)
    assert nodes.places() == [1, 0, None]
    (failed,) = restarts.read_failed_restarts(nodes.attempt)
    assert (failed.lost, failed.again) == ({"n2": "n0"}, True)


def test_an_agent_that_comes_while_a_round_ends_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = begun_without_the_first(tmp_path, monkeypatch)
    nodes.dead(1, 0, code=-9)
    nodes.hello(0)
    nodes.end(1, 2)
    assert nodes.places() == [None, 0, 1]


def test_an_agent_that_never_comes_ends_the_attempt_with_its_name_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, spare=0)
    nodes.hello(0)
    later(monkeypatch, 301)
    nodes.coordinator.look()
    assert (nodes.coordinator.code, nodes.all[0].last) == (1, {"kind": "leave", "code": 1})
    assert nodes.said == ["n1 has not said hello for 301 s; it is given up"]
    (failed,) = restarts.read_failed_restarts(nodes.attempt)
    assert (failed.restart, failed.lost, failed.again) == (0, {"n1": ""}, False)
    told = "n1: has not said hello for 301 s; 2 nodes are to train, and 1 are left"
    assert failed.told == f"before the first start: {told}"
    assert f"{failed.culprit}; {failed.reason}" == told  # the chain's reason


def test_where_no_agent_comes_no_node_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path, spare=1)
    later(monkeypatch, 301)
    nodes.coordinator.look()
    assert nodes.coordinator.code == 1
    (failed,) = restarts.read_failed_restarts(nodes.attempt)
    assert (failed.node, failed.lost) == ("n0, n1, n2", {})


def test_nodes_that_are_lost_before_the_first_round_are_on_record(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, spare=0)
    nodes.hello(0)
    nodes.lose(1, "the step of its agent ended with exit code 1")
    assert nodes.coordinator.code == 1
    (failed,) = restarts.read_failed_restarts(nodes.attempt)
    assert (failed.culprit, failed.lost) == ("n1: the step of its agent ended with exit code 1", {"n1": ""})


def test_a_node_whose_ranks_do_not_end_is_given_up(one: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    one.dead(0, 1, code=-9)
    one.end(0, 2)
    later(monkeypatch, 59)
    one.coordinator.look()
    assert not restarts.read_failed_restarts(one.attempt)
    later(monkeypatch, 61)
    one.coordinator.look()
    assert one.places() == [0, None, 1]
    (failed,) = restarts.read_failed_restarts(one.attempt)
    assert (failed.culprit, failed.lost) == ("rank 1 on n0: killed by SIGKILL", {"n1": "n2"})
    assert one.said[0] == "n1: its ranks have not ended within 60 s; it is given up"
    assert one.all[1].last == {"kind": "leave", "code": 1}


def test_without_a_spare_node_it_ends_the_attempt_with_these_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, spare=0)
    nodes.hello(0, 1)
    nodes.dead(0, 1, code=-9)
    nodes.end(0)
    later(monkeypatch, 61)
    nodes.coordinator.look()
    assert nodes.coordinator.code == 137
    (failed,) = restarts.read_failed_restarts(nodes.attempt)
    assert (failed.again, failed.reason) == (False, "n1: its ranks have not ended within 60 s")


def beat(coordinator: Coordinator, *nodes: int) -> None:
    for node in nodes:
        coordinator.hear(node, {"kind": "beat", "restart": 1, "standing": None})


def test_a_rank_that_died_before_its_node_or_another_was_lost_stays_the_first_cause(
    one: Nodes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one.dead(0, 1, error="ValueError: of its own")
    later(monkeypatch, 5)
    beat(one.coordinator, 0, 1, 2)  # the other node was there long after that
    later(monkeypatch, 26)
    one.lose(1, "no word from its agent for 20 s")
    one.end(0, 2)
    (failed,) = restarts.read_failed_restarts(one.attempt)
    assert (failed.rank, failed.node, failed.lost) == (1, "n0", {"n1": "n2"})


def test_a_rank_that_died_on_the_lost_node_itself_is_the_first_cause(one: Nodes) -> None:  # noqa: F811
    one.dead(0, 1, error="RuntimeError: connection closed by peer")
    one.dead(1, 2, code=-11)
    one.lose(1)
    one.end(0, 2)
    (failed,) = restarts.read_failed_restarts(one.attempt)
    assert failed.culprit == "rank 2 on n1: killed by SIGSEGV"


def test_a_hang_may_name_a_rank_of_an_older_layout(one: Nodes) -> None:  # noqa: F811
    hang = Hang(iteration=7, phase="data", seconds=61.0, silent=[], late={"9": "data"}, time=1.0)
    one.coordinator._hung(hang)
    one.end(0, 1, 2)
    (failed,) = restarts.read_failed_restarts(one.attempt)
    assert (failed.rank, failed.node) == (9, "")


def test_the_bounds_of_waiting_are_in_this_order() -> None:
    assert module.GATHER_SECONDS < module.LONGEST_GATHER_SECONDS
