"""The server that forks ranks: whose end was its own, and what it has read for all of them."""

from __future__ import annotations

import os
import select
import signal
import socket
from pathlib import Path

from relayrun.agent.lines import Lines
from relayrun.rundir.run import Run
from relayrun.training import __main__ as program
from relayrun.training import fork_server
from relayrun.training.fork_server import Server
from tests.history import began


def child() -> tuple[int, int]:
    """A process that waits for its end, and the descriptor that tells of it."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(1)
    return pid, os.pidfd_open(pid)


def test_a_rank_that_was_killed_before_it_was_to_be_ended_is_told_as_one() -> None:
    """The order to end it may come first: its neighbours see its connections close, and their agents are heard."""
    ours, theirs = socket.socketpair()
    server, agent = Server(theirs), Lines(ours)
    children = [child(), child()]
    for rank, (pid, fd) in enumerate(children):
        server._ranks[fd] = (pid, {"round": 1, "rank": rank})
        server._poll.register(fd, select.POLLIN)
    os.kill(children[0][0], signal.SIGKILL)
    select.select([children[0][1]], [], [], 60)
    server._obey({"kind": "end"})
    for _, fd in children:
        server._wait_for(fd)
    found = [(message["rank"], message["code"], message["told"]) for message in agent.receive()]
    agent.close()
    theirs.close()
    assert found == [(0, -signal.SIGKILL, False), (1, -signal.SIGKILL, True)]


def test_the_config_is_read_once_for_all_ranks_and_what_is_wrong_with_it_is_left_to_them(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    fork_server.read_config(run)  # nothing has begun
    began(run, 1)
    fork_server.read_config(run)  # it has no config
    assert program.config_of.cache_info().currsize == 0
