"""Processes of a run's ranks on this machine, which has all nodes of a test cluster."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

from relayrun.control.rundir.run import Run


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A rank that lives."""

    rank: int
    node: str
    """Slurm's name of its node; empty where there is no Slurm."""
    pid: int


def living_ranks(run: Run) -> list[RankProcess]:
    """Ranks that agents have forked and that live now; an agent's server has their command, not their name."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words, name = (entry / "cmdline").read_bytes().split(b"\0"), (entry / "comm").read_text().strip()
            if f"--run-dir={run.path}".encode() not in words or not name.startswith("rank-"):
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it has gone
            continue
        node = next(
            (item.partition(b"=")[2].decode() for item in variables if item.startswith(b"SLURMD_NODENAME=")), ""
        )
        found.append(RankProcess(rank=int(name.removeprefix("rank-")), node=node, pid=int(entry.name)))
    return sorted(found, key=lambda process: process.rank)


def signal_random_rank(run: Run, generator: random.Random, number: signal.Signals) -> RankProcess | None:
    """Send a signal to a random rank that lives; return it, None where none does."""
    processes = living_ranks(run)
    if not processes:
        return None
    chosen = generator.choice(processes)
    try:
        os.kill(chosen.pid, number)
    except ProcessLookupError:
        return None
    return chosen
