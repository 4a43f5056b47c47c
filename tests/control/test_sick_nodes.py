"""What the coordinator does with nodes that are sick, without processes."""

from __future__ import annotations

import re
import selectors
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.agent import coordinator
from relayrun.control.agent.authentication import AttemptKey
from relayrun.control.agent.connections import AgentConnections
from relayrun.control.agent.messages import MessageSocket
from relayrun.control.rundir import node_health, restarts
from tests.control.test_spare_nodes import NAMES, Nodes
from tests.plans import node_checks

WARN, EXCLUDE = node_checks(mode="warn", tmp_gb=1e-7), node_checks(mode="exclude", tmp_gb=1e-7)
WELL: dict[str, Any] = {"tmp": 200}
SHORT: dict[str, Any] = {"tmp": 50}
BROKEN: dict[str, Any] = {"unwritable": {"run_dir": "/run: Input/output error"}}
WORDS = "cannot be written: /run: Input/output error (node health)"


class Looked(Nodes):
    """Nodes that say how they are."""

    def say(self, node: int, facts: dict[str, Any]) -> None:
        self.coordinator.hear(node, {"kind": "health", "facts": facts})

    def found(self) -> list[tuple[str, str, str, int]]:
        return [(each.node, each.check, each.action, each.restart) for each in node_health.read_findings(self.attempt)]


@pytest.fixture
def three(tmp_path: Path) -> Looked:
    """Two nodes that train and a spare one, all of which have said hello."""
    nodes = Looked(tmp_path, spare=1, health=WARN)
    nodes.hello(0, 1, 2)
    return nodes


def begin(nodes: Looked) -> None:
    for node in nodes.all:
        nodes.say(node, WELL)
    nodes.reached(7)


def test_the_first_round_begins_when_all_nodes_have_said_how_they_are(three: Looked) -> None:
    for node in (0, 1):
        three.say(node, WELL)
        assert {order["kind"] for order in three.all[node].sent} == {"clock"}
    three.say(2, WELL)
    assert three.places() == [0, 1, None]
    assert three.found() == []


def test_a_node_that_is_sick_before_the_first_round_is_not_trained_on(three: Looked) -> None:
    three.say(0, BROKEN)
    three.say(1, SHORT)
    three.say(2, WELL)
    assert three.all[0].last == {"kind": "leave", "code": 1}
    assert not three.coordinator.expects(0)
    assert three.places() == [None, 0, 1]
    assert three.found() == [("n0", "run_dir", "left out", 0), ("n1", "tmp", "warned", 0)]
    sent = len(three.said)
    three.coordinator.hear(0, {"kind": "asked", "why": "SIGTERM"})  # its step is ended
    assert three.coordinator._asked == ""
    assert len(three.said) == sent


def test_the_attempt_ends_where_nobody_takes_the_place(tmp_path: Path) -> None:
    nodes = Looked(tmp_path, spare=0, health=WARN)
    nodes.hello(0, 1)
    nodes.say(0, WELL)
    nodes.say(1, BROKEN)
    assert nodes.coordinator.code == 1
    assert [link.last["kind"] for link in nodes.all.values()] == ["leave", "leave"]
    assert nodes.found() == [("n1", "run_dir", "ended", 0)]
    assert node_health.why_health_ended_attempt(nodes.attempt) == "n1: cannot be written: /run: Input/output error"


def test_what_all_nodes_have_leaves_nobody_out(tmp_path: Path) -> None:
    nodes = Looked(tmp_path, spare=1, health=EXCLUDE)
    nodes.hello(0, 1, 2)
    for node in range(3):
        nodes.say(node, BROKEN | SHORT)
    assert nodes.places() == [0, 1, None]
    assert {(check, action) for _, check, action, _ in nodes.found()} == {("run_dir", "warned"), ("tmp", "warned")}


def test_a_node_that_falls_ill_is_left_out_of_the_next_restart(three: Looked) -> None:
    begin(three)
    three.dead(0, 1, code=-9)
    assert [order["kind"] for order in three.all[1].sent[-6:]] == ["end"] + ["clock"] * 5
    three.facts = WELL
    three.end(0, 2)
    three.facts = BROKEN
    three.end(1)
    assert three.places() == [0, None, 1]
    (failed,) = restarts.read_failed_restarts(three.attempt)
    assert (failed.culprit, failed.lost, failed.again) == ("rank 1 on n0: killed by SIGKILL", {"n1": "n2"}, True)
    assert three.found() == [("n1", "run_dir", "left out", 1)]


def test_the_copies_of_a_sick_node_are_gone_with_it(three: Looked) -> None:
    begin(three)
    three.dead(0, 1, code=-9)
    three.facts = WELL
    own = {node: [(rank, 7, f"hash {rank}", False) for rank in (2 * node, 2 * node + 1)] for node in (0, 1)}
    three.end(0, memory=own[0])
    three.end(2)
    three.facts = BROKEN
    three.end(1, memory=own[1])
    assert three.places() == [0, None, 1]
    (failed,) = restarts.read_failed_restarts(three.attempt)
    assert (failed.source, failed.next_iteration) == ("disk", 0)
    assert three.all[2].last["memory"] is None


def test_a_node_that_does_not_say_how_it_is_is_not_waited_for(three: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in (0, 1):
        three.say(node, WELL)
    monkeypatch.setattr(coordinator, "GATHER_SECONDS", 0.0)
    time.sleep(0.01)
    three.coordinator.look()
    assert three.places() == [0, 1, None]
    assert three.all[2].last == {"kind": "leave", "code": 1}
    assert re.search(r"^n2 has not said how it is for \d+ s; the others begin without it$", "\n".join(three.said), re.M)
    three.dead(0, 1, code=-9)
    three.facts = WELL
    three.end(0, 1)
    assert three.places() == [0, 1, None]


def test_a_node_that_falls_ill_without_a_spare_one_ends_the_attempt_with_its_name(tmp_path: Path) -> None:
    nodes = Looked(tmp_path, spare=0, health=WARN)
    nodes.hello(0, 1)
    begin(nodes)
    nodes.dead(0, 1, code=-9)
    nodes.facts = WELL
    nodes.end(0)
    nodes.facts = BROKEN
    nodes.end(1)
    assert nodes.coordinator.code == 137
    (failed,) = restarts.read_failed_restarts(nodes.attempt)
    assert (failed.again, failed.reason, failed.lost) == (False, f"n1 is sick: {WORDS}", {"n1": ""})
    assert nodes.found() == [("n1", "run_dir", "ended", 1)]


def test_what_is_less_ends_nothing_and_costs_no_node_that_is_needed(tmp_path: Path) -> None:
    nodes = Looked(tmp_path, spare=0, health=EXCLUDE)
    nodes.hello(0, 1)
    begin(nodes)
    nodes.dead(0, 1, code=-9)
    nodes.facts = SHORT
    nodes.end(1)
    nodes.facts = WELL
    nodes.end(0)
    assert nodes.places() == [0, 1]
    assert nodes.found() == [("n1", "tmp", "warned", 1)]


def test_the_connection_of_a_node_that_was_told_to_leave_is_closed(three: Looked) -> None:
    links: dict[int, MessageSocket] = {}
    three.coordinator._links = links
    listener = socket.create_server(("127.0.0.1", 0))
    key, record = AttemptKey.of(three.attempt), three.attempt.refused_connections
    reception = AgentConnections(three.coordinator, links, listener, key, record, print)
    selector = selectors.DefaultSelector()
    reception.watch(selector)

    def turn() -> None:
        for _ in range(100):
            if not (found := selector.select(0.05)):
                return
            for key, _ in found:
                key.data()
        raise AssertionError("there is always something to read")

    agents = []
    for node in range(3):
        agents.append(MessageSocket(socket.create_connection(listener.getsockname())))
        with ThreadPoolExecutor(1) as thread:
            joined = thread.submit(key.join, agents[-1], node)
            while not joined.done():
                turn()
            joined.result()
        agents[-1].send("hello", name=NAMES[node], port=1)
        turn()
    for node, facts in enumerate((BROKEN, WELL, WELL)):
        agents[node].send("health", facts=facts)
    turn()
    assert sorted(links) == [1, 2]
    assert "leave" in [message["kind"] for message in agents[0].receive()]
    agents[0].close()
    turn()
    assert len(selector.get_map()) == 3  # two agents and the listener
    for lines in (*agents[1:], *links.values()):
        lines.close()
    listener.close()
