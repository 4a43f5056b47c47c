"""What rank 0 tells the agent of its node, where there is one: how far a round is. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from relayrun.control.agent import memory_copies
from relayrun.control.rundir import rounds
from relayrun.train.hooks import Hook, Step

AGENT_SOCKET_VARIABLE = "RELAYRUN_AGENT_SOCKET"
"""Has the descriptor of the agent's socket, in the ranks that a server of an agent has forked."""


def has_agent() -> bool:
    """Whether a server of an agent has forked this rank."""
    return AGENT_SOCKET_VARIABLE in os.environ


def restart_number() -> int:
    """The round of this rank; 1 where there are no rounds."""
    return int(os.environ.get(rounds.RESTART_VARIABLE, "1"))


def memory_folder() -> Path | None:
    """Where this rank may keep copies of its state in memory; None where there is no agent."""
    folder = os.environ.get(memory_copies.MEMORY_FOLDER_VARIABLE)
    return Path(folder) if folder else None


def memory_iteration() -> int | None:
    """The iteration whose copies this round starts from; None: from the disk."""
    text = os.environ.get(memory_copies.MEMORY_ITERATION_VARIABLE)
    return None if not text else int(text)


def tell_agent(kind: str, **values: object) -> None:
    """Tell the agent something; nothing where there is none. The agent may be gone, and then so is this rank."""
    descriptor = os.environ.get(AGENT_SOCKET_VARIABLE)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            line = json.dumps({"kind": kind, "round": restart_number(), **values})
            os.write(int(descriptor), line.encode() + b"\n")


class FirstStepNotice(Hook):
    """Tells the agent when the first step of a round is done."""

    def __init__(self) -> None:
        self._told = False

    def after_step(self, step: Step) -> None:
        if not self._told:
            self._told = True
            tell_agent("stepped", time=step.time)
