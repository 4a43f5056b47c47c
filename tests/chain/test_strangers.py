"""A stranger at the coordinator's port, who knows everything but the secret of the attempt."""

from __future__ import annotations

import json
import math
import os
import random
import re
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.agent import authentication, connections
from relayrun.control.agent.__main__ import join_coordinator
from relayrun.control.agent.authentication import AttemptKey, interface_towards, listen
from relayrun.control.agent.messages import MESSAGE_FIELDS, MessageSocket, message_error
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import RefusedConnections
from relayrun.errors import RunDirError
from relayrun.files import read_json_lines
from tests.waiting import wait_for

from .conftest import MakeRun
from .test_agents import Nodes as Agents
from .test_agents import Steps
from .test_reception import Desk, is_closed


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.close()


def challenge(desk: Desk) -> tuple[MessageSocket, str]:
    lines = desk.connect()
    desk.turn()
    (found,) = lines.receive()
    assert found["kind"] == "challenge"
    return lines, found["nonce"]


def answer(desk: Desk, node: int = 1) -> tuple[MessageSocket, dict[str, Any]]:
    """A connection, and the right answer to its challenge, which has not been sent."""
    lines, nonce = challenge(desk)
    own = secrets.token_hex(16)
    proof = desk.key.digest("agent", node, (nonce, own)).hex()
    return lines, {"kind": "answer", "node": node, "nonce": own, "proof": proof}


def assert_refused(desk: Desk, lines: MessageSocket, why: str) -> None:
    desk.turn()
    assert is_closed(lines)
    assert desk.refused().why == why
    assert not desk.links
    assert not desk.nodes.coordinator.given_up()
    desk.agent(1)  # and the true one finds its place
    assert list(desk.links) == [1]


WRONG = "it does not know the secret of this attempt"


def test_an_agent_and_its_coordinator_prove_themselves(desk: Desk) -> None:
    lines, right = answer(desk)
    lines.send(**right)
    desk.turn()
    assert list(desk.links) == [1]
    assert not desk.record.exists()


@pytest.mark.parametrize(
    "changes",
    [{"secret": bytes(32)}, {"job": "2"}, {"attempt": 2}],
    ids=str,
)
def test_a_wrong_secret_or_another_job_proves_nothing(desk: Desk, changes: dict[str, Any]) -> None:
    wrong = replace(desk.key, **changes)
    lines, nonce = challenge(desk)
    lines.send("answer", node=1, nonce="n", proof=wrong.digest("agent", 1, (nonce, "n")).hex())
    assert_refused(desk, lines, WRONG)
    assert desk.said[0] == f"refused connections to this job: 1; the newest from 127.0.0.1: {WRONG}"


def test_a_replayed_answer_proves_nothing(desk: Desk) -> None:
    overheard, right = answer(desk, 2)
    overheard.send(**right)
    desk.turn()
    desk.reception.lose(2, "gone")
    lines, _ = challenge(desk)
    lines.send(**right)
    desk.turn()
    assert is_closed(lines)
    assert desk.refused().why == WRONG


def test_the_coordinators_own_words_prove_nothing(desk: Desk) -> None:
    """The stranger gives a challenge back, and with it what the coordinator answers."""
    lines, nonce = challenge(desk)
    lines.send("answer", node=1, nonce=nonce, proof=nonce)
    desk.turn()
    assert is_closed(lines)
    lines, right = answer(desk)
    welcome = desk.key.digest("coordinator", 1, (right["nonce"], right["nonce"])).hex()
    lines.send(**right | {"proof": welcome})
    assert_refused(desk, lines, WRONG)


def test_a_proof_of_one_node_is_none_of_another(desk: Desk) -> None:
    lines, right = answer(desk, 2)
    lines.send(**right | {"node": 1})
    assert_refused(desk, lines, WRONG)


def test_a_second_agent_of_a_node_is_refused(desk: Desk) -> None:
    desk.agent(1)
    assert is_closed(desk.joined(1))
    assert desk.refused().why == "node 1 is not expected"
    assert list(desk.links) == [1]
    assert not is_closed(desk.links[1])


@pytest.mark.parametrize(
    "words",
    [
        b'{"kind": "hello", "job": "1", "attempt": 1, "node": 1, "name": "x", "port": 1}\n',
        b'{"kind": "answer", "node": 1}\n',
        b'{"kind": "answer", "node": true, "nonce": "n", "proof": "p"}\n',
        b'{"kind": "answer", "node": 1, "nonce": ["n"], "proof": "p"}\n',
        b'{"kind": "answer", "node": 1, "nonce": "n", "proof": "\\ud800"}\n',
        b'{"kind": "beat", "restart": 0}\n{"kind": "beat", "restart": 0}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 2000,
        b"[" * 1000 + b"\n",
    ],
)
def test_words_without_a_proof_are_refused(desk: Desk, words: bytes) -> None:
    lines, _ = challenge(desk)
    lines.connection.sendall(words)
    desk.turn()
    assert is_closed(lines)
    assert desk.refused().count == 1
    assert not desk.links


def test_what_is_said_behind_an_answer_is_not_heard_without_its_hmac(desk: Desk) -> None:
    lines, right = answer(desk)
    data = b"".join(json.dumps(each).encode() + b"\n" for each in (right, {"kind": "asked", "why": "x"}))
    lines.connection.sendall(data)
    desk.turn()
    assert is_closed(lines)
    assert not desk.links
    assert not desk.nodes.coordinator._asked


def lines_of(desk: Desk) -> tuple[socket.socket, list[bytes]]:
    """A true agent's connection, and three lines of it that have not been sent."""
    agent = desk.agent(1)
    ours, theirs = socket.socketpair()
    real, agent.connection = agent.connection, ours
    for number in range(3):
        agent.send("asked", why=str(number))
    data = theirs.recv(10_000).splitlines(keepends=True)
    ours.close()
    theirs.close()
    agent.connection = real
    return real, data


@pytest.mark.parametrize(
    "order", [(0, 0), (1,), (0, 2), (0, 1, 1)], ids=["twice", "left out", "left out later", "twice later"]
)
def test_a_line_that_is_replayed_or_left_out_ends_the_connection(desk: Desk, order: tuple[int, ...]) -> None:
    connection, data = lines_of(desk)
    connection.sendall(b"".join(data[number] for number in order))
    desk.turn()
    assert desk.nodes.coordinator.given_up() == {1}


def test_lines_in_order_are_heard_and_a_changed_one_is_not(desk: Desk) -> None:
    connection, data = lines_of(desk)
    connection.sendall(data[0])
    desk.turn()
    assert desk.nodes.coordinator._asked == "0"
    connection.sendall(data[1].replace(b'"1"', b'"7"'))
    desk.turn()
    assert desk.nodes.coordinator.given_up() == {1}


def test_a_job_that_ends_within_a_second_of_a_refusal_has_it_on_record(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "ACCEPT_SECONDS", 60.0)
    for _ in range(3):
        lines, _ = challenge(desk)
        lines.connection.sendall(b"GET /\n")
        desk.turn()
        assert desk.refused().count == 1  # `look` writes seldom
    desk.reception.close()
    found = RefusedConnections.read(desk.record)
    assert found is not None
    assert found.count == 3


def test_a_hello_that_is_slow_is_refused_in_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "HANDSHAKE_SECONDS", 0.3)
    lines, right = answer(desk)
    until = time.monotonic() + 1
    for byte in json.dumps(right).encode():  # a byte now and then is no answer in time
        try:
            lines.connection.sendall(bytes([byte]))
        except OSError:
            break
        desk.turn()
        desk.reception.look()
    assert time.monotonic() < until + 30
    assert desk.refused().why == "no proof within 0.3 s"
    monkeypatch.undo()
    desk.agent(1)


def test_two_thousand_connections_leave_room_for_the_agents(desk: Desk) -> None:
    strangers = []
    desk.agent(0)
    for number in range(2000):
        strangers.append(socket.create_connection(desk.listener.getsockname(), 300))
        desk.turn() if number % 50 == 0 else None
        if number == 1000:
            desk.agent(1)
    desk.turn()
    desk.agent(2)
    assert sorted(desk.links) == [0, 1, 2]
    assert len(desk.reception._strangers) <= connections.MOST_STRANGERS
    assert desk.refused().count >= 2000 - connections.MOST_STRANGERS
    assert len(desk.said) < 15  # a flood does not fill the log
    for each in strangers:
        each.close()


def test_a_coordinator_without_the_secret_is_no_coordinator(desk: Desk) -> None:
    with pytest.raises(EOFError, match="the program there does not know the secret"):
        stranger_as_coordinator(desk.key, lambda nonce, answer: {"kind": "welcome", "proof": "0" * 64})
    with pytest.raises(EOFError, match="does not know the secret"):  # the agent's own proof, given back
        stranger_as_coordinator(desk.key, lambda nonce, answer: {"kind": "welcome", "proof": answer["proof"]})


@pytest.mark.parametrize("words", [b"", b"junk\n", b'{"kind": "challenge", "nonce": 7}\n', b"x" * 2000])
def test_an_agent_tries_again_after_a_stranger_answered(desk: Desk, words: bytes) -> None:
    said: list[str] = []
    desk.listener.setblocking(True)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(join_coordinator, desk.listener.getsockname(), desk.key, 1, say=said.append)
        stranger, _ = desk.listener.accept()
        stranger.sendall(words)
        stranger.close()
        desk.listener.setblocking(False)
        wait_for(lambda: desk.turn() or done.done(), words="nobody answers")
        desk.opened.append(done.result())
    assert list(desk.links) == [1]
    assert len(said) == 1
    assert "does not answer as it should" in said[0]


def stranger_as_coordinator(key: AttemptKey, welcome: Any) -> None:
    ours, theirs = (MessageSocket(each) for each in socket.socketpair())
    theirs.send("challenge", nonce="n")
    with closing(ours), closing(theirs), ThreadPoolExecutor(1) as thread:
        done = thread.submit(key.join, ours, 1)
        (answer,) = theirs.receive()
        theirs.send(**welcome("n", answer))
        done.result()


def test_a_failure_in_the_coordinator_costs_the_peer_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = [desk.agent(node) for node in range(3)]
    hear = desk.nodes.coordinator._hear_of_health

    def fail(node: int, message: dict[str, Any]) -> None:
        raise ValueError("planted") if message["kind"] == "clock" else hear(node, message)

    monkeypatch.setattr(desk.nodes.coordinator, "_hear_of_health", fail)
    agents[2].send("clock", sent=1.0, here=1.0)
    desk.turn()
    assert desk.nodes.coordinator.given_up() == {2}
    assert sorted(desk.links) == [0, 1]


# --- the secret's file


def attempt_with_secret(folder: Path) -> Attempt:
    attempt = Attempt(str(folder / "0001"))
    attempt.path.mkdir()
    attempt.make_secret()
    return attempt


def test_the_secret_is_of_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        attempt = attempt_with_secret(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(attempt.secret.stat().st_mode) == 0o600
    assert len(attempt.read_secret()) == 32
    with pytest.raises(FileExistsError):
        attempt.make_secret()


@pytest.mark.parametrize("fault", ["group", "link", "short", "long", "fifo", "owner", "missing"])
def test_a_secret_that_others_may_know_is_refused(tmp_path: Path, fault: str) -> None:
    attempt = attempt_with_secret(tmp_path)
    if fault == "group":
        attempt.secret.chmod(0o640)
    elif fault in ("short", "long"):
        attempt.secret.write_bytes(bytes(31 if fault == "short" else 33))
    elif fault == "owner":
        if os.getuid():
            pytest.skip("root alone gives files away")
        os.chown(attempt.secret, 65534, -1)
    else:
        aside = attempt.secret.rename(tmp_path / "aside")
        if fault == "link":
            attempt.secret.symlink_to(aside)
        elif fault == "fifo":
            os.mkfifo(attempt.secret, 0o600)
    with pytest.raises(RunDirError):
        attempt.read_secret()


# --- where it listens


def test_the_listener_is_on_the_address_that_peers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with listen("localhost", 0) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")
    with listen("no.such.host.invalid", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    own = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: own)
    with listen("n0", 0) as listener:  # as /etc/hosts of Debian has it: no other node reaches that
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_coordinator_that_nobody_reaches_listens_everywhere(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.reception.look()
    assert desk.reception.listener is desk.listener
    monkeypatch.setattr(connections, "NARROW_SECONDS", -1.0)
    desk.reception.look()
    assert desk.reception.listener is not None
    assert desk.reception.listener.getsockname()[0] == "0.0.0.0"
    desk.listener = desk.reception.listener
    monkeypatch.undo()
    desk.reception.look()
    assert desk.reception.listener is desk.listener
    lines = MessageSocket(socket.create_connection(("127.0.0.1", desk.listener.getsockname()[1])))
    with closing(lines), ThreadPoolExecutor(1) as thread:
        done = thread.submit(desk.key.join, lines, 1)
        wait_for(lambda: desk.turn() or done.done(), words="nobody answers")
        assert list(desk.links) == [1]


def test_the_interface_of_this_machine_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") == ""
    assert interface_towards("localhost") == "lo"
    monkeypatch.setattr(authentication, "_only_here", lambda *_: True)
    assert interface_towards("127.0.0.1") == ""


# --- mutated messages

EXAMPLES: list[dict[str, Any]] = [
    {"kind": "hello", "name": "n2", "port": 1},
    {"kind": "dead", "restart": 1, "rank": 2, "code": -9, "error": "e", "told": False},
    {"kind": "ended", "restart": 1, "port": 1, "memory": [[2, 7, "hash", False]], "facts": {"tmp": 1 << 33}},
    {"kind": "beat", "restart": 1, "standing": [[2, 9, "forward", 7, 61.0, 60.0, ""]]},
    {"kind": "asked", "why": "SIGTERM"},
    {"kind": "started", "restart": 1, "process": 1.0, "initialised": 2.0, "loaded": 3.0},
    {"kind": "stepped", "restart": 2, "time": 4.0},
    {
        "kind": "health",
        "facts": {
            "shm": None,
            "tmp": 5,
            "open_files": 1024,
            "unwritable": {"tmp": "full"},
            "gpus": [{"index": 0, "ecc_uncorrected": 1, "rows_failed": False, "rows_pending": True, "slowed": 8}],
            "command": {"code": 1, "words": "no"},
            "answer": "late",
            "seconds": 0.1,
        },
    },
    {"kind": "clock", "sent": 1.0, "here": 2.0},
]
LEAVES: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    7,
    1 << 31,
    1 << 64,
    -(10**400),
    0.5,
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    "",
    "x",
    "\x1b[2J",
    "\ud800",
    "x" * 5000,
    [],
    [[]],
    [None] * 9,
    {},
    {"x": {}},
    {"shm": "x"},
    {"gpus": [{}]},
    {"unwritable": ["x"]},
    {"tmp": "x"},
    {"command": {}},
]


def mutated(message: dict[str, Any], random: random.Random) -> dict[str, Any]:
    """A message with a leaf or a whole field changed, added or left out."""
    found = json.loads(json.dumps(message))
    place: Any = found
    while True:
        keys = list(place.keys() if isinstance(place, dict) else range(len(place)))
        key = random.choice(keys) if keys else None
        if key is None or not isinstance(place[key], (dict, list)) or random.random() < 0.3:
            break
        place = place[key]
    if key is None or random.random() < 0.1:
        place.update({"x": random.choice(LEAVES)}) if isinstance(place, dict) else place.append(random.choice(LEAVES))
    elif random.random() < 0.1:
        del place[key]
    else:
        place[key] = random.choice(LEAVES)
    kind = found.get("kind")
    return found | {"kind": kind if isinstance(kind, str) else random.choice(EXAMPLES)["kind"]}


def torn(data: bytes, random: random.Random) -> bytes:
    """A line with some bytes changed, cut, or repeated."""
    at, most = random.randrange(len(data)), len(data)
    return random.choice(
        [
            data[:at] + bytes([random.randrange(256)]) + data[at + 1 :],
            data[:at] + data[random.randrange(most) :],
            data + data,
            data[:at] + b"\n" + data[at:],
        ]
    )


def fuzz(folder: Path, frames: int, seed: int) -> int:
    """Send mutated frames of node 2, which knows the secret, to a real coordinator; return how often it was lost. Nodes
    0 and 1 stay whatever it says."""
    chance, lost, sent, desks = random.Random(seed), 0, 0, 0
    while sent < frames:
        desks += 1
        desk = Desk(folder / str(desks))
        ends = [socket.socketpair() for _ in range(2)]
        desk.links.update({node: MessageSocket(ours) for node, (ours, _) in enumerate(ends)})
        for node in (0, 1):
            desk.nodes.coordinator.hear(node, {"kind": "hello", "name": f"n{node}", "port": 1})
        for _ in range(200):
            ours, theirs = socket.socketpair()
            desk.nodes.coordinator._places.lost.pop(2, None)
            lines, peer = MessageSocket(ours), MessageSocket(theirs)
            keys = os.urandom(32), os.urandom(32)
            lines.authenticate(*keys)
            peer.authenticate(*keys[::-1])
            desk.links[2] = lines
            desk.selector.register(lines, 1)
            peer.send(**EXAMPLES[0])
            for _ in range(50):
                peer.send(**mutated(chance.choice(EXAMPLES), chance))
                sent += 1
                if chance.random() < 0.01:
                    peer.connection.sendall(torn(b"x" * 64 + json.dumps(chance.choice(EXAMPLES)).encode(), chance))
                desk.reception._read(lines, 2)
                if 2 not in desk.links:
                    lost += 1
                    break
                with suppress(EOFError):
                    peer.connection.setblocking(False)
                    peer.receive()
                    peer.connection.setblocking(True)
            for _, other in ends:
                other.setblocking(False)
                with suppress(BlockingIOError):
                    other.recv(1 << 20)
            assert desk.nodes.coordinator.given_up() <= {2}
            assert desk.nodes.coordinator.code is None
            desk.reception._close(lines)
            desk.links.pop(2, None)
            peer.close()
        for _, other in ends:
            other.close()
        desk.close()
    return lost


def test_mutated_messages_cost_their_sender_alone(tmp_path: Path) -> None:
    assert fuzz(tmp_path, 20_000, seed=1) > 100


@pytest.mark.long
def test_a_million_mutated_messages_cost_their_sender_alone(tmp_path: Path) -> None:
    assert fuzz(tmp_path, 1_000_000, seed=2) > 1000


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["kind"])
def test_the_examples_are_messages_and_each_wrong_leaf_is_none(example: dict[str, Any]) -> None:
    assert message_error(example) == ""
    for name in example.keys() - {"kind"}:
        assert message_error(example | {name: ["no"]}) != ""
    assert {each["kind"] for each in EXAMPLES} == MESSAGE_FIELDS.keys()


# --- the whole job

ATTACK = """
import os, socket, json, sys, time, encodings.idna
if sys.argv[1] != "-":
    os.setuid(int(sys.argv[1]))
print("ready", flush=True)
port, job, until = int(sys.stdin.readline()), "1", time.time() + 600
while time.time() < until:
    for node in (0, 1, 2):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as c:
                hello = {"kind": "hello", "job": job, "attempt": 1, "node": node, "name": "10.6.6.6", "port": 6666}
                facts = {"kind": "health", "facts": {"tmp": "x"}}
                answer = {"kind": "answer", "node": node, "nonce": "0" * 32, "proof": "0" * 64}
                c.settimeout(2)
                got = c.recv(65536)
                c.sendall(json.dumps(answer).encode() + b"\\n" + json.dumps(hello).encode() + b"\\n")
                c.sendall(json.dumps(facts).encode() + b"\\n")
                while data := c.recv(65536):
                    got += data
                if got.count(b"\\n") != 1 or b"challenge" not in got:
                    print("HEARD", got, flush=True)
        except OSError:
            pass
    time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one step", pytest.param("spare node", marks=pytest.mark.long)])
def test_a_stranger_takes_no_place_and_changes_nothing(make_run: MakeRun, tmp_path: Path, kind: str) -> None:
    """Another user knows the job id, finds the port, and says hello as each of its nodes while the job begins. The
    second node waits until the record has some of them: it is written once a second, and not again at the end."""
    attack = [sys.executable, "-c", ATTACK, "-" if os.getuid() else "65534"]
    with subprocess.Popen(attack, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "ready\n"
        job = Agents(make_run, "1:1:7:SIGKILL") if kind == "one step" else Steps(make_run, "1:1:7:SIGKILL")
        held = job.agents[1].pid if isinstance(job, Agents) else wait_for(lambda: agent_of_second_node(job))
        os.kill(held, signal.SIGSTOP)
        port = job.port if isinstance(job, Agents) else listening_port(job.starter.pid)
        attacker.stdin.write(f"{port}\n")
        attacker.stdin.flush()
        try:
            wait_for(lambda: refused_count(job.attempt) > 2, words=job.log)
            os.kill(held, signal.SIGCONT)
            codes = job.wait() if isinstance(job, Agents) else [job.starter.wait(300)]
        finally:
            attacker.kill()
        heard = attacker.communicate()[0]
    assert not any(codes), job.log()
    assert heard == ""
    for rank in (0, 1):
        lines = list(read_json_lines(job.attempt.path / f"starts-{rank}.jsonl"))
        assert [(line["restart"], line["base"]) for line in lines] == [(1, 0), (2, 5)]
    secret = job.attempt.read_secret()
    others = [path for path in job.run.path.rglob("*") if path.is_file() and path != job.attempt.secret]
    assert len(others) > 5
    assert not [path for path in others if secret in (data := path.read_bytes()) or secret.hex().encode() in data]
    assert refused_count(job.attempt) > 2
    assert re.search(r"refused connections to this job: \d+; the newest from 127.0.0.1: it says more", job.log())


def refused_count(attempt: Attempt) -> int:
    found = RefusedConnections.read(attempt.refused_connections)
    return 0 if found is None else found.count


def agent_of_second_node(job: Steps) -> int:
    """The process of its agent; 0 before it began."""
    with suppress(AssertionError, OSError):
        return job.agent(1)
    return 0


def listening_port(pid: int) -> int:
    """The port on which a process listens."""

    def find() -> list[int]:
        links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()]
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return [int(row[1][9:], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]

    with suppress(OSError):
        wait_for(find, words="it listens nowhere")
    return find()[0]
