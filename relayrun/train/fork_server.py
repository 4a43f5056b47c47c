"""`python -m relayrun.train.fork_server`: does the imports once, then forks the ranks of its node.

`agent.rank_server` has the messages. Started by a node's agent, which it talks to by a socket on its standard input. It
never computes: no parallel region of OpenMP, no backward pass, no process group, no call of CUDA, or what it forks
would hang. What it has opened or seeded, every rank would have.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import math
import os
import signal
import socket
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import NoReturn

from relayrun.control.agent.hang_detection import SET_UP, ActivityPage
from relayrun.control.agent.messages import Message
from relayrun.control.agent.rank_server import RANK_SIGNALS, RankServer, StartedProcess
from relayrun.control.rundir.node_health import HealthPlan
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.tasks import die_with_parent
from relayrun.errors import RelayrunError, log_to_stderr
from relayrun.train import node_benchmark
from relayrun.train.reporting.liveness import AGENT_SOCKET_VARIABLE, memory_folder
from relayrun.train.requests import SignalFlag

log = logging.getLogger(__name__)

PR_SET_NAME = 15


class TrainingForkServer(RankServer):
    """The ranks that it forked. `gpus`: how many this node has."""

    def __init__(self, agent: socket.socket, *, gpus: int = 0) -> None:
        super().__init__(agent)
        self._gpus = gpus

    def start(self, order: Message) -> StartedProcess:
        """Fork a rank, or what measures this node."""
        server = os.getpid()
        pid = os.fork()
        if pid == 0 and order["kind"] == "probe":
            self._measure(order)
        if pid == 0:
            self._be_rank(order, server)
        return StartedProcess(pid, partial(_wait, pid))

    def _be_rank(self, order: Message, server: int) -> NoReturn:
        """In the child: become the training program, as if it had been started for this rank."""
        code = 1
        try:
            die_with_parent(signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            # for people who look at processes
            ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank-{order['rank']}".encode(), 0, 0, 0)
            for fd in self.descriptors():
                os.close(fd)
            gc.enable()
            os.environ.update(order["environment"])
            os.environ[AGENT_SOCKET_VARIABLE] = str(self.agent.fileno())  # kept open: its end says that no rank lives
            if (folder := memory_folder()) is not None:
                with contextlib.suppress(OSError):  # the program says so itself
                    ActivityPage(folder, order["rank"]).enter(SET_UP, 0, math.inf)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            flag = SignalFlag()
            flag.install()
            from relayrun.train import __main__ as program

            sys.argv = [program.__file__, *order["arguments"]]
            code = program.main(flag)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _measure(self, order: Message) -> NoReturn:
        """In the child: measure this node, and tell the agent."""
        code = 1
        try:
            die_with_parent(signal.SIGKILL)
            self.agent.send("probing")
            where = {name: order[name] for name in ("place", "nodes", "address", "port")}
            self.agent.send("probed", **node_benchmark.measure_node(**where, gpus=self._gpus))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _wait(pid: int) -> int:
    """Wait for a forked process; return its exit code, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def import_program() -> None:
    """Import all that a rank needs before its first step. Raises what an import raises.

    Raises RuntimeError where no fork could use the GPUs that are here. Without a GPU or its driver, none needs CUDA
    (a rank whose job asks for GPUs says so itself, see `parallel.require_gpu`).
    """
    from relayrun.train import __main__ as program

    program.import_program_modules()
    import torch

    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started or (_forks_have_no_cuda() and torch.cuda.device_count()):
        raise RuntimeError(
            "CUDA was started, or counted its devices, while the training program was imported, and no process forked "
            "after that can use it; set chain.recovery=job (docs/recovery.md says what does so)"
        )


def _forks_have_no_cuda() -> bool:
    """Whether torch would refuse CUDA to what is forked now. It tells a fork alone: counting devices suffices."""
    import torch

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(torch.cuda._is_in_bad_fork())
        finally:
            os._exit(code)
    return _wait(pid) != 0


def _gpus(run: Run) -> int:
    """How many GPUs a node has; 0 where no plan says so."""
    try:
        return HealthPlan.of(Plan.load(run).node_health).gpus
    except RelayrunError:
        return 0


def read_config(run: Run) -> None:
    """Read the config of the newest attempt, once for all ranks. What is wrong with it they say themselves."""
    from relayrun.train import __main__ as program

    with contextlib.suppress(Exception):
        if (attempt := run.newest_begun()) is not None and (begin := attempt.read_begin()) is not None:
            program.read_attempt_config(run.config_revision(begin.config_revision))


def main() -> int:
    """Import, then serve; return the exit code."""
    parser = argparse.ArgumentParser(prog="relayrun.train.fork_server", description="Forks the ranks of a node.")
    parser.add_argument("--run-dir", type=Path, required=True)
    options = parser.parse_args()
    for number in RANK_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    agent = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    server = TrainingForkServer(agent, gpus=_gpus(Run(options.run_dir.absolute())))
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
