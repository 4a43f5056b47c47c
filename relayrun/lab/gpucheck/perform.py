"""One whole check on this machine: its parts, the table, the file."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from relayrun import places
from relayrun.errors import ConfigError, RelayrunError
from relayrun.files import write_json
from relayrun.lab.gpucheck import report
from relayrun.lab.gpucheck.check import PARTS, CheckPart, PartOutcome, run_parts
from relayrun.lab.gpucheck.report import CheckRow
from relayrun.lab.gpucheck.setup import TRACE_FILE, CheckSetup

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
