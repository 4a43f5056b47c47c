"""`python -m relayrun.control.agent --run-dir R --attempt N`, once per node: a task of srun or of the local starter.

In the environment RANK and WORLD_SIZE count nodes, and MASTER_ADDR and MASTER_PORT name the first node. With spare
nodes each agent is a step of its own, RELAYRUN_NODE is its node, and the coordinator runs beside the batch script
(`agent.step_per_node`). Exit code: 0 if all ranks left with 0; else that of the rank that failed first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from relayrun.control.agent.authentication import HANDSHAKE_SECONDS, LONGEST_HANDSHAKE, AttemptKey, listen
from relayrun.control.agent.connections import AgentConnections
from relayrun.control.agent.coordinator import LONGEST_GATHER_SECONDS, Coordinator
from relayrun.control.agent.messages import MessageSocket
from relayrun.control.agent.node_agent import FORWARDED_SIGNALS, NodeAgent
from relayrun.control.agent.step_per_node import NODE_VARIABLE
from relayrun.control.job_log import AgentLog, log_node_line
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.registry import trainer_of
from relayrun.errors import run_main

CONNECT_PAUSE = 0.1
"""Seconds between two tries to reach the coordinator."""
REACH_SECONDS = LONGEST_GATHER_SECONDS
"""Seconds after which an agent in a step of its own gives up a coordinator that it cannot reach."""
BECOME_SECONDS = 10.0
"""Seconds between two tries to start the program that an agent without a coordinator becomes."""


def main() -> int:
    """Run the agent of this node; return its exit code. Raises RunDirError if the attempt has not begun."""
    parser = argparse.ArgumentParser(prog="relayrun.control.agent", description="The parent of a node's ranks.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("orphaned", nargs="*", help="behind --: what a step of its own becomes without a coordinator")
    options = parser.parse_args()
    run = Run(options.run_dir.absolute())
    plan, attempt = Plan.load_in_job(run), run.attempt(options.attempt)
    begin = attempt.started_record()
    if NODE_VARIABLE not in os.environ:
        return _in_one_step(run, plan, attempt)
    return _in_a_step_of_its_own(run, plan, attempt, begin, orphaned=options.orphaned)


def _in_one_step(run: Run, plan: Plan, attempt: Attempt) -> int:
    """Run an agent in one step with all others; the agent of the first node contains the coordinator."""
    node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    say = partial(log_node_line, _node_name())
    trainer = trainer_of(plan, run)  # before the connection, since the file system may be slow and a hello must not be
    key = AttemptKey.of(attempt)
    agent = partial(NodeAgent, run, plan, attempt, trainer, node=node, name=_node_name(), say=say)
    address = _coordinator_address()
    if node:
        return agent(upward=join_coordinator(address, key, node, say=say)).run()
    ours, theirs = socket.socketpair()
    links = {0: MessageSocket(theirs)}
    coordinator = Coordinator(run, plan, attempt, nodes=nodes, links=links, say=say)
    listener = listen(*address) if nodes > 1 else None
    reception = AgentConnections(coordinator, links, listener, key, attempt.refused_connections, say)
    return agent(upward=MessageSocket(ours)).run(reception)


def _in_a_step_of_its_own(
    run: Run, plan: Plan, attempt: Attempt, begin: AttemptStart, *, orphaned: Sequence[str]
) -> int:
    """Run an agent that survives the loss of other nodes; without a coordinator it becomes the program `orphaned`."""
    node = int(os.environ[NODE_VARIABLE])
    attempt.agents.mkdir(exist_ok=True)
    path = attempt.agents / f"{_node_name()}.log"
    log = AgentLog(path)
    say = partial(log_node_line, _node_name(), log=log)
    trainer = trainer_of(plan, run)
    say(f"the agent of attempt {attempt.number}, job {begin.job_id}")
    until = time.monotonic() + REACH_SECONDS
    try:
        upward = join_coordinator(_coordinator_address(), AttemptKey.of(attempt), node, until=until, say=say)
    except OSError as error:
        say(f"the coordinator at {':'.join(map(str, _coordinator_address()))} is not reached: {error}")
        log.finish()
        become_orphaned_program(orphaned, plan.package_root, node=node, number=0, log=path)
    agent = NodeAgent(run, plan, attempt, trainer, node=node, name=_node_name(), upward=upward, say=say)
    code = agent.run()
    log.finish()
    if agent.orphaned:
        become_orphaned_program(orphaned, plan.package_root, node=node, number=agent.restart, log=path)
    return code


def become_orphaned_program(
    command: Sequence[str], package_root: str, *, node: int, number: int, log: Path
) -> NoReturn:
    """Become the program that closes this attempt if the batch script is gone. `number`: the newest restart. Without a
    log it is silent. The start is retried until it works: the program's file system may be away."""
    with contextlib.suppress(OSError), open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for signal_number in FORWARDED_SIGNALS:  # what Slurm sends with its orders must not cut them short
        signal.signal(signal_number, signal.SIG_IGN)
    own = {"PYTHONSAFEPATH": "1", "PYTHONPATH": package_root}
    while True:
        try:
            os.execvpe(command[0], [*command, f"--node={node}", f"--restart={number}"], os.environ | own)
        except OSError as error:
            again = f"tried again in {BECOME_SECONDS:.0f} s"
            log_node_line(_node_name(), f"{command[0]} does not start: {error.strerror}; {again}")
            time.sleep(BECOME_SECONDS)


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _coordinator_address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def join_coordinator(
    address: tuple[str, int], key: AttemptKey, node: int, *, say: Callable[[str], None], until: float | None = None
) -> MessageSocket:
    """Connect to the coordinator, which may start later than this agent. Retries without end, or `until` this time of
    `time.monotonic`; then it raises OSError."""
    said = False
    while True:
        with contextlib.suppress(OSError):
            lines = MessageSocket(
                socket.create_connection(address, timeout=HANDSHAKE_SECONDS), longest=LONGEST_HANDSHAKE
            )
            try:
                key.join(lines, node)
            except EOFError as error:
                lines.close()
                if not said:
                    say(f"the coordinator at {address[0]}:{address[1]} does not answer as it should: {error}")
                said = True
            else:
                return lines
        if until is not None and time.monotonic() > until:
            raise OSError("no answer of the coordinator")
        time.sleep(CONNECT_PAUSE)


if __name__ == "__main__":
    sys.exit(run_main(main))
