"""Connections of the coordinator: it accepts the agents, hands on what they say, and sees when one is gone."""

from __future__ import annotations

import selectors
import socket
from functools import partial

from relayrun.agent.coordinator import Coordinator
from relayrun.agent.lines import Lines, Message


class Reception:
    """Connections of a coordinator.

    Args:
        coordinator: has the same `links`, by node number; that of an agent in this process is there at first.
        listener: where the other agents connect; None where there are none.
        job: what every agent's hello must say, `attempt` and `job`: ports of jobs may meet.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        links: dict[int, Lines],
        *,
        listener: socket.socket | None,
        job: Message,
    ) -> None:
        self._coordinator, self._links, self._job = coordinator, links, job
        self._listener = listener

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register what is to be read from; the data of each key is what to call then."""
        self._selector = selector
        for node, lines in self._links.items():
            selector.register(lines, selectors.EVENT_READ, partial(self._read, lines, node))
        if self._listener is not None:
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

    def lose(self, node: int, why: str) -> None:
        """Give this node up: nothing that it says is heard any more."""
        if (lines := self._links.pop(node, None)) is not None:
            self._selector.unregister(lines)
            lines.close()
        self._coordinator.lose(node, why)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            lines = Lines(self._listener.accept()[0])
        except OSError:  # it has gone again
            return
        self._selector.register(lines, selectors.EVENT_READ, partial(self._read, lines, None))

    def _read(self, lines: Lines, node: int | None) -> None:
        """Hand on what has come; `node`: whose connection it is, None before its hello."""
        try:
            for message in lines.receive():
                if node is None:
                    node = self._welcome(lines, message)
                self._coordinator.hear(node, message)
        except EOFError:
            if node is not None and self._links.get(node) is lines:
                self.lose(node, "its agent is gone")
            else:  # a stranger, or one that was told to leave
                self._selector.unregister(lines)
                lines.close()

    def _welcome(self, lines: Lines, hello: Message) -> int:
        """The node that a first message comes from. Raises EOFError where it is none of this job's."""
        node = hello.get("node")
        ours = hello["kind"] == "hello" and all(hello.get(name) == value for name, value in self._job.items())
        if not ours or not isinstance(node, int) or not self._coordinator.expects(node):
            raise EOFError
        self._links[node] = lines
        self._selector.modify(lines, selectors.EVENT_READ, partial(self._read, lines, node))
        return node
