"""Ends processes that the ranks of a local job have left behind, as Slurm does with those of a step.

A program may start others in sessions of their own: `torchrun` does so with its workers, and where it is killed they
train on, and write checkpoints beside the next attempt. A process hands its environment down, so a mark in it tells
whose children they are; who takes the mark out of it, escapes. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping

RANKS_VARIABLE = "RELAYRUN_RANKS"
"""Environment variable that tells one start of ranks from every other one."""

LEFTOVER_GRACE_SECONDS = 1.0
"""Seconds in which they may end by themselves: some tidy up behind a program, as Python's resource tracker does."""
LEFTOVER_PATIENCE_SECONDS = 10.0
"""Seconds for which processes are looked for that do not end; one that waits for a disk cannot."""


def kill_leftover_processes(
    environment: Mapping[str, str | None], *, but: Collection[int] = (), patience: float = LEFTOVER_PATIENCE_SECONDS
) -> list[str]:
    """SIGKILL every process of this machine whose environment has all these variables; return their command lines.

    Those that end by themselves within GRACE are none of them. A variable with None may have any value. `but`:
    processes that live on, with their own children. `patience`: seconds for which those are waited for that do not end.
    """
    ended: dict[int, str] = {}
    begun = time.monotonic()
    while (found := _processes_with(environment, but)) and time.monotonic() < begun + LEFTOVER_GRACE_SECONDS + patience:
        for pid, command in found.items() if time.monotonic() > begun + LEFTOVER_GRACE_SECONDS else ():
            ended.setdefault(pid, command)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)  # one that was about to start another is gone by then
    return list(ended.values())


def _processes_with(environment: Mapping[str, str | None], but: Collection[int]) -> dict[int, str]:
    """Process ids, each with its command line; those of other users cannot be read, and are none of ours."""
    wanted = {f"{name}={value}".encode() for name, value in environment.items() if value is not None}
    named = {name.encode() for name, value in environment.items() if value is None}
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = set(file.read().split(b"\0"))
            if not wanted <= variables or not named <= {variable.partition(b"=")[0] for variable in variables}:
                continue
            if but and (int(name) in but or _parent_of(name) in but):
                continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            found[int(name)] = b" ".join(words).decode("utf-8", errors="replace").strip()
    return found


def _parent_of(name: str) -> int:
    with open(f"/proc/{name}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])
