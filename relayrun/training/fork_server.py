"""`python -m relayrun.training.fork_server`: does the imports once, then forks the ranks of its node.

`agent.server` has the messages. Started by a node's agent, which it talks to by a socket on its standard input. It
never computes: no parallel region of OpenMP, no backward pass, no process group, no call of CUDA, or what it forks
would hang. What it has opened or seeded, every rank would have.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from relayrun.agent.lines import Lines, Message
from relayrun.agent.server import IGNORED
from relayrun.errors import log_to_stderr
from relayrun.rundir.run import Run
from relayrun.scheduler.tasks import die_with_parent, is_dying
from relayrun.training.reporting.agent_link import VARIABLE
from relayrun.training.signals import SignalFlag

log = logging.getLogger(__name__)

PR_SET_NAME = 15


class Server:
    """The ranks that it forked, by the descriptor that tells of their end, and the socket of the agent."""

    def __init__(self, agent: socket.socket) -> None:
        self.agent = Lines(agent)
        self._ranks: dict[int, tuple[int, Message]] = {}
        """Process and order of each rank that has not been waited for."""
        self._ended: set[int] = set()
        """Those of them that lived when they were to be ended."""
        self._poll = select.poll()
        self._poll.register(self.agent, select.POLLIN)

    def serve(self) -> None:
        """Do what the agent orders until it is gone; the ranks go with this process."""
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._ranks:
                    self._wait_for(fd)
                    continue
                try:
                    orders = self.agent.receive()
                except EOFError:
                    return
                for order in orders:
                    self._obey(order)

    def _obey(self, order: Message) -> None:
        if order["kind"] == "fork":
            self._fork(order)
            return
        for fd, (pid, _) in self._ranks.items():
            if order["kind"] == "end" and not is_dying(pid):
                self._ended.add(fd)
            number = signal.SIGKILL if order["kind"] == "end" else signal.Signals(order["number"])
            signal.pidfd_send_signal(fd, number)

    def _fork(self, order: Message) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_rank(order, server)
        fd = os.pidfd_open(pid)
        self._ranks[fd] = (pid, order)
        self._poll.register(fd, select.POLLIN)

    def _wait_for(self, fd: int) -> None:
        pid, order = self._ranks.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        told = fd in self._ended
        self._ended.discard(fd)
        code = os.waitstatus_to_exitcode(status)
        self.agent.send("dead", round=order["round"], rank=order["rank"], code=code, told=told)

    def _be_rank(self, order: Message, server: int) -> NoReturn:
        """In the child: become the training program, as if it had been started for this rank."""
        code = 1
        try:
            die_with_parent(signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            # for people who look at processes
            ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank-{order['rank']}".encode(), 0, 0, 0)
            for fd in self._ranks:
                os.close(fd)
            gc.enable()
            os.environ.update(order["environment"])
            os.environ[VARIABLE] = str(self.agent.fileno())  # kept open: its end says that no rank lives
            signal.signal(signal.SIGINT, signal.default_int_handler)
            flag = SignalFlag()
            flag.install()
            from relayrun.training import __main__ as program

            sys.argv = [program.__file__, *order["arguments"]]
            code = program.main(flag)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def import_program() -> None:
    """Import all that a rank needs before its first step. Raises what an import raises."""
    from relayrun.training import __main__ as program

    program.import_quietly()
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "CUDA was started while the training program was imported, and no process forked after that can use it; "
            "set chain.recovery=job"
        )


def read_config(run: Run) -> None:
    """Read the config of the newest attempt, once for all ranks. What is wrong with it they say themselves."""
    from relayrun.training import __main__ as program

    with contextlib.suppress(Exception):
        if (attempt := run.newest_begun()) is not None and (begin := attempt.read_begin()) is not None:
            program.config_of(run.config_revision(begin.config_revision))


def main() -> int:
    """Import, then serve; return the exit code."""
    parser = argparse.ArgumentParser(prog="relayrun.training.fork_server", description="Forks the ranks of a node.")
    parser.add_argument("--run-dir", type=Path, required=True)
    options = parser.parse_args()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    agent = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    server = Server(agent)
    try:
        import_program()
        read_config(Run(options.run_dir.absolute()))
    except BaseException as error:
        traceback.print_exc()
        server.agent.send("unable", error=f"{type(error).__name__}: {error}")
        return 1
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        log.warning("the imports started %s threads, which no forked rank has", threads - 1)
    gc.collect()
    gc.freeze()  # the collector of a rank must not touch, and so copy, what all share
    server.serve()
    return 0


if __name__ == "__main__":
    log_to_stderr()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
