"""`python -m relayrun.control.agent.spawn_server`: starts the ranks of its node for a foreign trainer.

It replaces the server that forks ranks, and obeys the same orders (`agent.rank_server`), but starts the trainer's own
command for each rank, since the imports of such a program are unknown. Ranks die with this process; processes that they
started carry the agent's mark. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from relayrun.control.agent.messages import Message
from relayrun.control.agent.rank_server import RANK_SIGNALS, RankServer, StartedProcess
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local_srun import die_with_parent
from relayrun.control.trainers.registry import trainer_of
from relayrun.errors import run_main

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a shell for a program that it does not find, or may not execute."""


class SpawnServer(RankServer):
    """Starts each rank as the trainer's command."""

    def __init__(self, agent: socket.socket, run: Run) -> None:
        super().__init__(agent, run)
        self.plan = self.load_plan()
        self._trainer = trainer_of(self.plan, run)
        self._heard = frozenset([*RANK_SIGNALS, *self._trainer.asked_by]) - {signal.SIGUSR1, signal.SIGUSR2}
        """Signals that this process ignores and its ranks do not; the other two would kill a Python that starts."""

    def start(self, order: Message) -> StartedProcess | None:
        begin, restart_begin = self._begins(order["arguments"])
        command = [*self._trainer.command(restart_begin)]
        environment = {**os.environ, **order["environment"]}
        own, first = self._trainer.environment(restart_begin), self._trainer.environment(begin)
        for name in (own.keys() | first.keys()) - self.plan.environment.keys():  # the site's own variables win
            if name not in own:
                environment.pop(name, None)
            elif own[name] != first.get(name):
                environment[name] = own[name]
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                preexec_fn=partial(_become_rank, os.getpid(), self._heard),
            )
        except OSError as error:
            print(f"relayrun: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            self.agent.send("dead", restart=order["restart"], rank=order["rank"], code=code, told=False)
            return None
        return StartedProcess(process.pid, process.wait)

    def _begins(self, arguments: list[str]) -> tuple[AttemptStart, AttemptStart]:
        """Return the attempt's begin, and the same with the base of the restart that these arguments are for."""
        given = dict(word.removeprefix("--").split("=", 1) for word in arguments)
        begin = self.run.attempt(int(given["attempt"])).started_record()
        if "base-iteration" not in given:
            return begin, begin
        return begin, replace(begin, base_iteration=int(given["base-iteration"]), base_path=given.get("base-path"))


def _become_rank(server: int, heard: frozenset[signal.Signals]) -> None:
    """Prepare the child as `launchers/lib/rank.sh` does without an agent."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    for number in heard:
        signal.signal(number, signal.SIG_DFL)


def main() -> int:
    """Serve the agent at the other end of standard input until it is gone; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="relayrun.control.agent.spawn_server", description="Starts the ranks of a node."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    run = Run(parser.parse_args().run_dir.absolute())
    agent = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    SpawnServer(agent, run).serve()
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
