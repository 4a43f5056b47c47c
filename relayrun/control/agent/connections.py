"""Connections of the coordinator: it accepts the agents, hands on what they say, and sees when one is gone."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from relayrun.control.agent import messages
from relayrun.control.agent.coordinator import Coordinator
from relayrun.control.agent.messages import Message, MessageSocket

UNIDENTIFIED_SECONDS = 60.0
"""How long a connection may say nothing before it is closed."""
ACCEPT_SECONDS = 1.0
"""How long no connection is accepted after one could not be, as where this process has too many open files."""


class AgentConnections:
    """Connections of a coordinator.

    Args:
        coordinator: has the same `links`, by node number; that of an agent in this process is there at first.
        listener: where the other agents connect; None where there are none.
        job: what every agent's hello must say, `attempt` and `job`: ports of jobs may meet.
        say: writes a line into the job's log.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        links: dict[int, MessageSocket],
        *,
        listener: socket.socket | None,
        job: Message,
        say: Callable[[str], None],
    ) -> None:
        self._coordinator, self._links, self._job, self._say = coordinator, links, job, say
        self._listener = listener
        self._strangers: dict[MessageSocket, float] = {}
        """Connections that have not said whose they are, and since when, by `time.monotonic`."""
        self._refused: float | None = None
        """When a connection could not be accepted; None while they are."""
        self._said = False

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register what is to be read from; the data of each key is what to call then."""
        self._selector = selector
        for node, lines in self._links.items():
            selector.register(lines, selectors.EVENT_READ, partial(self._read, lines, node))
        if self._listener is not None:
            self._listener.setblocking(False)  # who connected may have gone again
            selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def pause(self) -> float:
        """Seconds after which `look` is to be called again."""
        return self._coordinator.pause

    def look(self) -> None:
        """Now and then: what nobody sends a message of."""
        self._coordinator.look()
        for node, seconds in self._coordinator.silent():
            self.lose(node, f"no word from its agent for {seconds:.0f} s")
        now = time.monotonic()
        for lines, since in [*self._strangers.items()]:
            if now - since > UNIDENTIFIED_SECONDS:
                self._close(lines)
        if self._listener is not None and self._refused is not None and now - self._refused >= ACCEPT_SECONDS:
            self._refused = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def lose(self, node: int, why: str) -> None:
        """Give this node up: nothing that it says is heard any more."""
        if (lines := self._links.pop(node, None)) is not None:
            self._close(lines)
        self._coordinator.lose(node, why)

    def _close(self, lines: MessageSocket) -> None:
        """Close a connection; once, though there may be news of it in the same turn."""
        self._strangers.pop(lines, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(lines)
        lines.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            lines = MessageSocket(self._listener.accept()[0])
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError as error:  # it would be tried again at once, and for ever
            self._selector.unregister(self._listener)
            self._refused = time.monotonic()
            if not self._said:
                self._say(f"no agent's connection can be accepted for now: {error.strerror or error}")
            self._said = True
            return
        self._strangers[lines] = time.monotonic()
        self._selector.register(lines, selectors.EVENT_READ, partial(self._read, lines, None))

    def _read(self, lines: MessageSocket, node: int | None) -> None:
        """Hand on what has come; `node`: whose connection it is, None before its hello."""
        try:
            for message in lines.receive():
                if node is None:
                    node = self._welcome(lines, message)
                elif wrong := messages.message_error(message):
                    self.lose(node, f"its agent says what nobody understands: {wrong}")
                    return
                self._coordinator.hear(node, message)
        except EOFError:
            if node is not None and self._links.get(node) is lines:
                self.lose(node, "its agent is gone")
            else:  # a stranger, or one that was told to leave
                self._close(lines)

    def _welcome(self, lines: MessageSocket, hello: Message) -> int:
        """The node that a first message comes from. Raises EOFError where it is none of this job's."""
        node = hello.get("node")
        ours = hello["kind"] == "hello" and all(hello.get(name) == value for name, value in self._job.items())
        if (
            not ours
            or messages.message_error(hello)
            or not isinstance(node, int)
            or not self._coordinator.expects(node)
        ):
            raise EOFError
        self._strangers.pop(lines, None)
        self._links[node] = lines
        self._selector.modify(lines, selectors.EVENT_READ, partial(self._read, lines, node))
        return node
