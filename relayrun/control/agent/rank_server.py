"""The server that starts the ranks of a node, and the agent's side of it.

    agent → server    fork {restart, rank, arguments, environment} · end · signal {number}
    server → agent    dead {restart, rank, code, told} · unable {error} · serving {pid}
    rank 0 → agent    started, stepped {restart, ...}

`train.fork_server` forks the ranks from itself; `agent.spawn_server` starts a program for each. The agent may send
orders while the server still imports. The ranks hold the same socket: its end says that no rank lives.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from relayrun.control.agent.messages import Message, MessageSocket
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local_srun import die_with_parent, is_dying
from relayrun.errors import RelayrunError


class StartedProcess(NamedTuple):
    """A process started by an order."""

    pid: int
    wait: Callable[[], int]
    """Waits for its end, once, and returns its exit code; negative: the signal that ended it."""


class RankServer(ABC):
    """The started children, by the descriptor that reports their end, and the socket of the agent."""

    def __init__(self, agent: socket.socket, run: Run) -> None:
        self.agent, self.run = MessageSocket(agent), run
        self._restart = 1
        """The newest restart before whose ranks the code was judged."""
        self._children: dict[int, tuple[StartedProcess, Message]] = {}
        """Each child that was not waited for, with its order."""
        self._ended: set[int] = set()
        """Children that were alive when they were told to end."""
        self._poll = select.poll()
        self._poll.register(self.agent, select.POLLIN)

    def load_plan(self) -> Plan:
        """Return the plan. Tells the agent, and raises UntrustedError, if another user can write it or the code."""
        try:
            return Plan.load_before_ranks(self.run)
        except RelayrunError as error:  # the agent records it for each rank
            self.agent.send("unable", error=f"{type(error).__name__}: {error}")
            raise

    @abstractmethod
    def start(self, order: Message) -> StartedProcess | None:
        """Start the rank of an order (`fork`). None: nothing was started, and the agent has been told so."""

    def serve(self) -> None:
        """Obey the agent until it is gone; the children die with this process."""
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
        """Descriptors of other children, which a forked child must close."""
        return self._children.keys()

    def _obey(self, order: Message) -> None:
        if order["kind"] == "fork":
            if order["restart"] != self._restart:  # hours later
                self.load_plan()
                self._restart = order["restart"]
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
        self.agent.send("dead", restart=order["restart"], rank=order["rank"], code=code, told=told)


RANK_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
"""Signals for the ranks; the Slurm of some sites sends them to every process of a step."""

SERVER_OBEY_SECONDS = 30.0
"""Seconds for a server to end its ranks; then it is killed. It may be stopped, or still import."""
SERVER_GONE_SECONDS = 2.0
"""Seconds for a server to end after its socket is closed; then it is killed, and waited for once more."""


def _prepare_server(ignored: Collection[signal.Signals]) -> None:
    die_with_parent(signal.SIGKILL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


class RankServerProcess:
    """One server, as its agent sees it; it starts with this object."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, ignored: Collection[signal.Signals] = ()
    ) -> None:
        """Start `command` with these variables besides the agent's own; the socket is its standard input. `ignored`:
        signals for the ranks, besides the usual ones."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                env={**os.environ, **environment},
                preexec_fn=partial(_prepare_server, {*RANK_SIGNALS, *ignored}),
            )
        self.lines, self.pids = MessageSocket(ours), {self._process.pid}
        """Connection to the server, and its processes: the started one, and the one that says that it serves."""
        self.serving = False
        """Its imports are done."""
        self._began = time.monotonic()
        self._told_to_end: float | None = None
        self.ends = os.pidfd_open(self._process.pid)
        """Readable when it has ended; processes of its ranks may hold its socket open."""

    def serves(self, pid: int) -> None:
        """Note that it serves."""
        self.serving = True
        self.pids.add(pid)

    def end_ranks(self) -> None:
        """Have it end its ranks."""
        self._told_to_end = time.monotonic()
        self.lines.send("end")

    def ranks_ended(self) -> None:
        """Note that they have ended."""
        self._told_to_end = None

    def hangs(self, *, import_seconds: float) -> str:
        """Return in words why it must be killed; empty if it may still obey."""
        now = time.monotonic()
        if not self.serving and now - self._began > import_seconds:
            return f"the server that forks ranks has not done its imports within {import_seconds:g} s"
        if self._told_to_end is None or now - self._told_to_end <= SERVER_OBEY_SECONDS:
            return ""
        if not self.serving:
            return f"the server that forks ranks was still in its imports after {now - self._began:.0f} s"
        return f"the server that forks ranks did not end them within {SERVER_OBEY_SECONDS:g} s"

    def kill(self) -> None:
        """Kill it, and with it its ranks; `ends` reports its end."""
        self._process.kill()

    def end(self) -> None:
        """End it, and with it its ranks, which die with their parent."""
        self._process.kill()
        self.gone()

    def gone(self) -> int:
        """Close its socket, and return how it ended, as `subprocess` reports it."""
        self.lines.close()
        os.close(self.ends)
        for _ in range(2):
            try:
                return self._process.wait(SERVER_GONE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return -signal.SIGKILL
