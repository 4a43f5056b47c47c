"""Connections of the coordinator: agents of this job, strangers, and what neither of them may break."""

from __future__ import annotations

import errno
import json
import selectors
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.agent import authentication, connections
from relayrun.control.agent import messages as agent_messages
from relayrun.control.agent.authentication import AttemptKey
from relayrun.control.agent.connections import AgentConnections
from relayrun.control.agent.messages import MessageSocket
from relayrun.control.rundir.records import RefusedConnections
from tests.control.test_spare_nodes import NAMES, Nodes
from tests.waiting import wait_for

from .conftest import MakeRun
from .test_agents import Nodes as Agents


class Desk:
    """The reception of a coordinator that knows of two nodes and a spare one, and what connects to it."""

    def __init__(self, folder: Path) -> None:
        self.nodes = Nodes(folder, spare=1)
        self.links: dict[int, MessageSocket] = {}
        self.nodes.coordinator._links = self.links
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.said: list[str] = []
        self.key = AttemptKey.of(self.nodes.attempt)
        self.record = self.nodes.attempt.refused_connections
        self.reception = AgentConnections(
            self.nodes.coordinator, self.links, self.listener, self.key, self.record, self.said.append
        )
        self.selector = selectors.DefaultSelector()
        self.reception.watch(self.selector)
        self.opened: list[MessageSocket] = []

    def turn(self) -> None:
        for _ in range(1000):
            if not (found := self.selector.select(0.05)):
                return
            for key, _ in found:
                key.data()
        raise AssertionError("it is never done")

    def connect(self) -> MessageSocket:
        """A connection that has heard no challenge."""
        lines = MessageSocket(socket.create_connection(self.listener.getsockname(), 300))
        self.opened.append(lines)
        return lines

    def joined(self, node: int, key: AttemptKey | None = None) -> MessageSocket:
        """A connection that has proved that it is this node's agent. Raises EOFError, as `join` does."""
        lines = self.connect()
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit((key or self.key).join, lines, node)
            wait_for(lambda: self.turn() or done.done(), words="nobody answers")
            done.result()
        return lines

    def agent(self, node: int, /, **changes: Any) -> MessageSocket:
        lines = self.joined(node)
        hello = {"name": NAMES[node] if node < 3 else "x", "port": 1} | changes
        lines.send("hello", **{name: value for name, value in hello.items() if value is not None})
        self.turn()
        return lines

    def refused(self) -> RefusedConnections:
        self.reception.look()
        found = RefusedConnections.read(self.record)
        assert found is not None
        return found

    def close(self) -> None:
        for lines in (*self.opened, *self.links.values(), *self.reception._strangers):
            lines.close()
        self.listener.close()
        self.selector.close()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def is_closed(lines: MessageSocket) -> bool:
    lines.connection.settimeout(0.1)
    try:
        while True:
            lines.receive()
    except EOFError:  # of a time that is over, too
        lines.connection.setblocking(False)
        try:
            return lines.connection.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True


def test_the_reception_closes_what_is_given_up_and_refuses_it_afterwards(desk: Desk) -> None:
    agents = [desk.agent(node) for node in range(3)]
    assert sorted(desk.links) == [0, 1, 2]
    desk.reception.lose(1, "no word")
    (start,) = agents[1].receive()
    assert start["kind"] == "start"
    agents.append(desk.joined(1))
    for closed in (agents[1], agents[3]):
        assert is_closed(closed)
    assert desk.nodes.said[-1] == "n1 was given up, and is not taken in again: no word"
    assert sorted(desk.links) == [0, 2]
    desk.close()


def test_a_node_whose_step_and_connection_end_in_the_same_turn_is_lost_once(desk: Desk) -> None:
    agents = [desk.agent(node) for node in range(3)]
    agents[1].close()
    found = desk.selector.select(1)
    desk.reception.lose(1, "the step of its agent ended with exit code 1")  # heard first
    for key, _ in found:
        key.data()
    assert sorted(desk.links) == [0, 2]
    desk.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"port": None},
        {"port": "1"},
        {"port": 65536},
        {"port": -1},
        {"port": True},
        {"name": None},
        {"name": 7},
    ],
    ids=str,
)
def test_a_hello_that_is_none_costs_its_node(desk: Desk, changes: dict[str, Any]) -> None:
    assert is_closed(desk.agent(1, **changes))
    assert desk.nodes.coordinator.given_up() == {1}
    assert not is_closed(desk.agent(2))
    assert list(desk.links) == [2]
    desk.close()


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ({"kind": "dead", "restart": 1, "rank": 2, "code": 1, "error": ""}, "dead without told"),
        ({"kind": "dead", "restart": 1, "rank": None, "code": 1, "error": "", "told": False}, "dead with rank None"),
        ({"kind": "ended", "restart": 1, "port": 1, "facts": {}}, "ended without memory"),
        ({"kind": "ended", "restart": 1, "port": 1, "facts": {}, "memory": [[1, 2]]}, "ended with memory [[1, 2]]"),
        ({"kind": "ended", "restart": 1, "port": 0.5, "facts": {}, "memory": []}, "ended with port 0.5"),
        ({"kind": "beat", "restart": 1, "standing": [[1]]}, "beat with standing [[1]]"),
        ({"kind": "beat", "restart": 1, "standing": 7}, "beat with standing 7"),
        ({"kind": "stepped", "restart": 1}, "stepped without time"),
        ({"kind": "started", "restart": 1, "process": 1.0, "initialised": 1.0}, "started without loaded"),
        ({"kind": "health"}, "health without facts"),
        ({"kind": "clock", "sent": "x", "here": 1.0}, "clock with sent 'x'"),
    ],
)
def test_an_agent_that_says_what_nobody_understands_loses_its_node_and_no_more(
    desk: Desk, words: dict[str, Any], wrong: str
) -> None:
    agents = [desk.agent(node) for node in range(3)]
    agents[1].send(**words)
    desk.turn()
    assert sorted(desk.links) == [0, 2]
    assert desk.nodes.coordinator.given_up() == {1}
    (lost,) = desk.nodes.coordinator._current.deaths
    assert lost.error == f"its agent says what nobody understands: {wrong}"
    desk.close()


def test_a_connection_beyond_few_open_files_raises_their_limit(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []
    monkeypatch.setattr(connections, "raise_open_file_limit", lambda: raised.append(1))
    desk.agent(0)
    assert not raised
    monkeypatch.setattr(connections, "FEW_FILES", 1)
    desk.agent(1)
    assert raised
    desk.close()


@pytest.mark.parametrize("words", [b"[" * 100_000 + b"\n", b"1" * 5000 + b"\n", b"\xff\n", b"{}\n", b"7\n"])
def test_words_that_are_no_message_end_their_connection_alone(desk: Desk, words: bytes) -> None:
    stranger, agent = desk.connect(), desk.agent(1)
    for lines in (stranger, agent):
        lines.connection.sendall(words)
        desk.turn()
        assert is_closed(lines)
    assert desk.nodes.coordinator.given_up() == {1}
    desk.close()


def test_every_message_of_a_real_agent_is_understood() -> None:
    messages: list[dict[str, Any]] = [
        {"kind": "ended", "restart": 1, "port": 1, "facts": {}, "memory": [(1, 7, "hash", False)]},
        {"kind": "beat", "restart": 0, "standing": None},
        {"kind": "beat", "restart": 1, "standing": [(1, 9, "forward", 7, 61.0, 60.0, "")]},
        {"kind": "asked", "why": "SIGTERM"},
        {"kind": "unheard of"},
    ]
    assert [agent_messages.message_error(json.loads(json.dumps(message))) for message in messages] == [""] * len(
        messages
    )


def test_a_stranger_that_says_nothing_is_closed_after_a_while(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger, agent = desk.connect(), desk.agent(1)
    desk.reception.look()
    assert not is_closed(stranger)
    now = time.monotonic()
    monkeypatch.setattr(authentication, "HANDSHAKE_SECONDS", -1.0)
    desk.reception.look()
    assert is_closed(stranger)
    assert not is_closed(agent)
    assert time.monotonic() - now < 30
    desk.close()


class Full:
    """A listener of a process that has too many open files for a while."""

    def __init__(self, real: socket.socket) -> None:
        self._real, self.tries, self.full = real, 0, True

    def accept(self) -> tuple[socket.socket, Any]:
        self.tries += 1
        if self.full:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._real.accept()

    def fileno(self) -> int:
        return self._real.fileno()


def test_a_connection_that_cannot_be_accepted_is_tried_now_and_then(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full(desk.listener)
    desk.selector.unregister(desk.listener)
    desk.reception.listener = full  # type: ignore[assignment]
    desk.selector.register(full, selectors.EVENT_READ, desk.reception._accept)
    desk.connect()
    desk.turn()
    desk.reception.look()
    desk.turn()
    assert full.tries == 1
    monkeypatch.setattr(connections, "ACCEPT_SECONDS", 0.0)
    desk.reception.look()
    desk.turn()
    assert full.tries == 2
    assert desk.said == ["no agent's connection can be accepted for now: Too many open files"]
    full.full = False
    desk.reception.look()
    desk.agent(1)
    assert list(desk.links) == [1]
    desk.close()


@pytest.mark.slow
@pytest.mark.long
def test_a_connection_of_another_job_is_not_heard(make_run: MakeRun) -> None:
    nodes = Agents(make_run, "0:0:7:told")

    def stands() -> bool:
        assert nodes.agents[0].poll() is None, nodes.log()
        return (nodes.attempt.path / "at-1-7-0").exists()

    wait_for(stands, words=nodes.log)
    hello = b'{"kind": "hello", "node": 1, "job": "1", "attempt": 1, "name": "x", "port": 1}\n'
    for words in (hello, hello.replace(b"hello", b"answer"), b"GET / HTTP/1.1\r\n\r\n", b'{"kind": "leave"}\n'):
        with socket.create_connection(("127.0.0.1", nodes.port), 300) as stranger:
            assert b"challenge" in stranger.recv(1000)
            stranger.sendall(words)
            assert stranger.recv(100) == b""
    found = RefusedConnections.read(nodes.attempt.refused_connections)
    assert found is not None
    assert found.address == "127.0.0.1"
    nodes.agents[1].send_signal(signal.SIGUSR2)  # to one node alone: its ranks have heard it, and this test ends all
    nodes.attempt.stop.touch()
    assert nodes.wait() == [0, 0], nodes.log()
