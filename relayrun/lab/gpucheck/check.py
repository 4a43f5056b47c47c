"""One whole check on this machine: its parts, one after the other, the table and the file of the result.

Each part runs in a process of its own. A part that raises, dies or hangs leaves a row with the reason and the figures
measured before, and no process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from relayrun import places
from relayrun.errors import ConfigError, RelayrunError
from relayrun.files import read_json, write_json
from relayrun.lab.gpucheck import report
from relayrun.lab.gpucheck.report import CheckRow
from relayrun.lab.gpucheck.setup import TRACE_FILE, CheckSetup, last_log_line, log_error, log_tail

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
        function="relayrun.lab.gpucheck.performance:measure_environment",
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
        function="relayrun.lab.gpucheck.resume:measure_recovery",
        seconds=120,
        least=40,
    ),
    CheckPart(
        name="speed",
        what="a 1B model: batch, MFU, memory, time by part, one trace",
        function="relayrun.lab.gpucheck.performance:measure_speed",
        seconds=200,
        least=60,
    ),
    CheckPart(
        name="save",
        what="what a save holds up, and a load",
        function="relayrun.lab.gpucheck.performance:measure_save",
        seconds=180,
        least=60,
    ),
    CheckPart(
        name="attention",
        what="which kernel, and how fast",
        function="relayrun.lab.gpucheck.performance:measure_attention",
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
        function="relayrun.lab.gpucheck.models:measure_export",
        seconds=90,
        least=30,
    ),
    CheckPart(
        name="bandwidth",
        what="all-reduce between GPUs",
        function="relayrun.lab.gpucheck.performance:measure_bandwidth",
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


RESULTS_FOLDER = places.CODE_ROOT / "benchmarks" / "results"
TINY_TIME_FACTOR = 10.0
"""Tiny parts take seconds; where a machine has other work, they may take this much longer than those on a GPU."""


def run_check(
    setup: CheckSetup,
    *,
    only: Sequence[str] = (),
    output: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    parts: Sequence[CheckPart] = PARTS,
) -> tuple[Path, list[CheckRow]]:
    """Run the check; return the file of the result and its table. Raises RelayrunError where nothing can be checked.

    `only`: names of parts; default: all. The first part, which says what is here, always runs.
    """
    began = time.monotonic()
    chosen = select_parts(only, parts)
    prepare_folder(setup)
    stretch = TINY_TIME_FACTOR if setup.tiny else 1.0
    found = run_parts(setup, chosen[:1], say, began=began, stretch=stretch)
    setup = with_device(setup, found[0])
    found += run_parts(setup, chosen[1:], say, began=began, stretch=stretch)
    result = result_record(setup, found, seconds=time.monotonic() - began)
    path = output or result_path(setup, partial=bool(only))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    if output is not None and (setup.path / TRACE_FILE).exists():
        shutil.copyfile(setup.path / TRACE_FILE, path.with_name(f"{path.stem}-{TRACE_FILE}"))
    return path, report.check_rows(result)


def select_parts(only: Sequence[str], parts: Sequence[CheckPart]) -> list[CheckPart]:
    """Return the parts that were asked for, in their order. Raises ConfigError for a name that is none."""
    known = [part.name for part in parts]
    if unknown := sorted(set(only) - set(known)):
        raise ConfigError(f"unknown part {', '.join(unknown)}; there are: {', '.join(known)}", where="--only")
    return [part for number, part in enumerate(parts) if number == 0 or not only or part.name in only]


def prepare_folder(setup: CheckSetup) -> None:
    """Make the folder of the check, without what an earlier one left there. Raises ConfigError if it is another's."""
    if setup.path.exists() and any(setup.path.iterdir()) and not setup.parts.is_dir():
        raise ConfigError("this folder holds other things than a check", where=setup.path, hint="give one that is new")
    (setup.path / TRACE_FILE).unlink(missing_ok=True)
    for name in ("parts", "runs", "configs", "data", "exported"):
        shutil.rmtree(setup.path / name, ignore_errors=True)
    setup.parts.mkdir(parents=True, exist_ok=True)


def with_device(setup: CheckSetup, environment: PartOutcome) -> CheckSetup:
    """Return the setup with what the first part has found. Raises RelayrunError where that is no device to check."""
    gpus = environment.figures.get("gpus")
    if not gpus and not setup.tiny:
        raise RelayrunError(environment.words or "torch sees no GPU here", where=setup.parts)
    if not gpus:
        return setup
    return replace(setup, gpus=len(gpus), device=gpus[0]["name"], memory_bytes=gpus[0]["memory_bytes"])


def result_record(setup: CheckSetup, found: Sequence[PartOutcome], *, seconds: float) -> dict[str, Any]:
    """Return what goes into the file: all that was measured, and no path of this machine."""
    made: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": setup.device,
        "gpus": setup.gpus,
        "nodes": setup.nodes,
        "tiny": setup.tiny,
        "seconds": seconds,
        "overrides": setup.overrides,
        "hooks": setup.hooks,
        "stall_allowance": setup.sizes.stall_allowance,
        "parts": [outcome.record() for outcome in found],
    }
    shown = {str(setup.path): "(folder of the check)", str(places.CODE_ROOT): "(repository)", sys.prefix: "(Python)"}
    without: dict[str, Any] = _replace_paths(made, shown)
    return without


def result_path(setup: CheckSetup, *, partial: bool) -> Path:
    """Return where the result goes: among those of the benchmarks, if it is a whole one of a GPU."""
    if setup.tiny:
        return setup.path / "gpu-tiny.json"
    return (RESULTS_FOLDER if RESULTS_FOLDER.is_dir() and not partial else setup.path) / report.result_file_name(
        setup.device
    )


def print_result(path: Path, table: Sequence[CheckRow]) -> None:
    """Print the table, what is missed once more, and where the result is."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    made = Table("part", "what", "measured", "target", "reached")
    for row in table:
        made.add_row(row.part, row.what, row.value, row.target, row.verdict)
    console.print(made, markup=False)
    for row in table:
        if row.fails:
            console.print(f"FAILED: {row.part}: {row.what}: {row.value or row.verdict}", markup=False, soft_wrap=True)
    console.print(f"result: {path}", soft_wrap=True, markup=False)


def _replace_paths(value: Any, places: dict[str, str]) -> Any:
    if isinstance(value, str):
        for old, new in places.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, dict):
        return {name: _replace_paths(item, places) for name, item in value.items()}
    return [_replace_paths(item, places) for item in value] if isinstance(value, list) else value
