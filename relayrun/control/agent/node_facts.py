"""What a node says of itself, in numbers: memory, disk, open files, GPUs, and the site's own check.

    python -m relayrun.control.agent.node_facts --run-dir R --attempt N

prints them as one JSON object, before the first ranks. It is a program of its own since a disk that hangs would hold up
who asks it. Between restarts the agent asks for what takes no more than milliseconds. `agent.node_findings` judges.
Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relayrun.control.agent.memory_copies import SHARED_MEMORY
from relayrun.control.rundir.node_health import NodeChecks
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.tasks import die_with_parent
from relayrun.errors import run_main
from relayrun.files import free_space, temporary_prefix

NodeFacts = dict[str, Any]
GPU_SECONDS = 10.0
"""How long NVIDIA's library may take to answer."""
OUTPUT_CHARACTERS = 300
"""Characters at most of what a program says."""
OUTPUT_BYTES = 1 << 20
"""Bytes at most of what a program prints."""
PROGRAM_PAUSE = 0.02
"""Seconds between two looks at a program that has not ended."""
CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""From so many bytes on a limit of memory is none."""


def quick_facts(attempt: Path) -> NodeFacts:
    """What takes milliseconds. `attempt`: the folder of the attempt, which must be writable."""
    tmp = temporary_folder()
    unwritable = {name: words for name, path in (("run_dir", attempt), ("tmp", tmp)) if (words := write_error(path))}
    room = {name: _free_space(path) for name, path in (("shm", SHARED_MEMORY), ("tmp", tmp))}
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "memory": available_memory(),
        **room,
        "unwritable": unwritable,
        "open_files": None if hard == resource.RLIM_INFINITY else hard,
    }


def temporary_folder() -> Path:
    """Where programs put temporary files. `tempfile` would try another folder where this one cannot be written."""
    named = os.environ.get("TMPDIR", "")
    return Path(named) if os.path.isdir(named) else Path("/tmp")  # that of a login node may be on no other node


def write_error(folder: Path) -> str:
    """Why nothing can be written into this folder; empty where something can."""
    try:
        fd, name = tempfile.mkstemp(dir=folder, prefix=temporary_prefix())
        try:
            os.write(fd, b"0" * 4096)
        finally:
            os.close(fd)
            os.unlink(name)
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return ""


def _free_space(folder: Path) -> int | None:
    try:
        return free_space(folder)
    except OSError:
        return None


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), own: Path = Path("/proc/self/cgroup"), groups: Path = CGROUPS
) -> int | None:
    """Bytes that a program may still take on this node, and in the job where it is limited to less; None: unknown.

    `own`: the groups of this process. `groups`: where all of them are.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) << 10)
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                found += _left_in_groups(groups, path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                found += _left_in_groups(groups / "memory", path, *names)
    return min(found, default=None)


def _left_in_groups(top: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
    """What is left below the limit of this group and of each that it lies in."""
    found = []
    folder = top / path.lstrip("/")
    while folder != top.parent:
        with contextlib.suppress(OSError, ValueError):  # no limit is `max`
            limit = int((folder / limit_name).read_text())
            used = int((folder / usage_name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limit < UNLIMITED:
                found.append(max(0, limit - used + int(stat.get(cache_name, 0))))
        folder = folder.parent
    return found


class TimedProgram:
    """A program whose answer is awaited for a time; it starts with this object, in a session of its own."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._seconds, self._began = seconds, time.monotonic()
        self._output = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._fd = -1
        self._error = ""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_prepare,
            )
        except OSError as error:
            self._error = f"{command[0]}: {error.strerror}"
        else:
            assert self._process.stdout is not None
            self._fd = self._process.stdout.fileno()
            os.set_blocking(self._fd, False)

    def fileno(self) -> int:
        """For selectors: readable when it says something or has ended. Negative where it did not start."""
        return self._fd

    def answer(self) -> tuple[int | None, str] | None:
        """Its exit code and what it printed; None: it has still time. The code is None where it did not answer.

        What it has left running that holds its output open is not waited for.
        """
        if self._process is None or self._process.stdout is None:
            return None, self._error
        ended = self._process.poll() is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 1 << 16):
                self._output = (self._output + data)[-OUTPUT_BYTES:]
        if not ended and time.monotonic() - self._began <= self._seconds:
            return None
        self.end()
        self._process.stdout.close()
        if not ended:
            return None, f"no answer within {self._seconds:g} s"
        return self._process.returncode, self._output.decode(errors="replace")

    def wait(self) -> tuple[int | None, str]:
        """Wait for its answer."""
        output = select.poll()  # `select.select` takes no descriptor above 1023
        while (found := self.answer()) is None:
            output.register(self._fd, select.POLLIN)
            output.poll(PROGRAM_PAUSE * 1000)
        return found

    def end(self) -> None:
        """Kill the program and what it has started; any thread may. One that waits for a disk ends later.

        `answer` closes the descriptor: a number that is closed beside a thread that reads it is soon another file's.
        """
        if self._process is not None and self._process.stdout is not None and not self._process.stdout.closed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PROGRAM_PAUSE * 10)


def _prepare() -> None:
    die_with_parent(signal.SIGKILL)


def wait_for_gpu_facts(program: TimedProgram) -> NodeFacts:
    """Wait for what `train.gpu_health` finds; `gpu_error` where it finds nothing out."""
    return gpu_facts(*program.wait())


def gpu_facts(code: int | None, output: str) -> NodeFacts:
    """The same, from its answer."""
    with contextlib.suppress(ValueError):
        found = json.loads(output.splitlines()[-1]) if code == 0 and output else None
        if isinstance(found, dict):
            return found
    return {"gpu_error": _shortened(output) or f"exit code {code}"}


def wait_for_command_facts(program: TimedProgram) -> NodeFacts:
    """What the site's own check said."""
    code, output = program.wait()
    return {"command": {"code": code, "words": _shortened(output)}}


def gather_facts(checks: NodeChecks, attempt: Path) -> NodeFacts:
    """All that is known of this node before its first ranks."""
    began = time.monotonic()
    programs = []
    if checks.gpus and checks.gpu_program:
        programs.append((wait_for_gpu_facts, TimedProgram(checks.gpu_program, GPU_SECONDS)))
    if checks.command:
        programs.append((wait_for_command_facts, TimedProgram(checks.command, checks.limits.command_seconds)))
    found = quick_facts(attempt)
    for answer, program in programs:
        found |= answer(program)
    return found | {"seconds": round(time.monotonic() - began, 4)}


def _shortened(words: str) -> str:
    text = " ".join(words.split())
    return text if len(text) <= OUTPUT_CHARACTERS else text[: OUTPUT_CHARACTERS - 3] + "..."


def main() -> int:
    """Print what is known of this node; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="relayrun.control.agent.node_facts", description="What a node says of itself."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args()
    run = Run(options.run_dir.absolute())
    checks = NodeChecks.of_plan(Plan.load(run)) or NodeChecks()
    print(json.dumps(gather_facts(checks, run.attempt(options.attempt).path)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
