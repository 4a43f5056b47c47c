"""The parts of a check, one after the other, each in a process of its own: none of them can take another along.

A part that raises, dies or hangs leaves a row that says why, what it had measured up to there, and no process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from relayrun.files import read_json
from relayrun.lab.gpucheck.logs import last_log_line, log_error, log_tail
from relayrun.lab.gpucheck.setup import CheckSetup

log = logging.getLogger(__name__)

PROCESS_MARK = "GPU_CHECK_PART"
"""A variable of the environment of everything that a part starts: jobs of the local scheduler have sessions of their
own, and RELAYRUN_ variables are not handed on to them."""

PartStatus = Literal["done", "failed", "timeout", "skipped"]


@dataclass(frozen=True, kw_only=True)
class CheckPart:
    """One row, or several, of the table."""

    name: str
    what: str
    """One line for people."""
    function: str
    """`module:function`, see `part.py`."""
    seconds: float
    """How long it may take at most on a GPU."""
    least: float
    """Where less than this is left of the whole check's time, it is not begun."""


PARTS: tuple[CheckPart, ...] = (
    CheckPart(
        name="environment",
        what="versions, device, what it can do",
        function="relayrun.lab.gpucheck.environment:measure_environment",
        seconds=90,
        least=0,
    ),
    CheckPart(
        name="resume",
        what="runs that are cut and resumed",
        function="relayrun.lab.gpucheck.resume:measure_resume",
        seconds=200,
        least=40,
    ),
    CheckPart(
        name="recovery",
        what="ranks that die, and go on inside their job",
        function="relayrun.lab.gpucheck.recovery:measure_recovery",
        seconds=120,
        least=40,
    ),
    CheckPart(
        name="speed",
        what="a 1B model: batch, MFU, memory, time by part, one trace",
        function="relayrun.lab.gpucheck.speed:measure_speed",
        seconds=200,
        least=60,
    ),
    CheckPart(
        name="save",
        what="what a save holds up, and a load",
        function="relayrun.lab.gpucheck.save:measure_save",
        seconds=180,
        least=60,
    ),
    CheckPart(
        name="attention",
        what="which kernel, and how fast",
        function="relayrun.lab.gpucheck.attention:measure_attention",
        seconds=60,
        least=15,
    ),
    CheckPart(
        name="models",
        what="other models, optimizers and types",
        function="relayrun.lab.gpucheck.models:measure_models",
        seconds=150,
        least=40,
    ),
    CheckPart(
        name="layouts",
        what="two ranks, in every way that a model is split",
        function="relayrun.lab.gpucheck.models:measure_layouts",
        seconds=180,
        least=60,
    ),
    CheckPart(
        name="export",
        what="logits of the exported model",
        function="relayrun.lab.gpucheck.export:measure_export",
        seconds=90,
        least=30,
    ),
    CheckPart(
        name="bandwidth",
        what="all-reduce between GPUs",
        function="relayrun.lab.gpucheck.bandwidth:measure_bandwidth",
        seconds=60,
        least=15,
    ),
)


@dataclass(frozen=True, kw_only=True)
class PartOutcome:
    """How a part ended, and what it measured."""

    name: str
    status: PartStatus
    seconds: float = 0.0
    words: str | None = None
    """Why, where it is not done."""
    figures: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return asdict(self)


def run_parts(
    setup: CheckSetup, parts: Sequence[CheckPart], say: Callable[[str], None], *, began: float, stretch: float = 1.0
) -> list[PartOutcome]:
    """Measure the parts, in this order; `began`: when the check did, by the monotonic clock.

    `stretch`: every part's time, times this.
    """
    found = []
    for part in parts:
        left = setup.sizes.seconds - (time.monotonic() - began)
        if left < part.least or left <= 0:
            words = f"the {setup.sizes.seconds:.0f} s of the whole check are over"
            found.append(PartOutcome(name=part.name, status="skipped", words=words))
        else:
            say(f"{part.name}: {part.what}")
            found.append(run_part(setup, part, seconds=min(left, part.seconds * stretch)))
        if found[-1].status in ("failed", "timeout"):
            say(log_tail(setup.parts / f"{part.name}.log", 80))
        say(f"{part.name}: {found[-1].status} in {found[-1].seconds:.0f} s" + _reason_suffix(found[-1].words))
    return found


def run_part(setup: CheckSetup, part: CheckPart, *, seconds: float) -> PartOutcome:
    """Run one part in a process of its own; when this returns, nothing that it started is left."""
    setup.parts.mkdir(parents=True, exist_ok=True)
    given, figures, log_file = (setup.parts / f"{part.name}.{end}" for end in ("setup.json", "json", "log"))
    figures.unlink(missing_ok=True)
    setup.write(given)
    mark = secrets.token_hex(8)
    command = [sys.executable, "-m", "relayrun.lab.gpucheck.part", part.function, str(given), str(figures)]
    started = time.monotonic()
    status: PartStatus = "done"
    words: str | None = None
    with log_file.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=setup.environment() | {PROCESS_MARK: mark},
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
            if code:
                status, words = "failed", log_error(log_file, code)
        except subprocess.TimeoutExpired:
            status, words = "timeout", f"was ended after {seconds:.0f} s; the last it said: {last_log_line(log_file)}"
        finally:
            kill_marked_processes(mark)
            process.wait()
    return PartOutcome(
        name=part.name,
        status=status,
        seconds=time.monotonic() - started,
        words=words,
        figures=_read_figures(figures),
    )


def kill_marked_processes(mark: str) -> None:
    """Kill all processes of this user whose environment has this mark, until there is none."""
    needle = f"{PROCESS_MARK}={mark}".encode()
    for _ in range(50):
        found = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _has_mark(pid, needle)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    log.warning("processes %s of a part of the check do not end", ", ".join(map(str, found)))


def _has_mark(pid: int, needle: bytes) -> bool:
    """Whether a process, which is no zombie, has this in its environment."""
    try:
        if pid == os.getpid() or needle not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _read_figures(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_json(path)
    except (OSError, json.JSONDecodeError):
        return {}
    return found


def _reason_suffix(words: str | None) -> str:
    return f": {words}" if words else ""
