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
from relayrun.lab.gpucheck.check import PARTS, Outcome, Part, run
from relayrun.lab.gpucheck.report import Row
from relayrun.lab.gpucheck.setup import TRACE, Setup

RESULTS = places.CODE / "benchmarks" / "results"
STRETCH = 10.0
"""Tiny parts take seconds; where a machine has other work, they may take this much longer than those on a GPU."""


def perform(
    setup: Setup,
    *,
    only: Sequence[str] = (),
    output: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    parts: Sequence[Part] = PARTS,
) -> tuple[Path, list[Row]]:
    """Run the check; return the file of the result and its table. Raises RelayrunError where nothing can be checked.

    `only`: names of parts; default: all. The first part, which says what is here, always runs.
    """
    began = time.monotonic()
    chosen = select(only, parts)
    prepare(setup)
    stretch = STRETCH if setup.tiny else 1.0
    found = run(setup, chosen[:1], say, began=began, stretch=stretch)
    setup = learn(setup, found[0])
    found += run(setup, chosen[1:], say, began=began, stretch=stretch)
    result = record(setup, found, seconds=time.monotonic() - began)
    path = output or place(setup, partial=bool(only))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    if output is not None and (setup.path / TRACE).exists():
        shutil.copyfile(setup.path / TRACE, path.with_name(f"{path.stem}-{TRACE}"))
    return path, report.rows(result)


def select(only: Sequence[str], parts: Sequence[Part]) -> list[Part]:
    """Return the parts that were asked for, in their order. Raises ConfigError for a name that is none."""
    known = [part.name for part in parts]
    if unknown := sorted(set(only) - set(known)):
        raise ConfigError(f"unknown part {', '.join(unknown)}; there are: {', '.join(known)}", where="--only")
    return [part for number, part in enumerate(parts) if number == 0 or not only or part.name in only]


def prepare(setup: Setup) -> None:
    """Make the folder of the check, without what an earlier one left there. Raises ConfigError if it is another's."""
    if setup.path.exists() and any(setup.path.iterdir()) and not setup.parts.is_dir():
        raise ConfigError("this folder holds other things than a check", where=setup.path, hint="give one that is new")
    (setup.path / TRACE).unlink(missing_ok=True)
    for name in ("parts", "runs", "configs", "data", "exported"):
        shutil.rmtree(setup.path / name, ignore_errors=True)
    setup.parts.mkdir(parents=True, exist_ok=True)


def learn(setup: Setup, environment: Outcome) -> Setup:
    """Return the setup with what the first part has found. Raises RelayrunError where that is no device to check."""
    gpus = environment.figures.get("gpus")
    if not gpus and not setup.tiny:
        raise RelayrunError(environment.words or "torch sees no GPU here", where=setup.parts)
    if not gpus:
        return setup
    return replace(setup, gpus=len(gpus), device=gpus[0]["name"], memory_bytes=gpus[0]["memory_bytes"])


def record(setup: Setup, found: Sequence[Outcome], *, seconds: float) -> dict[str, Any]:
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
    shown = {str(setup.path): "(folder of the check)", str(places.CODE): "(repository)", sys.prefix: "(Python)"}
    without: dict[str, Any] = _replaced(made, shown)
    return without


def place(setup: Setup, *, partial: bool) -> Path:
    """Return where the result goes: among those of the benchmarks, if it is a whole one of a GPU."""
    if setup.tiny:
        return setup.path / "gpu-tiny.json"
    return (RESULTS if RESULTS.is_dir() and not partial else setup.path) / report.file_name(setup.device)


def show(path: Path, table: Sequence[Row]) -> None:
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


def _replaced(value: Any, places: dict[str, str]) -> Any:
    if isinstance(value, str):
        for old, new in places.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, dict):
        return {name: _replaced(item, places) for name, item in value.items()}
    return [_replaced(item, places) for item in value] if isinstance(value, list) else value
