"""The local task starter: the counterpart of srun on one machine. Standard library only.

    python -m relayrun.control.scheduler.local_srun --ntasks 2 -- PROGRAM ARG ...

Starts PROGRAM once per rank with srun's variables (SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS) and a free MASTER_PORT.
Like `srun --kill-on-bad-exit`: the first rank that fails ends the others. SIGUSR1, SIGUSR2 and SIGTERM are forwarded to
every rank, SIGQUIT as SIGKILL. A rank dies with its starter. `kill_leftover_processes` ends processes that ranks
started in sessions of their own, as Slurm does at the end of a step; `torchrun` starts its workers so.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType

from relayrun.errors import log_to_stderr
from relayrun.files import write_atomic

log = logging.getLogger(__name__)

RANKS_VARIABLE = "RELAYRUN_RANKS"
"""Environment variable that distinguishes one start of ranks from every other start."""
LEFTOVER_GRACE_SECONDS = 1.0
"""Seconds in which processes may end by themselves: some clean up behind a program, as Python's does."""
LEFTOVER_PATIENCE_SECONDS = 10.0
"""Seconds of waiting for processes that do not end; a process that waits for a disk cannot."""
KILL_SECONDS = 2.0
"""Seconds from SIGTERM to SIGKILL for the ranks that are left when one has failed."""
CONNECTION_PORTS_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 20_000
PF_EXITING = 0x4
"""Flag of a process in /proc/PID/stat."""


def start_tasks(ntasks: int, command: Sequence[str]) -> int:
    """Run `command` as `ntasks` ranks; return 0, or the exit code of the first rank that failed."""
    ranks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL if number == signal.SIGQUIT else number)

    for handled in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(handled, forward)
    mark = {RANKS_VARIABLE: f"{os.getpid()}-{time.time_ns()}"}
    starter = {"SLURM_NTASKS": str(ntasks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared = {**os.environ, **mark, **starter}
    for number in range(ntasks):
        ranks.append(  # noqa: PERF401 - one by one: a signal may come between two starts
            subprocess.Popen(
                command,
                env=shared | {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)},
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )
        )
    first_failure = 0
    kill_at: float | None = None
    while any(rank.poll() is None for rank in ranks):
        failed = next(((n, rank) for n, rank in enumerate(ranks) if rank.poll()), None)
        if failed is not None and kill_at is None:
            number, rank = failed
            first_failure = _exit_code(rank.returncode)
            log.error("task %d ended with exit code %d; ending the others", number, first_failure)
            forward(signal.SIGTERM, None)
            kill_at = time.monotonic() + KILL_SECONDS
        if kill_at is not None and time.monotonic() > kill_at:
            forward(signal.SIGKILL, None)
        time.sleep(0.05)
    for command_line in kill_leftover_processes(mark):
        log.error("a process that the ranks left behind is ended: %s", command_line)
    return first_failure or max(_exit_code(rank.returncode) for rank in ranks)


def _exit_code(returncode: int) -> int:
    """Return the exit code as a shell reports it: 128 + signal for a killed process."""
    return returncode if returncode >= 0 else 128 - returncode


def die_with_parent(signal_number: int) -> None:
    """Ask Linux to send this process `signal_number` when its parent ends. Holds across exec."""
    ctypes.CDLL(None, use_errno=True).prctl(1, int(signal_number), 0, 0, 0)


def is_dying(pid: int) -> bool:
    """Return whether this child is exiting. Its peers may already have seen it close its connections."""
    flags = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[6])
    return bool(flags & PF_EXITING)


def quiet_ports() -> range:
    """Return the ports between LOWEST_PORT and the kernel's ports for connections, which may be taken before a program
    listens; empty if there are fewer than 1000."""
    ports = range(LOWEST_PORT, int(CONNECTION_PORTS_FILE.read_text().split()[0]))
    return ports if len(ports) >= 1000 else range(0)


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port without a listener, on the loopback interface or another address; empty: on all addresses. It
    is one of `quiet_ports`, if possible."""
    quiet = quiet_ports()
    for port in [*random.SystemRandom().sample(quiet, min(len(quiet), 50)), 0]:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((address, port))
            return int(listener.getsockname()[1])
    raise OSError(f"no TCP port is free on {address or 'this machine'}")


def kill_leftover_processes(
    environment: Mapping[str, str | None], *, but: Collection[int] = (), patience: float = LEFTOVER_PATIENCE_SECONDS
) -> list[str]:
    """SIGKILL every process of this machine whose environment has all these variables; return their command lines.

    A variable with None may have any value. Processes that end within LEFTOVER_GRACE_SECONDS are neither killed nor
    returned. `but`: processes that live on, with their children. `patience`: seconds of waiting for the end.
    """
    ended: dict[int, str] = {}
    begun = time.monotonic()
    while (found := _processes_with(environment, but)) and time.monotonic() < begun + LEFTOVER_GRACE_SECONDS + patience:
        for pid, command in found.items() if time.monotonic() > begun + LEFTOVER_GRACE_SECONDS else ():
            ended.setdefault(pid, command)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)  # time for a process that was about to start another one
    return list(ended.values())


def _processes_with(environment: Mapping[str, str | None], but: Collection[int]) -> dict[int, str]:
    """Return command lines by process id. Processes of other users cannot be read and are skipped."""
    wanted = {f"{name}={value}".encode() for name, value in environment.items() if value is not None}
    named = {name.encode() for name, value in environment.items() if value is None}
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            variables = set(Path(f"/proc/{name}/environ").read_bytes().split(b"\0"))
            if not wanted <= variables or not named <= {variable.partition(b"=")[0] for variable in variables}:
                continue
            parent = int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
            if int(name) in but or parent in but:
                continue
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            found[int(name)] = b" ".join(words).decode("utf-8", errors="replace").strip()
    return found


def main(argv: Sequence[str]) -> int:
    """Start the ranks that `argv` (without the program's name) requests; return the result of `start_tasks`."""
    parser = argparse.ArgumentParser(prog="relayrun.control.scheduler.local_srun")
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--pid-file", type=Path, help="where to write the id of this process")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    log_to_stderr()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.pid_file is not None:
        write_atomic(options.pid_file, f"{os.getpid()}\n")
    return start_tasks(options.ntasks, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
