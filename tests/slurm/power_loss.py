"""A node of a test cluster is lost as by a power loss: all its processes at once, slurmd, step daemons and jobs.

A job is killed by its processes, too: `scancel` sends SIGTERM first, at which the batch shell ends, and what takes no
notice of it, such as submitit, goes on without its job where Slurm tracks processes by their parents.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from .cluster import TestCluster


def of_node(cluster: TestCluster, node: str) -> set[int]:
    """Processes of a node: its slurmd, its step daemons by their log, and what jobs have started there."""
    found = {int((cluster.path / f"run/slurmd-{node}.pid").read_text())}
    marks = {f"SLURM_CONF={cluster.conf}".encode(), f"SLURMD_NODENAME={node}".encode()}
    log = str(cluster.path / f"log/slurmd-{node}.log")
    for name in filter(str.isdecimal, os.listdir("/proc")):
        process = Path("/proc", name)
        try:
            of_job = marks <= set((process / "environ").read_bytes().split(b"\0"))
            if of_job or (_command(process) == "slurmstepd" and _has_open(process, log)):
                found.add(int(name))
        except OSError:  # it has gone, or was no process of ours
            continue
    return found - {os.getpid()}


def lose(cluster: TestCluster, node: str, *, silent: bool = False) -> set[int]:
    """Let a node be lost; return its processes.

    First SIGSTOP for all, since a second srun process ends the step of a killed one while the rest of the node still
    dies, which no power loss does. Then SIGKILL, srun first: the leader of a stopped process group that dies has the
    rest continued. `silent`: without SIGKILL, as other machines see it: no connection is closed.
    """
    stopped: set[int] = set()
    for _ in range(2):  # what was started meanwhile
        for pid in of_node(cluster, node) - stopped:
            stopped.add(pid)
            _kill(pid, signal.SIGSTOP)
    if not silent:
        for pid in sorted(stopped, key=lambda pid: (_command(Path(f"/proc/{pid}")) != "srun", -pid)):
            _kill(pid, signal.SIGKILL)
    return stopped


def kill_job(cluster: TestCluster, job_id: str) -> set[int]:
    """SIGKILL for all processes of a job, its batch shell as well; return them."""
    marks = {f"SLURM_CONF={cluster.conf}".encode(), f"SLURM_JOB_ID={cluster.job(job_id)['JobId']}".encode()}
    found: set[int] = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if marks <= set(Path("/proc", name, "environ").read_bytes().split(b"\0")):
                found.add(int(name))
        except OSError:  # it has gone
            continue
    for pid in found:
        _kill(pid, signal.SIGKILL)
    return found


def bring_back(processes: set[int]) -> None:
    """Let the processes of a silent node go on."""
    for pid in sorted(processes):
        _kill(pid, signal.SIGCONT)


def _has_open(process: Path, path: str) -> bool:
    return any(os.readlink(fd) == path for fd in (process / "fd").iterdir())


def _command(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return ""


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
