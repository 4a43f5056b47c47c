"""Facts of a node in numbers (memory, disk, open files, GPUs, the site's own check), and its defects by them.

    python -m relayrun.control.agent.node_facts --run-dir R --attempt N

prints the facts as one JSON object, before the first ranks. It is a program of its own since a disk that hangs would
delay the caller. Between restarts the agent asks only for facts that take milliseconds.

The findings are pure functions of facts, measurements and limits. A hard finding: ranks cannot train there, or their
results cannot be trusted. A finding on every node of several counts on none: a wrong limit must end no run. Standard
library only.
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
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from relayrun.control.agent.memory_copies import SHARED_MEMORY
from relayrun.control.rundir.node_health import HealthAction, HealthFinding
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local_srun import die_with_parent
from relayrun.errors import run_main
from relayrun.files import free_space, write_error
from relayrun.terminal import one_line

NodeFacts = dict[str, Any]
GPU_SECONDS = 10.0
"""Seconds for NVIDIA's library to answer."""
OUTPUT_CHARACTERS = 300
"""Maximum characters of a program's output in a finding."""
OUTPUT_BYTES = 1 << 20
"""Maximum bytes of a program's output."""
PROGRAM_PAUSE = 0.02
"""Seconds between two looks at a program that has not ended."""


def quick_facts(attempt: Path) -> NodeFacts:
    """Return the facts that take milliseconds. `attempt`: the folder of the attempt, which must be writable."""
    tmp = temporary_folder()
    folders = {"run_dir": attempt, "tmp": tmp}
    errors = {name: error for name, path in folders.items() if (error := write_error(path))}
    unwritable = {name: f"{folders[name]}: {error.strerror or error}" for name, error in errors.items()}
    room: dict[str, int | None] = {"shm": None, "tmp": None}
    for name, path in (("shm", SHARED_MEMORY), ("tmp", tmp)):
        with contextlib.suppress(OSError):
            room[name] = free_space(path)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {**room, "unwritable": unwritable, "open_files": None if hard == resource.RLIM_INFINITY else hard}


def temporary_folder() -> Path:
    """Return the folder for temporary files; `tempfile` would choose another one if this one cannot be written."""
    named = os.environ.get("TMPDIR", "")
    return Path(named) if os.path.isdir(named) else Path("/tmp")  # that of a login node may be on no other node


class TimedProgram:
    """A program with a time limit; it starts with this object, in a session of its own."""

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
                preexec_fn=partial(die_with_parent, signal.SIGKILL),
            )
        except OSError as error:
            self._error = f"{command[0]}: {error.strerror}"
        else:
            assert self._process.stdout is not None
            self._fd = self._process.stdout.fileno()
            os.set_blocking(self._fd, False)

    def wait(self) -> tuple[int | None, str]:
        """Wait for its exit code and output; the code is None if it did not answer. Processes that it left running with
        its output open are not awaited."""
        if self._process is None or self._process.stdout is None:
            return None, self._error
        output, ended, late = select.poll(), False, False  # `select.select` takes no descriptor above 1023
        output.register(self._fd, select.POLLIN)
        while not (ended or late):
            output.poll(PROGRAM_PAUSE * 1000)
            ended, late = self._process.poll() is not None, time.monotonic() - self._began > self._seconds
            with contextlib.suppress(BlockingIOError):
                while data := os.read(self._fd, 1 << 16):
                    self._output = (self._output + data)[-OUTPUT_BYTES:]
        self.end()
        self._process.stdout.close()
        if not ended:
            return None, f"no answer within {self._seconds:g} s"
        return self._process.returncode, self._output.decode(errors="replace")

    def end(self) -> None:
        """Kill the program and its children, from any thread. A process that waits for a disk ends later. `answer`
        closes the descriptor: a number that is closed while another thread reads it soon belongs to another file."""
        if self._process is not None and self._process.stdout is not None and not self._process.stdout.closed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PROGRAM_PAUSE * 10)


def gpu_facts(code: int | None, output: str) -> NodeFacts:
    """Return the facts in the answer of `train.gpu_health`; `gpu_error` if it found nothing out."""
    found = printed_facts(code, output)
    return {"gpu_error": one_line(output, OUTPUT_CHARACTERS) or f"exit code {code}"} if found is None else found


def printed_facts(code: int | None, output: str) -> NodeFacts | None:
    """Return the facts that a program printed on its last line; None without them."""
    with contextlib.suppress(ValueError, IndexError):
        if code == 0 and isinstance(found := json.loads(output.splitlines()[-1]), dict):
            return found
    return None


def _command_facts(code: int | None, output: str) -> NodeFacts:
    return {"command": {"code": code, "words": one_line(output, OUTPUT_CHARACTERS)}}


def gather_facts(plan: Plan, attempt: Path) -> NodeFacts:
    """Return all facts of this node before its first ranks. `attempt`: the folder of the attempt."""
    began, chain = time.monotonic(), plan.chain
    programs = []
    if plan.gpus_per_node and plan.gpu_program:
        programs.append((gpu_facts, TimedProgram(plan.gpu_program, GPU_SECONDS)))
    if chain.node_health_command:
        seconds = chain.node_health_limits.command_seconds
        programs.append((_command_facts, TimedProgram(chain.node_health_command, seconds)))
    found = quick_facts(attempt)
    for facts_of, program in programs:
        found |= facts_of(*program.wait())
    return found | {"seconds": round(time.monotonic() - began, 4)}


SLOWDOWN_REASONS = {
    0x8: "by hardware",
    0x40: "by heat (hardware)",
    0x80: "by the power brake",
    0x20: "by heat (software)",
}
"""NVML's reasons for a reduced clock by their bit, except those of a usual load."""
FEW_NODES = 2
"""From this number of nodes on, a finding on all of them counts on none."""


def findings_of_facts(node: str, facts: Mapping[str, Any], plan: Plan) -> Iterator[HealthFinding]:
    """Yield the defects of a node by its own facts (`agent.node_facts`)."""
    limits, finding = plan.chain.node_health_limits, partial(HealthFinding, node=node)
    if "answer" in facts:
        yield finding(check="answer", value=0, limit=1, hard=False, words=str(facts["answer"]))
    unwritable: Mapping[str, str] = facts.get("unwritable") or {}
    for check, why in unwritable.items():
        yield finding(check=check, value=0, limit=1, hard=True, words=f"cannot be written: {why}")
    for check, limit, what in (
        ("shm", limits.shm_gb * 1e9, "/dev/shm"),
        ("tmp", limits.tmp_gb * 1e9, "the folder for temporary files"),
    ):
        room = facts.get(check)
        if room is not None and room < limit and check not in unwritable:
            words = f"{_gb(room)} GB are free in {what}, {_gb(limit)} GB wanted"
            yield finding(check=check, value=room, limit=limit, hard=False, words=words)
    files = facts.get("open_files")
    if files is not None and files < limits.open_files:
        words = f"a process may open {files} files, {limits.open_files} wanted (`ulimit -Hn`)"
        yield finding(check="open_files", value=files, limit=limits.open_files, hard=False, words=words)
    if "gpus" in facts:
        yield from _gpu_findings(finding, facts, plan.gpus_per_node)
    elif facts.get("gpu_error"):
        words = f"its GPUs are not known: {facts['gpu_error']}"
        yield finding(check="gpus", value=0, limit=plan.gpus_per_node, hard=False, words=words)
    if (own := facts.get("command")) is not None and own["code"] != 0:
        words = f"the site's own check ({plan.chain.node_health_command[0]}): {own['words'] or 'no words'}"
        words += "" if own["code"] is None else f" (exit status {own['code']})"
        value = -1 if own["code"] is None else own["code"]
        hard = own["code"] is not None  # one that does not answer says nothing of the node
        yield finding(check="command", value=value, limit=0, hard=hard, words=words)


def _gpu_findings(
    finding: Callable[..., HealthFinding], facts: Mapping[str, Any], wanted: int
) -> Iterator[HealthFinding]:
    gpus: Sequence[Mapping[str, Any]] = facts["gpus"]
    there = [gpu for gpu in gpus if not gpu.get("error")]
    if len(there) < wanted:
        errors = "".join(f"; GPU {gpu['index']}: {gpu['error']}" for gpu in gpus if gpu.get("error"))
        words = f"{len(there)} GPUs answer, and the job asks for {wanted}{errors}"
        yield finding(check="gpus", value=len(there), limit=wanted, hard=True, words=words)
    for gpu in there:
        name = f"GPU {gpu['index']}"
        if (count := gpu.get("ecc_uncorrected") or 0) > 0:
            words = f"{name}: {count} uncorrected ECC errors since the driver was loaded"
            yield finding(check="gpu_ecc", value=count, limit=0, hard=True, words=words)
        if (failed := gpu.get("rows_failed")) or gpu.get("rows_pending"):
            what = "a row of its memory could not" if failed else "rows of its memory wait to"
            words = f"{name}: {what} be remapped{'' if failed else ', by a reset'}"
            yield finding(check="gpu_rows", value=1, limit=0, hard=bool(failed), words=words)
        slowed = [words for bit, words in SLOWDOWN_REASONS.items() if (gpu.get("slowed") or 0) & bit]
        if slowed:
            words = f"{name}: its clock is held down {', '.join(slowed)}"
            yield finding(check="gpu_slowed", value=gpu["slowed"], limit=0, hard=False, words=words)


def findings_of_clock(node: str, offset: float, uncertainty: float, plan: Plan) -> Iterator[HealthFinding]:
    """Yield a finding if a node's clock is certainly off by more than the limit; seconds from the median of all."""
    limit = plan.chain.node_health_limits.clock_seconds
    if abs(offset) - uncertainty > limit:
        words = f"its clock is {abs(offset):.3g} s {'ahead' if offset > 0 else 'behind'} (± {uncertainty:.2g} s), "
        words += f"{limit:g} s allowed"
        yield HealthFinding(node=node, check="clock", value=abs(offset), limit=limit, hard=False, words=words)


def judge_findings(
    findings: Sequence[HealthFinding], *, nodes: int, mode: str
) -> tuple[list[HealthFinding], dict[str, HealthFinding]]:
    """Return the findings, and the finding for which each sick node must be excluded.

    `nodes`: number of nodes examined. In mode `warn` only hard findings make a node sick, in mode `exclude` all do. A
    finding on each of several nodes makes none of them sick.
    """
    having = Counter(check for _, check in {(found.node, found.check) for found in findings})
    of_all = {check for check, count in having.items() if nodes >= FEW_NODES and count >= nodes}
    seen = [replace(found, reason="every node has it") if found.check in of_all else found for found in findings]
    sick: dict[str, HealthFinding] = {}
    for found in sorted(seen, key=lambda each: not each.hard):
        if found.check not in of_all and (found.hard or mode == "exclude"):
            sick.setdefault(found.node, found)
    return seen, sick


def decide_actions(
    sick: Mapping[str, HealthFinding], *, left: int, fitting: Callable[[int], int]
) -> dict[str, tuple[HealthAction, str]]:
    """Return the action for each sick node, and why it is not excluded if it is not.

    `left`: nodes of the job that are not given up. `fitting`: number of nodes, out of so many, with which training can
    continue. A node with a hard finding is excluded if training can continue without it, and ends the attempt
    otherwise; another node is excluded only if as many nodes train without it.
    """
    actions: dict[str, tuple[HealthAction, str]] = {}
    for node, found in sick.items():
        without = fitting(left - 1)
        if without == 0 and found.hard:
            actions[node] = ("ended", "no other node takes its place")
        elif not found.hard and without < fitting(left):
            actions[node] = ("warned", "no other node takes its place")
        else:
            actions[node], left = ("left out", ""), left - 1
    return actions


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g}"


def main() -> int:
    """Print the facts of this node; return the exit code."""
    parser = argparse.ArgumentParser("relayrun.control.agent.node_facts", description="What a node says of itself.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args()
    run = Run(options.run_dir.absolute())
    print(json.dumps(gather_facts(Plan.load_in_job(run), run.attempt(options.attempt).path)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
