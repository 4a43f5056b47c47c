"""The agent's side of the server that forks a node's ranks: a program that has done the imports, and computes nothing.

For a program that is not relayrun's own `agent.start_server` stands in its place, and starts them. What both do is in
`agent.rank_server`.

    agent → server    fork {round, rank, arguments, environment} · end · signal {number}
    server → agent    dead {round, rank, code, told}: whether it lived when it was to be ended
                      · unable {error}: the imports failed · serving {pid}: they are done
    rank 0 → agent    started, stepped {round, ...}

Orders may be sent while it still imports. Its ranks hold the same socket: its end says that none of them lives.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from relayrun.control.agent.lines import MessageSocket
from relayrun.control.scheduler.tasks import die_with_parent

RANK_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
"""Signals that are for the ranks; some sites' Slurm sends them to every process of a step."""

SERVER_OBEY_SECONDS = 30.0
"""How long a server may take to end its ranks; then it is killed. It may be stopped, or still import."""
SERVER_GONE_SECONDS = 2.0
"""How long a server may take to end when its socket is closed; then it is killed, and waited for once more."""


def _prepare_server(ignored: Collection[signal.Signals]) -> None:
    die_with_parent(signal.SIGKILL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


class RankServerProcess:
    """One server; it starts with this object."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, ignored: Collection[signal.Signals] = ()
    ) -> None:
        """Start `command` with these variables besides the agent's own. Its standard input is the socket.

        `ignored`: signals that are for the ranks, besides the usual ones.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                env={**os.environ, **environment},
                preexec_fn=partial(_prepare_server, {*RANK_SIGNALS, *ignored}),
            )
        self.lines, self.pids = MessageSocket(ours), {self._process.pid}
        """Processes of the server: what was started, and what says that it serves."""
        self.serving = False
        """Whether its imports are done."""
        self._began = time.monotonic()
        self._told_to_end: float | None = None
        self.ends = os.pidfd_open(self._process.pid)
        """Readable when it has ended; its socket may be held open by what its ranks have left."""

    def serves(self, pid: int) -> None:
        """It has said so."""
        self.serving = True
        self.pids.add(pid)

    def end_ranks(self) -> None:
        """Have it end its ranks."""
        self._told_to_end = time.monotonic()
        self.lines.send("end")

    def ranks_ended(self) -> None:
        """They have ended."""
        self._told_to_end = None

    def hangs(self, *, import_seconds: float) -> str:
        """Why it is to be killed, in words: it does not do what it is told; empty where it may still."""
        now = time.monotonic()
        if not self.serving and now - self._began > import_seconds:
            return f"the server that forks ranks has not done its imports within {import_seconds:g} s"
        if self._told_to_end is None or now - self._told_to_end <= SERVER_OBEY_SECONDS:
            return ""
        if not self.serving:
            return f"the server that forks ranks was still in its imports after {now - self._began:.0f} s"
        return f"the server that forks ranks did not end them within {SERVER_OBEY_SECONDS:g} s"

    def kill(self) -> None:
        """Kill it, and with it its ranks; `ends` tells when it is gone."""
        self._process.kill()

    def end(self) -> None:
        """End it, and with it its ranks, which die with their parent."""
        self._process.kill()
        self.gone()

    def gone(self) -> int:
        """Its socket is closed, or it has ended; return how it ended, as `subprocess` says it."""
        self.lines.close()
        os.close(self.ends)
        for last in (False, True):
            try:
                return self._process.wait(SERVER_GONE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                if last:
                    break
        return -signal.SIGKILL
