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
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

Environment = dict[bytes, bytes]
NamedProcess = tuple[str, int]
"""`rank N`, `batch` or `watch`, and the process id."""


def main(arguments: list[str]) -> int:
    """Signal the requested processes. ROLE is `rank`, or a role of `role_processes`."""
    run_dir, job_id, role, number, *only = arguments
    if role == "rank":
        named = named_ranks(rank_processes(run_dir, job_id), set(map(int, only)))
    else:
        named = role_processes(role, run_dir, job_id)
    for name, pid in signal_processes(named, signal.Signals[number]):
        print(name, pid, flush=True)
    return 0


def signal_processes(named: Iterable[NamedProcess], number: signal.Signals) -> Iterator[NamedProcess]:
    """Send a signal to these processes; yield those that are alive."""
    for name, pid in named:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            yield name, pid


def named_ranks(ranks: dict[int, int], only: Collection[int]) -> list[NamedProcess]:
    """Return the ranks in `only`, or all if it is empty. `ranks`: process ids by rank."""
    return [(f"rank {rank}", pid) for rank, pid in ranks.items() if not only or rank in only]


def rank_processes(run_dir: str, job_id: str) -> dict[int, int]:
    """Return the process ids of the ranks' programs by rank, without srun and wrappers."""
    found = {}
    for pid, words, variables in job_processes(job_id):
        if f"--run-dir={run_dir}".encode() not in words or b"python" not in words[0]:
            continue
        name = program_name(pid)
        if name.startswith("rank-"):  # forked by an agent's server
            found[int(name.removeprefix("rank-"))] = pid
        elif b"RANK" in variables and b"relayrun.train" in words:
            found[int(variables[b"RANK"])] = pid
    return found


def role_processes(role: str, run_dir: str, job_id: str) -> list[NamedProcess]:
    """Return the processes of a role: `batch`, the shell of the job script, or `watch`, the supervisor's."""
    watch = {b"watch", b"relayrun.control.chain", run_dir.encode()}
    has_role: Callable[[list[bytes]], bool] = {
        # Slurm names its copy of the job script in the spool slurm_script
        "batch": lambda words: any(word.endswith(b"slurm_script") for word in words) and b"bash" in words[0],
        "watch": lambda words: watch <= set(words),
    }[role]
    return [(role, pid) for pid, words, _ in job_processes(job_id) if has_role(words)]


def job_processes(job_id: str) -> Iterator[tuple[int, list[bytes], Environment]]:
    """Yield process id, command line and environment of a job's processes, except this one.

    Inside a job step these are the processes of the step's node: on a test cluster all nodes are one machine.
    """
    node = os.environ.get("SLURMD_NODENAME", "").encode()
    for pid, words, variables in live_processes():
        here = not node or variables.get(b"SLURMD_NODENAME", node) == node
        if pid != os.getpid() and here and variables.get(b"SLURM_JOB_ID") == job_id.encode():
            yield pid, words, variables


def live_processes() -> Iterator[tuple[int, list[bytes], Environment]]:
    """Yield process id, command line and environment of every process that this user may inspect."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or another user's
            words = (entry / "cmdline").read_bytes().split(b"\0")
            items = (entry / "environ").read_bytes().split(b"\0")
            yield int(entry.name), words, dict(item.partition(b"=")[::2] for item in items)


def program_name(pid: int) -> str:
    """Return a process's name, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
