"""Connections of the coordinator: it accepts the agents, passes on their messages, and notices a lost agent.

A peer that does not prove in time that it belongs to the attempt is refused; the attempt's `refused_connections.json`
counts them. A failing peer costs its own node.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from relayrun.control.agent import authentication
from relayrun.control.agent.authentication import AttemptKey
from relayrun.control.agent.coordinator import Coordinator
from relayrun.control.agent.messages import GONE, Message, MessageSocket, message_error
from relayrun.control.rundir.records import RefusedConnections
from relayrun.files import raise_open_file_limit

ACCEPT_SECONDS = 1.0
"""Seconds without a new connection after one could not be accepted, for example with too many open files; and between
two records of refused ones."""
MOST_STRANGERS = 256
"""Maximum connections without a proof; the oldest of the address with most of them makes room."""
FEW_FILES = 500
"""Open files beyond which the limit of them is raised: its usual value, 1,024, is too low for a thousand agents."""
NARROW_SECONDS = 30.0
"""Seconds without a connection after which the coordinator listens on all addresses: other nodes may know this one by
another address."""


class Stranger(NamedTuple):
    """A connection without a proof so far: its peer, the nonce of its challenge, its start by `time.monotonic`."""

    address: str
    nonce: str
    since: float


@dataclass(eq=False)
class AgentConnections:
    """Connections of a coordinator."""

    coordinator: Coordinator
    """Uses the same `links`."""
    links: dict[int, MessageSocket]
    """By node number; at first they hold the agent in this process, if any."""
    listener: socket.socket | None
    """Socket to which the other agents connect; None without other agents."""
    key: AttemptKey
    record: Path
    """File for the refused connections."""
    say: Callable[[str], None]
    """Writes a line into the job's log."""

    def __post_init__(self) -> None:
        self._strangers: dict[MessageSocket, Stranger] = {}
        self._began = time.monotonic()
        self._joined = False
        """An agent has reached the listener, or it is on all addresses."""
        self._refused: RefusedConnections | None = None
        self._recorded = -ACCEPT_SECONDS
        """Time of the last record, by `time.monotonic`; infinite if it is complete."""
        self._full_since: float | None = None
        """Time at which a connection could not be accepted; None otherwise."""
        self._said = False

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register every socket; the data of a key is the function to call when it is readable."""
        self._selector = selector
        for node, lines in self.links.items():
            selector.register(lines, selectors.EVENT_READ, partial(self._read, lines, node))
        if self.listener is not None:
            self.listener.setblocking(False)  # who connected may have gone again
            selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def look(self) -> None:
        """Handle everything that no message announces; called now and then."""
        self.coordinator.look()
        for node, seconds in self.coordinator.silent():
            self.lose(node, f"no word from its agent for {seconds:.0f} s")
        now = time.monotonic()
        for lines, stranger in [*self._strangers.items()]:
            if now - stranger.since > authentication.HANDSHAKE_SECONDS:
                self._refuse(lines, f"no proof within {authentication.HANDSHAKE_SECONDS:g} s")
        if now - self._recorded >= ACCEPT_SECONDS:
            self.close()
        if self.listener is not None and self._full_since is not None and now - self._full_since >= ACCEPT_SECONDS:
            self._full_since = None
            self._selector.register(self.listener, selectors.EVENT_READ, self._accept)
        elif self.listener is not None and not self._joined and now - self._began > NARROW_SECONDS:
            self._listen_on_all_addresses(self.listener)

    def close(self) -> None:
        """Write the record of the refused connections."""
        if self._refused is not None:
            self._recorded = float("inf")
            with contextlib.suppress(OSError):  # the log has the words
                self._refused.write(self.record)

    def _listen_on_all_addresses(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self._joined, self.listener = True, None
        self._selector.unregister(listener)
        listener.close()
        self.say(f"no agent has reached {host}:{port} for {NARROW_SECONDS:.0f} s; listening on all addresses")
        with contextlib.suppress(OSError):  # the port is taken: the missing nodes are given up in time
            self.listener = authentication.listen("", port)
            self.listener.setblocking(False)
            self._selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def lose(self, node: int, why: str) -> None:
        """Give this node up: its later messages are ignored."""
        if (lines := self.links.pop(node, None)) is not None:
            self._close(lines)
        self.coordinator.lose(node, why)

    def _close(self, lines: MessageSocket) -> None:
        """Close a connection once, even if the selector still reports it in this turn."""
        self._strangers.pop(lines, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(lines)
        lines.close()

    def _refuse(self, lines: MessageSocket, why: str) -> None:
        """Close a connection that does not belong to the job."""
        address, count = self._strangers[lines].address, 1 if self._refused is None else self._refused.count + 1
        self._close(lines)
        self._refused = RefusedConnections(count=count, address=address, why=why, time=time.time())
        self._recorded = min(self._recorded, time.monotonic())
        if count & (count - 1) == 0:  # the first, second, fourth, ...: a flood must not fill the log
            self.say(self._refused.told)

    def _accept(self) -> None:
        assert self.listener is not None
        try:
            connection, address = self.listener.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError as error:  # it would be tried again at once, and for ever
            self._selector.unregister(self.listener)
            self._full_since = time.monotonic()
            if not self._said:
                self.say(f"no agent's connection can be accepted for now: {error.strerror or error}")
            self._said = True
            return
        if connection.fileno() > FEW_FILES:
            raise_open_file_limit()
        lines = MessageSocket(connection, longest=authentication.LONGEST_HANDSHAKE)
        self._strangers[lines] = stranger = Stranger(str(address[0]), secrets.token_hex(16), time.monotonic())
        self._selector.register(lines, selectors.EVENT_READ, partial(self._read, lines, None))
        lines.send("challenge", nonce=stranger.nonce)
        if len(self._strangers) > MOST_STRANGERS:
            most = Counter(each.address for each in self._strangers.values()).most_common(1)[0][0]
            oldest = next(old for old, each in self._strangers.items() if each.address == most)
            self._refuse(oldest, f"more than {MOST_STRANGERS} connections without a proof")

    def _read(self, lines: MessageSocket, node: int | None) -> None:
        """Pass on the messages that have come. `node`: the owner of the connection; None before its proof."""
        try:
            messages = lines.receive()
            if node is None:
                self._welcome(lines, messages)
                return
        except EOFError as error:
            if node is not None and self.links.get(node) is lines:
                self.lose(node, "its agent is gone" if error.args == (GONE,) else f"its agent's connection: {error}")
            elif lines in self._strangers:
                self._refuse(lines, str(error))
            else:  # an agent that was told to leave
                self._close(lines)
            return
        for message in messages:
            if wrong := message_error(message):
                self.lose(node, f"its agent says what nobody understands: {wrong}")
                return
            try:
                self.coordinator.hear(node, message)
            except Exception as error:
                traceback.print_exc()
                self.lose(node, f"its message {message['kind']} is not handled: {type(error).__name__}: {error}")
                return

    def _welcome(self, lines: MessageSocket, messages: list[Message]) -> None:
        """Take in the agent of a node. Raises EOFError if the peer does not prove that it belongs to this attempt, or
        its node has an agent already."""
        if not messages:
            return
        if len(messages) > 1:
            raise EOFError("it says more than the answer to the challenge")
        node = self.key.admit(lines, self._strangers[lines].nonce, messages[0])
        if not self.coordinator.expects(node):
            raise EOFError(f"node {node} is not expected")
        del self._strangers[lines]
        self._joined = True
        self.links[node] = lines
        self._selector.modify(lines, selectors.EVENT_READ, partial(self._read, lines, node))
