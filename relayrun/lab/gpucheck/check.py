"""A whole check on this machine: its parts, one after the other, the table and the result file.

Each part runs in its own process, `python -m relayrun.lab.gpucheck.check MODULE:FUNCTION SETUP FIGURES`. A part that
raises, dies or hangs leaves a row with the reason and the figures measured before, and no process.
"""

from __future__ import annotations

import importlib
import json
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

from relayrun import places
from relayrun.control.scheduler.local_srun import kill_leftover_processes
from relayrun.errors import ConfigError, RelayrunError, run_main
from relayrun.files import read_json, write_json
from relayrun.lab.gpucheck import report
from relayrun.lab.gpucheck.report import CheckRow
from relayrun.lab.gpucheck.setup import TRACE_FILE, CheckSetup, PartFigures, last_log_line, log_error, log_tail
from relayrun.terminal import print_rows

PROCESS_MARK = "GPU_CHECK_PART"
"""Environment variable of all processes of a part: jobs of the local scheduler have their own sessions, and do not
inherit RELAYRUN_ variables.
"""

PartStatus = Literal["done", "failed", "timeout", "skipped"]
RESULTS_FOLDER = places.CODE_ROOT / "benchmarks" / "results"
TINY_TIME_FACTOR = 10.0
"""Factor on the time limits of tiny parts, for a machine with other work."""


@dataclass(frozen=True, kw_only=True)
class CheckPart:
    """A part of the check: one or several rows of the table."""

    name: str
    what: str
    """Description in one line."""
    function: str
    """MODULE:FUNCTION, called with a `CheckSetup` and a `PartFigures`."""
    seconds: float
    """Its time on a GPU. A part may also use what the parts before it left of theirs."""
    gpus: int = 1
    """Skipped with fewer GPUs."""


def _part(module: str, name: str, seconds: float, what: str, *, gpus: int = 1) -> CheckPart:
    function = f"relayrun.lab.gpucheck.{module}:measure_{name}"
    return CheckPart(name=name, what=what, function=function, seconds=seconds, gpus=gpus)


PARTS: tuple[CheckPart, ...] = (
    _part("performance", "environment", 10, "versions, device, what it can do"),
    _part("kernels", "kernels", 80, "every kernel once: compiler, Adam, attention, models, copies, a fork, an export"),
    _part("resume", "resume", 85, "runs that are cut and resumed, and ranks that die and go on inside their job"),
    _part("performance", "save", 45, "what a save holds up, and a load"),
    _part("performance", "speed", 80, "a 1B model: batch, MFU, memory, one trace"),
    _part("kernels", "layouts", 180, "two ranks, in every way that a model is split", gpus=2),
)
MINUTES = 5
"""Time of all parts with one GPU."""


def run_check(
    setup: CheckSetup, *, only: Sequence[str], output: Path | None, minutes: float, say: Callable[[str], None]
) -> tuple[Path, list[CheckRow]]:
    """Run the check; return the result file and its table. Raises RelayrunError if there is no device to check. `only`:
    names of parts, default all. The first part, which describes the machine, always runs."""
    began = time.monotonic()
    chosen = select_parts(only, PARTS)
    prepare_folder(setup)
    stretch = (TINY_TIME_FACTOR if setup.tiny else 1.0) * minutes / MINUTES
    found = run_parts(setup, chosen[:1], say, began=began, stretch=stretch)
    setup = with_device(setup, found[0])
    found += run_parts(setup, chosen[1:], say, began=began, stretch=stretch, given=chosen[0].seconds)
    result = result_record(setup, found, seconds=time.monotonic() - began)
    path = output or result_path(setup, partial=bool(only))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    if output is not None and (setup.path / TRACE_FILE).exists():
        shutil.copyfile(setup.path / TRACE_FILE, path.with_name(f"{path.stem}-{TRACE_FILE}"))
    return path, report.check_rows(result)


def select_parts(only: Sequence[str], parts: Sequence[CheckPart]) -> list[CheckPart]:
    """Return the requested parts in their order. Raises ConfigError for an unknown name."""
    known = [part.name for part in parts]
    if unknown := sorted(set(only) - set(known)):
        raise ConfigError(f"unknown part {', '.join(unknown)}; there are: {', '.join(known)}", where="--only")
    return [part for number, part in enumerate(parts) if number == 0 or not only or part.name in only]


def prepare_folder(setup: CheckSetup) -> None:
    """Make an empty folder for the check. Raises ConfigError if it holds other files than an earlier check's."""
    if setup.path.exists() and any(setup.path.iterdir()) and not setup.parts.is_dir():
        raise ConfigError("this folder holds other things than a check", where=setup.path, hint="give one that is new")
    (setup.path / TRACE_FILE).unlink(missing_ok=True)
    for name in ("parts", "runs", "configs", "data", "exported"):
        shutil.rmtree(setup.path / name, ignore_errors=True)
    setup.parts.mkdir(parents=True, exist_ok=True)


def with_device(setup: CheckSetup, environment: PartOutcome) -> CheckSetup:
    """Return the setup with the device that the first part found. Raises RelayrunError without a device."""
    gpus = environment.figures.get("gpus")
    if not gpus and not setup.tiny:
        raise RelayrunError(environment.words or "torch sees no GPU here", where=setup.parts)
    if not gpus:
        return setup
    return replace(setup, gpus=len(gpus), device=gpus[0]["name"], memory_bytes=gpus[0]["memory_bytes"])


@dataclass(frozen=True, kw_only=True)
class PartOutcome:
    """Status and figures of a part."""

    name: str
    status: PartStatus
    seconds: float = 0.0
    words: str | None = None
    """The reason, unless `status` is done."""
    figures: dict[str, Any] = field(default_factory=dict)


def run_parts(
    setup: CheckSetup,
    parts: Sequence[CheckPart],
    say: Callable[[str], None],
    *,
    began: float,
    stretch: float = 1.0,
    given: float = 0.0,
) -> list[PartOutcome]:
    """Measure the parts in this order; after SIGINT or SIGTERM the others are skipped, and this returns.

    `began`: start of the check on the monotonic clock. `stretch`: factor on the times of parts. `given`: seconds of the
    parts before these. A part ends when the times of all parts up to it are over."""
    found: list[PartOutcome] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for part in parts:
            if part.gpus > 1 and setup.gpus == 1:
                found.append(PartOutcome(name=part.name, status="skipped", words="this machine has one GPU"))
                continue
            given += part.seconds
            say(f"{part.name}: {part.what}")
            left = given * stretch - (time.monotonic() - began)
            found.append(run_part(setup, part, seconds=max(1.0, left)))
            if found[-1].status in ("failed", "timeout"):
                say(log_tail(setup.parts / f"{part.name}.log", 80))
            words = f": {found[-1].words}" if found[-1].words else ""
            say(f"{part.name}: {found[-1].status} in {found[-1].seconds:.0f} s{words}")
    except KeyboardInterrupt:
        for part in parts[len(found) :]:
            figures = _read_figures(setup.parts / f"{part.name}.json")
            words = "the check was interrupted"
            found.append(PartOutcome(name=part.name, status="skipped", words=words, figures=figures))
    finally:
        signal.signal(signal.SIGTERM, before)
    return found


def run_part(setup: CheckSetup, part: CheckPart, *, seconds: float) -> PartOutcome:
    """Run one part in its own process; all its processes have ended when this returns."""
    setup.parts.mkdir(parents=True, exist_ok=True)
    given, figures, log_file = (setup.parts / f"{part.name}.{end}" for end in ("setup.json", "json", "log"))
    figures.unlink(missing_ok=True)
    setup.write(given)
    mark = secrets.token_hex(8)
    command = [sys.executable, "-m", "relayrun.lab.gpucheck.check", part.function, str(given), str(figures)]
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
            kill_leftover_processes({PROCESS_MARK: mark})
            process.wait()
    took = time.monotonic() - started
    return PartOutcome(name=part.name, status=status, seconds=took, words=words, figures=_read_figures(figures))


def _read_figures(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_json(path)
    except (OSError, json.JSONDecodeError):
        return {}
    return found


def result_record(setup: CheckSetup, found: Sequence[PartOutcome], *, seconds: float) -> dict[str, Any]:
    """Return the content of the result file: all figures, without paths of this machine."""
    made = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": setup.device,
        "gpus": setup.gpus,
        "tiny": setup.tiny,
        "seconds": seconds,
        "overrides": setup.overrides,
        "hooks": setup.hooks,
        "stall_allowance": setup.sizes.stall_allowance,
        "parts": [asdict(outcome) for outcome in found],
    }
    text = json.dumps(made)
    for old, new in (
        (str(setup.path), "(folder of the check)"),
        (str(places.CODE_ROOT), "(repository)"),
        (sys.prefix, "(Python)"),
    ):
        text = text.replace(json.dumps(old)[1:-1], new)
    without: dict[str, Any] = json.loads(text)
    return without


def result_path(setup: CheckSetup, *, partial: bool) -> Path:
    """Return the path of the result: in benchmarks/results for a complete check of a GPU."""
    if setup.tiny:
        return setup.path / "gpu-tiny.json"
    folder = RESULTS_FOLDER if RESULTS_FOLDER.is_dir() and not partial else setup.path
    return folder / report.result_file_name(setup.device)


def print_result(path: Path, table: Sequence[CheckRow]) -> None:
    """Print the table, the missed targets once more, and the path of the result."""
    cells = [(row.part, row.what, row.value, row.target, row.verdict) for row in table]
    print_rows(("part", "what", "measured", "target", "reached"), cells)
    for row in table:
        if row.fails:
            print(f"FAILED: {row.part}: {row.what}: {row.value or row.verdict}")
    print(f"result: {path}")


def main() -> int:
    """Measure one part in this process; the last line of its log is the reason of an error."""
    what, setup, figures = sys.argv[1:4]
    module, _, name = what.partition(":")
    getattr(importlib.import_module(module), name)(CheckSetup.read(Path(setup)), PartFigures(Path(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
