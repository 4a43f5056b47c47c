"""Slurm's answers and lines of metrics for the tests of goodput."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir.restarts import FailedRestart
from relayrun.control.scheduler import job_history
from relayrun.files import append_line
from relayrun.watch.goodput.attribution import NEEDED_COLUMNS, MetricsBlock, read_metrics_blocks
from relayrun.watch.goodput.ledger import MICROSECONDS_PER_SECOND


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Only these commands of Slurm are there."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(job_history, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(job_history, "SILENT_COMMANDS", set())
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin")


def by_name(rows: str) -> str:
    """A script that answers with these rows where it is asked by the name of the job."""
    return f"case \"$*\" in *--name=*) cat << 'END'\n{rows}\nEND\n;; esac"


def seconds(parts: dict[str, int]) -> dict[str, float]:
    return {name: amount / MICROSECONDS_PER_SECOND for name, amount in parts.items() if amount}


def step(iteration: int, at: float, took: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"iteration": iteration, "loss": 1.0, "step_seconds": took, "time": at, **more}


def written(folder: Path, lines: list[dict[str, Any]]) -> list[MetricsBlock]:
    path = folder / "metrics.jsonl"
    path.unlink(missing_ok=True)
    for line in lines:
        append_line(path, line, durable=False)
    return list(read_metrics_blocks(path, NEEDED_COLUMNS))


def failed(number: int, at: float, **changes: Any) -> FailedRestart:
    values: dict[str, Any] = {
        "rank": 1,
        "node": "n1",
        "words": "killed by SIGKILL",
        "iteration": 2,
        "base_iteration": 0,
    }
    values |= {"durable_iteration": 1, "next_iteration": 1, "again": True, "steps_lost": 1}
    return FailedRestart(restart=number, time=at, **(values | changes))
