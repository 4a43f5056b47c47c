"""What a server does that starts the ranks of a node, for the node's agent; `agent.server` has the messages.

`training.fork_server` forks them from itself, `agent.start_server` starts a program for each. Standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import NamedTuple

from relayrun.control.agent.lines import Message, MessageSocket
from relayrun.control.scheduler.tasks import is_dying


class StartedProcess(NamedTuple):
    """A process that was started for an order."""

    pid: int
    wait: Callable[[], int]
    """Waits for its end, once, and returns its exit code; negative: the signal that ended it. Nothing else waits."""


class RankServer(ABC):
    """The children that it started, by the descriptor that tells of their end, and the socket of the agent."""

    def __init__(self, agent: socket.socket) -> None:
        self.agent = MessageSocket(agent)
        self._children: dict[int, tuple[StartedProcess, Message]] = {}
        """Each child that has not been waited for, with its order."""
        self._ended: set[int] = set()
        """Those of them that lived when they were to be ended."""
        self._poll = select.poll()
        self._poll.register(self.agent, select.POLLIN)

    @abstractmethod
    def start(self, order: Message) -> StartedProcess | None:
        """Start what an order asks for: a rank (`fork`), or the measurements of this node (`probe`).

        None: nothing was started, and the agent has been told so.
        """

    def serve(self) -> None:
        """Do what the agent orders until it is gone; its children go with this process."""
        self.agent.send("serving", pid=os.getpid())
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    self._wait_for(fd)
                    continue
                try:
                    orders = self.agent.receive()
                except EOFError:
                    return
                for order in orders:
                    self._obey(order)

    def descriptors(self) -> Collection[int]:
        """Descriptors of other children, which a child that is forked must close."""
        return self._children.keys()

    def _obey(self, order: Message) -> None:
        if order["kind"] in ("fork", "probe"):
            if (child := self.start(order)) is not None:
                fd = os.pidfd_open(child.pid)
                self._children[fd] = (child, order)
                self._poll.register(fd, select.POLLIN)
            return
        for fd, (child, _) in self._children.items():
            if order["kind"] == "end" and not is_dying(child.pid):
                self._ended.add(fd)
            number = signal.SIGKILL if order["kind"] == "end" else signal.Signals(order["number"])
            signal.pidfd_send_signal(fd, number)

    def _wait_for(self, fd: int) -> None:
        child, order = self._children.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        told = fd in self._ended
        self._ended.discard(fd)
        code = child.wait()
        if order["kind"] == "probe":
            self.agent.send("probe ended", code=code)
        else:
            self.agent.send("dead", round=order["round"], rank=order["rank"], code=code, told=told)
