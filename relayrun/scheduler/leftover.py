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
from collections.abc import Mapping

MARK = "RELAYRUN_RANKS"
"""Environment variable that tells one start of ranks from every other one."""

PATIENCE = 10.0
"""Seconds for which processes are looked for that do not end; one that waits for a disk cannot."""


def end(environment: Mapping[str, str | None]) -> list[str]:
    """SIGKILL every process of this machine whose environment has all these variables; return their command lines.

    A variable with None may have any value.
    """
    ended: dict[int, str] = {}
    deadline = time.monotonic() + PATIENCE
    while (found := _processes(environment)) and time.monotonic() < deadline:
        for pid, command in found.items():
            ended.setdefault(pid, command)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)  # one that was about to start another is gone by then
    return list(ended.values())


def _processes(environment: Mapping[str, str | None]) -> dict[int, str]:
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
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            found[int(name)] = b" ".join(words).decode("utf-8", errors="replace").strip()
    return found
