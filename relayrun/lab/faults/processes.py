"""The processes of a run on one node, by role, and signals for them.

The drill starts this file on the nodes of a job, as a step of that job beside its ranks, with the Python of the batch
script. It uses the standard library alone, and reaches no process of another job.

    python3 processes.py RUN_DIR JOB_ID ROLE SIGNAL [RANK ...]

It prints a line for each signalled process: its role or rank, and its process id.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROLES = ("rank", "batch", "watch")
"""A rank's program; the shell that runs the job script; the supervisor's `watch` beside the ranks."""

Environment = dict[bytes, bytes]


def rank_processes(run_dir: str, job_id: str) -> dict[int, int]:
    """Return the process ids of the ranks' programs by rank, without srun and wrappers."""
    found = {}
    for pid, words, variables in _job_environments(job_id):
        if f"--run-dir={run_dir}".encode() not in words or b"python" not in words[0]:
            continue
        name = _program_name(pid)
        if name.startswith("rank-"):  # forked by an agent's server
            found[int(name.removeprefix("rank-"))] = pid
        elif b"RANK" in variables and b"relayrun.train" in words:
            found[int(variables[b"RANK"])] = pid
    return found


def batch_script_processes(job_id: str) -> list[int]:
    """Return the shell of the job script: Slurm names its copy in the spool slurm_script."""
    return [
        pid
        for pid, words, _ in _job_environments(job_id)
        if any(word.endswith(b"slurm_script") for word in words) and b"bash" in words[0]
    ]


def watch_processes(run_dir: str, job_id: str) -> list[int]:
    """Return the supervisor's `watch`."""
    wanted = {b"watch", b"relayrun.control.chain", run_dir.encode()}
    return [pid for pid, words, _ in _job_environments(job_id) if wanted <= set(words)]


def job_processes(job_id: str) -> list[int]:
    """Return all processes of a job on this machine."""
    return [pid for pid, _, _ in _job_environments(job_id)]


def step_daemons(pids: list[int]) -> list[int]:
    """Return the slurmstepd above each of these processes; needs root."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # the process has ended
            while pid > 1 and _program_name(pid) != "slurmstepd":
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            found.add(pid)
    return sorted(found - {0, 1})


def _job_environments(job_id: str) -> Iterator[tuple[int, list[bytes], Environment]]:
    """Process id, command line and environment of the job's processes, except this one.

    Inside a job step these are the processes of the step's node: on a test cluster all nodes are one machine.
    """
    node = os.environ.get("SLURMD_NODENAME", "").encode()
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = dict(item.partition(b"=")[::2] for item in (entry / "environ").read_bytes().split(b"\0"))
        except OSError:  # ended, or another user's
            continue
        here = not node or variables.get(b"SLURMD_NODENAME", node) == node
        if here and variables.get(b"SLURM_JOB_ID") == job_id.encode():
            yield int(entry.name), words, variables


def _program_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def main(arguments: list[str]) -> int:
    """Signal the requested processes."""
    run_dir, job_id, role, number, *only = arguments
    found: list[tuple[str, int]] = []
    if role == "rank":
        wanted = [int(rank) for rank in only]
        found = [
            (f"rank {rank}", pid)
            for rank, pid in rank_processes(run_dir, job_id).items()
            if not wanted or rank in wanted
        ]
    elif role in ROLES:
        found = [
            (role, pid)
            for pid in (batch_script_processes(job_id) if role == "batch" else watch_processes(run_dir, job_id))
        ]
    for name, pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[number])
            print(name, pid, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
