"""Connections of the coordinator: it accepts the agents, passes on their messages, and notices a lost agent."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from relayrun.control.agent import messages
from relayrun.control.agent.coordinator import Coordinator
from relayrun.control.agent.messages import Message, MessageSocket

UNIDENTIFIED_SECONDS = 60.0
"""Seconds after which a connection without a hello is closed."""
ACCEPT_SECONDS = 1.0
"""Seconds without a new connection after one could not be accepted, for example with too many open files."""


@dataclass(eq=False)
class AgentConnections:
    """Connections of a coordinator."""

    coordinator: Coordinator
    """Uses the same `links`."""
    links: dict[int, MessageSocket]
    """By node number; at first they hold the agent in this process, if any."""
    listener: socket.socket | None
    """Socket to which the other agents connect; None without other agents."""
    job: Message
    """`attempt` and `job`, which every hello must contain: ports of jobs may meet."""
    say: Callable[[str], None]
    """Writes a line into the job's log."""

    def __post_init__(self) -> None:
        self._strangers: dict[MessageSocket, float] = {}
        """Connections without a hello so far, and their start by `time.monotonic`."""
        self._refused: float | None = None
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

    @property
    def pause(self) -> float:
        """Seconds after which `look` must be called again."""
        return self.coordinator.pause

    def look(self) -> None:
        """Handle everything that no message announces; called now and then."""
        self.coordinator.look()
        for node, seconds in self.coordinator.silent():
            self.lose(node, f"no word from its agent for {seconds:.0f} s")
        now = time.monotonic()
        for lines, since in [*self._strangers.items()]:
            if now - since > UNIDENTIFIED_SECONDS:
                self._close(lines)
        if self.listener is not None and self._refused is not None and now - self._refused >= ACCEPT_SECONDS:
            self._refused = None
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

    def _accept(self) -> None:
        assert self.listener is not None
        try:
            lines = MessageSocket(self.listener.accept()[0])
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError as error:  # it would be tried again at once, and for ever
            self._selector.unregister(self.listener)
            self._refused = time.monotonic()
            if not self._said:
                self.say(f"no agent's connection can be accepted for now: {error.strerror or error}")
            self._said = True
            return
        self._strangers[lines] = time.monotonic()
        self._selector.register(lines, selectors.EVENT_READ, partial(self._read, lines, None))

    def _read(self, lines: MessageSocket, node: int | None) -> None:
        """Pass on the messages that have come. `node`: the owner of the connection; None before its hello."""
        try:
            for message in lines.receive():
                if node is None:
                    node = self._welcome(lines, message)
                elif wrong := messages.message_error(message):
                    self.lose(node, f"its agent says what nobody understands: {wrong}")
                    return
                self.coordinator.hear(node, message)
        except EOFError:
            if node is not None and self.links.get(node) is lines:
                self.lose(node, "its agent is gone")
            else:  # a stranger, or one that was told to leave
                self._close(lines)

    def _welcome(self, lines: MessageSocket, hello: Message) -> int:
        """Return the node of a first message. Raises EOFError if it does not belong to this job."""
        node = hello.get("node")
        ours = hello["kind"] == "hello" and all(hello.get(name) == value for name, value in self.job.items())
        if not ours or messages.message_error(hello) or not isinstance(node, int):
            raise EOFError
        if not self.coordinator.expects(node):
            raise EOFError
        self._strangers.pop(lines, None)
        self.links[node] = lines
        self._selector.modify(lines, selectors.EVENT_READ, partial(self._read, lines, node))
        return node
