"""`python -m relayrun.control.agent --run-dir R --attempt N`, once a node: srun's task, or the local starter's.

The environment says where it is: RANK and WORLD_SIZE count nodes here, MASTER_ADDR and MASTER_PORT are the first one's.
Where there are spare nodes each agent is a step of its own, and RELAYRUN_NODE says which; the coordinator is then
beside the batch script (`agent.step_per_node`), at an address of the same names.
Exit code: 0 where all ranks left by themselves with 0; that of the rank that failed first where the attempt has failed.
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

from relayrun.control.agent.connections import AgentConnections
from relayrun.control.agent.coordinator import LONGEST_GATHER_SECONDS, Coordinator
from relayrun.control.agent.health import job_health_of
from relayrun.control.agent.messages import Message, MessageSocket
from relayrun.control.agent.node_agent import FORK_SERVER_ENVIRONMENT, FORWARDED_SIGNALS, NodeAgent
from relayrun.control.agent.restart import foreign_restart_of, ranks_gone_line
from relayrun.control.agent.step_per_node import NODE_VARIABLE
from relayrun.control.job_log import AgentLog, log_node_line
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.node_health import NodeChecks
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.base import Trainer
from relayrun.control.trainers.registry import trainer_of
from relayrun.errors import RunDirError, run_main

CONNECT_PAUSE = 0.1
"""Seconds between two tries to reach the coordinator."""
REACH_SECONDS = LONGEST_GATHER_SECONDS
"""After which a step of its own takes a coordinator that it does not reach for lost: nobody else would see it."""
BECOME_SECONDS = 10.0
"""Between two tries to start the program that an agent without a coordinator becomes."""


def main() -> int:
    """Be the agent of this node; return its exit code. Raises RunDirError where the attempt has not begun."""
    parser = argparse.ArgumentParser(prog="relayrun.control.agent", description="The parent of a node's ranks.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("orphaned", nargs="*", help="behind --: what a step of its own becomes without a coordinator")
    options = parser.parse_args()
    run = Run(options.run_dir.absolute())
    plan, attempt = Plan.load(run), run.attempt(options.attempt)
    begin = attempt.read_begin()
    if begin is None:
        raise RunDirError("this attempt has not begun", where=attempt.begin)
    if NODE_VARIABLE not in os.environ:
        return _in_one_step(run, plan, attempt, begin)
    return _in_a_step_of_its_own(run, plan, attempt, begin, orphaned=options.orphaned)


def _in_one_step(run: Run, plan: Plan, attempt: Attempt, begin: AttemptStart) -> int:
    """All agents are tasks of one step; that of the first node has the coordinator."""
    node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    words = partial(log_node_line, _node_name())
    trainer = trainer_of(plan, run)  # from the file system, which may be slow: who connects is to say hello soon
    job: Message = {"job": begin.job_id, "attempt": attempt.number}
    address = _coordinator_address()
    if node:
        return _make_agent(
            run,
            plan,
            attempt,
            job,
            trainer,
            node=node,
            upward=MessageSocket(connect_to_coordinator(address)),
            words=words,
        ).run()
    ours, theirs = socket.socketpair()
    links = {0: MessageSocket(theirs)}
    coordinator = Coordinator(
        run,
        attempt,
        nodes=nodes,
        ranks_per_node=plan.ntasks_per_node,
        links=links,
        say=words,
        chain=plan.chain,
        health=job_health_of(run, plan, attempt, say=words),
        between=foreign_restart_of(run, plan, attempt, begin, say=words),
    )
    listener = socket.create_server(("", address[1]), backlog=nodes) if nodes > 1 else None
    reception = AgentConnections(coordinator, links, listener=listener, job=job, say=words)
    return _make_agent(run, plan, attempt, job, trainer, node=0, upward=MessageSocket(ours), words=words).run(reception)


def _in_a_step_of_its_own(
    run: Run, plan: Plan, attempt: Attempt, begin: AttemptStart, *, orphaned: Sequence[str]
) -> int:
    """The loss of another node does not end this agent; without a coordinator it becomes the program `orphaned`."""
    node = int(os.environ[NODE_VARIABLE])
    attempt.agents.mkdir(exist_ok=True)
    path = attempt.agents / f"{_node_name()}.log"
    log = AgentLog(path)
    words = partial(log_node_line, _node_name(), log=log)
    trainer = trainer_of(plan, run)
    words(f"the agent of attempt {attempt.number}, job {begin.job_id}")
    job: Message = {"job": begin.job_id, "attempt": attempt.number}
    try:
        upward = MessageSocket(connect_to_coordinator(_coordinator_address(), until=time.monotonic() + REACH_SECONDS))
    except OSError as error:
        words(f"the coordinator at {':'.join(map(str, _coordinator_address()))} is not reached: {error}")
        log.finish()
        become_orphaned_program(orphaned, plan.package_root, node=node, number=0, log=path)
    agent = _make_agent(run, plan, attempt, job, trainer, node=node, upward=upward, words=words)
    code = agent.run()
    log.finish()
    if agent.orphaned:
        become_orphaned_program(orphaned, plan.package_root, node=node, number=agent.restart, log=path)
    return code


def become_orphaned_program(
    command: Sequence[str], package_root: str, *, node: int, number: int, log: Path
) -> NoReturn:
    """Become the program that closes this attempt where the batch script is gone; `number`: the newest restart's.

    Without a log it says what it does to nobody. It is tried until the program starts: its file system may be away.
    """
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
            log_node_line(
                _node_name(), f"{command[0]} does not start: {error.strerror}; tried again in {BECOME_SECONDS:.0f} s"
            )
            time.sleep(BECOME_SECONDS)


def _make_agent(
    run: Run,
    plan: Plan,
    attempt: Attempt,
    job: Message,
    trainer: Trainer,
    *,
    node: int,
    upward: MessageSocket,
    words: Callable[[str], None],
) -> NodeAgent:
    forked = plan.trainer == "native"
    leave = {signal.SIGTERM, *([] if trainer.leave_signal is None else [trainer.leave_signal])}
    return NodeAgent(
        attempt,
        hello={**job, "node": node, "name": _node_name()},
        place=node if node < plan.nodes or not plan.spare_nodes else None,
        ranks_per_node=plan.ntasks_per_node,
        server=plan.fork_server,
        defaults=FORK_SERVER_ENVIRONMENT if forked else {},
        arguments=[f"--run-dir={run.path}", f"--attempt={attempt.number}"],
        upward=upward,
        keep_address="MASTER_ADDR" in plan.environment,
        handed_on={*FORWARDED_SIGNALS, *trainer.asked_by},
        leave_signals=leave,
        health=NodeChecks.of_plan(plan),
        last_words=None if forked else ranks_gone_line,
        import_seconds=plan.chain.start_timeout / 2,  # before the supervisor takes it for a hang of no known rank
        say=words,
    )


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _coordinator_address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def connect_to_coordinator(address: tuple[str, int], *, until: float | None = None) -> socket.socket:
    """Reach the coordinator, which may start later than this agent.

    It is tried for as long as the job's step lasts; or `until` this time of `time.monotonic`, then OSError is raised.
    """
    while True:
        try:
            found = socket.create_connection(address, timeout=None if until is None else CONNECT_PAUSE * 100)
        except OSError:
            if until is not None and time.monotonic() > until:
                raise
            time.sleep(CONNECT_PAUSE)
        else:
            found.settimeout(None)
            return found


if __name__ == "__main__":
    sys.exit(run_main(main))
