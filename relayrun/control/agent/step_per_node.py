"""The starter of agents in a job with spare nodes, beside the batch script: a step per node, and the coordinator.

    python -m relayrun.control.agent.step_per_node --run-dir R --attempt N --nodes n0,n1,n2 -- srun OPTION ... PROGRAM

`--nodelist=NODE` is put behind the first word of the command; RELAYRUN_NODE has the number of the node. In one step for
all nodes the loss of one would end all agents, so each is a step of its own. The coordinator is beside the batch
script: no election is needed, and there are never two. If this node is lost, the job is, and its agents act
(`chain.failover`). Exit code: as of `agent.__main__`.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from relayrun.control.agent.authentication import AttemptKey, listen
from relayrun.control.agent.connections import AgentConnections
from relayrun.control.agent.coordinator import EXIT_FAILED, Coordinator
from relayrun.control.agent.messages import MessageSocket
from relayrun.control.job_log import log_node_line
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local_srun import die_with_parent
from relayrun.errors import run_main
from relayrun.files import raise_open_file_limit

NODE_VARIABLE = "RELAYRUN_NODE"
"""Environment variable of an agent that is a step of its own: the number of its node in the job, from 0 on."""
LEAVE_SECONDS = 60.0
"""Seconds for steps to end after their agents were told to leave; then they are ended."""


HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class AgentSteps:
    """The agents' steps, by node number. `port`: port of the coordinator on this node."""

    def __init__(self, command: Sequence[str], nodes: Sequence[str], *, port: int) -> None:
        self._names = nodes
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[int] = set()
        """Steps that were ended by a signal."""
        for number, name in enumerate(nodes):
            step = [command[0], f"--nodelist={name}", *command[1:]]
            environment = os.environ | {NODE_VARIABLE: str(number), "MASTER_PORT": str(port)}
            die = partial(die_with_parent, signal.SIGTERM)  # with it srun ends its step
            self._running[number] = subprocess.Popen(step, env=environment, stdin=subprocess.DEVNULL, preexec_fn=die)

    def watch(self, selector: selectors.BaseSelector, reception: AgentConnections) -> None:
        """Register the end of each step."""
        raise_open_file_limit()  # behind the start of the steps: srun would hand it on to their tasks
        for number, process in self._running.items():
            fd = os.pidfd_open(process.pid)
            selector.register(fd, selectors.EVENT_READ, partial(self._gone, selector, fd, number, reception))

    def _gone(self, selector: selectors.BaseSelector, fd: int, number: int, reception: AgentConnections) -> None:
        selector.unregister(fd)
        os.close(fd)
        code = self._running.pop(number).wait()
        reception.lose(number, f"the step of its agent ended with exit code {code}")

    def end(self, numbers: set[int], *, how: signal.Signals = signal.SIGTERM) -> None:
        """End the steps of these nodes, so that none of their processes survives. Each is signalled once."""
        for number in numbers & self._running.keys():
            if number not in self._ended or how == signal.SIGKILL:
                self._running[number].send_signal(how)
                self._ended.add(number)

    def left(self) -> set[int]:
        """Return the nodes whose steps run."""
        return set(self._running)


def main() -> int:
    """Start the agents, coordinate them, and wait for their end. Raises RunDirError if the attempt has not begun."""
    parser = argparse.ArgumentParser("relayrun.control.agent.step_per_node", description="Starts agents, a step each.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--nodes", required=True, help="names of the job's nodes, separated by commas")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    run = Run(options.run_dir.absolute())
    plan, attempt = Plan.load_in_job(run), run.attempt(options.attempt)
    names = options.nodes.split(",")
    say = partial(log_node_line, os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    links: dict[int, MessageSocket] = {}
    coordinator = Coordinator(run, plan, attempt, nodes=len(names), names=names, links=links, say=say)
    listener = listen(os.environ["MASTER_ADDR"], 0)
    reception = AgentConnections(coordinator, links, listener, AttemptKey.of(attempt), attempt.refused_connections, say)
    for number in HANDLED_SIGNALS:  # the agents hear those that are for the ranks
        signal.signal(number, lambda heard, _frame: coordinator.ask("SIGTERM") if heard == signal.SIGTERM else None)
    selector = selectors.DefaultSelector()
    reception.watch(selector)
    steps = AgentSteps(command, names, port=listener.getsockname()[1])
    steps.watch(selector, reception)
    deadline: float | None = None
    while steps.left() - coordinator.given_up() or coordinator.code is None:
        for key, _ in selector.select(coordinator.pause):
            key.data()
        reception.look()
        steps.end(coordinator.given_up())
        if coordinator.code is not None:
            deadline = deadline or time.monotonic() + LEAVE_SECONDS
            if time.monotonic() > deadline:
                break
    reception.close()
    steps.end(steps.left(), how=signal.SIGKILL)  # of lost nodes: Slurm may not know of that for minutes
    return EXIT_FAILED if coordinator.code is None else coordinator.code


if __name__ == "__main__":
    sys.exit(run_main(main))
