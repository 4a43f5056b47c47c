"""Fork server of a node: `python -m relayrun.train.fork_server` imports once, then forks the ranks.

The node's agent starts it and talks to it over a socket on standard input; `control.agent.rank_server` defines the
messages. It never computes: an OpenMP region, a backward pass, a process group or a CUDA call would make its forks
hang. Every rank inherits what it has opened or seeded.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from relayrun.control.agent.hang_detection import SET_UP, ActivityPage
from relayrun.control.agent.messages import Message
from relayrun.control.agent.rank_server import RANK_SIGNALS, RankServer, StartedProcess
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local_srun import die_with_parent
from relayrun.errors import log_to_stderr
from relayrun.train.reporting.liveness import AGENT_SOCKET_VARIABLE, memory_folder
from relayrun.train.requests import SignalFlag

log = logging.getLogger(__name__)

PR_SET_NAME = 15


class TrainingForkServer(RankServer):
    """Forks ranks."""

    def start(self, order: Message) -> StartedProcess:
        """Fork a rank."""
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run_child(lambda: self._be_rank(order, server))
        return StartedProcess(pid, partial(_wait, pid))

    def _be_rank(self, order: Message, server: int) -> int:
        """Run the training program in the child, as if it had been started for this rank."""
        if os.getppid() != server:
            return 1
        # the process name, for people
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank-{order['rank']}".encode(), 0, 0, 0)
        for fd in self.descriptors():
            os.close(fd)
        gc.enable()
        os.environ.update(order["environment"])
        os.environ[AGENT_SOCKET_VARIABLE] = str(self.agent.fileno())  # its end means that no rank lives
        if (folder := memory_folder()) is not None:
            with contextlib.suppress(OSError):  # the program reports it
                ActivityPage(folder, order["rank"]).enter(SET_UP, 0, math.inf)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        flag = SignalFlag()
        flag.install()
        from relayrun.train import __main__ as program

        sys.argv = [program.__file__, *order["arguments"]]
        return program.main(flag)


def _run_child(work: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def import_program() -> None:
    """Import everything that a rank needs before its first step. Raises any error of the imports.

    Raises RuntimeError if forks could not use the GPUs of this node. Without a GPU or driver forks need no CUDA; a rank
    whose job requests GPUs checks that itself (`distributed.require_gpu`).
    """
    from relayrun.train import __main__ as program

    program.import_program_modules()
    import torch

    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started or (_forks_have_no_cuda() and torch.cuda.device_count()):
        raise RuntimeError(
            "CUDA was started, or counted its devices, while the training program was imported, and no process forked "
            "after that can use it; set chain.recovery=job (`relayrun help recovery` says what does so)"
        )


def _forks_have_no_cuda() -> bool:
    """Ask a fork if torch refuses CUDA there. Only a fork knows: counting devices is enough for a refusal."""
    import torch

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(torch.cuda._is_in_bad_fork())
        finally:
            os._exit(code)
    return _wait(pid) != 0


def read_config(run: Run) -> None:
    """Read the config of the newest attempt, once for all ranks. The ranks report its errors themselves."""
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
    server = TrainingForkServer(agent, Run(options.run_dir.absolute()))
    try:
        server.load_plan()
        import_program()
        read_config(server.run)
    except BaseException as error:
        traceback.print_exc()
        server.agent.send("unable", error=f"{type(error).__name__}: {error}")
        return 1
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        log.warning("the imports started %s threads, which no forked rank has", threads - 1)
    gc.collect()
    gc.freeze()  # else the collector of a rank would touch, and so copy, shared memory
    server.serve()
    return 0


if __name__ == "__main__":
    log_to_stderr()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
