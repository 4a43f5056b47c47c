"""`python -m relayrun.agent --run-dir R --attempt N`, once a node: srun's task, or the local starter's.

The environment says where it is: RANK and WORLD_SIZE count nodes here, MASTER_ADDR and MASTER_PORT are the first one's.
Exit code: 0 where all ranks left by themselves with 0; that of the rank that failed first where the attempt has failed.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path

from relayrun.agent.agent import Agent
from relayrun.agent.coordinator import Coordinator
from relayrun.agent.lines import Lines, Message
from relayrun.agent.reception import Reception
from relayrun.errors import RunDirError, run_main
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run

PAUSE = 0.1
"""Seconds between two tries to reach the coordinator."""


def say(name: str, text: str) -> None:
    """A line in the job's log, with the time and the node."""
    print(f"[relayrun {time.strftime('%Y-%m-%dT%H:%M:%S')} {name}] {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Be the agent of this node; return its exit code. Raises RunDirError where the attempt has not begun."""
    parser = argparse.ArgumentParser(prog="relayrun.agent", description="The parent of a node's ranks.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args()
    run = Run(options.run_dir.absolute())
    plan, attempt = Plan.load(run), run.attempt(options.attempt)
    begin = attempt.read_begin()
    if begin is None:
        raise RunDirError("this attempt has not begun", where=attempt.begin)
    node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    words = partial(say, name)
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    job: Message = {"job": begin.job_id, "attempt": attempt.number}
    reception = None
    if node == 0:
        ours, theirs = socket.socketpair()
        upward = Lines(ours)
        links = {0: Lines(theirs)}
        listener = socket.create_server(("", address[1]), backlog=nodes) if nodes > 1 else None
        coordinator = Coordinator(
            run,
            attempt,
            nodes=nodes,
            ranks=nodes * plan.ntasks_per_node,
            links=links,
            say=words,
            max_failed_rounds=plan.max_failed_rounds,
        )
        reception = Reception(coordinator, links, nodes=nodes, listener=listener, job=job)
    else:
        upward = Lines(connect(address))
    each = plan.ntasks_per_node
    agent = Agent(
        attempt,
        hello={**job, "node": node, "name": name},
        ranks=range(node * each, (node + 1) * each),
        world_size=nodes * each,
        server=plan.fork_server,
        arguments=[f"--run-dir={run.path}", f"--attempt={attempt.number}"],
        upward=upward,
        say=words,
    )
    return agent.run(reception)


def connect(address: tuple[str, int]) -> socket.socket:
    """Reach the coordinator, which may start later than this agent: tried for as long as the job's step lasts."""
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            time.sleep(PAUSE)


if __name__ == "__main__":
    sys.exit(run_main(main))
