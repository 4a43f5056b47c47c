"""Formulas of the forecast, against values computed in another way."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from relayrun.config.compose import resolve
from relayrun.control.rundir.records import AttemptEnd, CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.storage_limits import format_bytes
from relayrun.submit.forecast import checkpoint_size, daly_interval, save_interval
from tests.history import began
from tests.workspace import Workspace


def waste(interval: float, save: float, mtbf: float) -> float:
    """Daly's model of the wall time of a second's work, with failures that are exponentially distributed."""
    return mtbf * (math.exp((interval + save) / mtbf) - 1) / interval


@pytest.mark.parametrize(("save", "mtbf"), [(5.0, 3600.0), (60.0, 24 * 3600.0), (300.0, 7200.0), (600.0, 3600.0)])
def test_the_save_interval_costs_least(save: float, mtbf: float) -> None:
    best = min((waste(0.5 * step, save, mtbf), 0.5 * step) for step in range(1, 40_000))
    assert waste(daly_interval(save, mtbf), save, mtbf) <= best[0] * 1.0005


def test_saves_that_are_longer_than_failures_are_apart() -> None:
    assert daly_interval(100.0, 50.0) == 50.0


def test_checkpoints_that_are_kept(tmp_path: Path) -> None:
    path = Workspace.make(tmp_path).config("run")
    run = Run(tmp_path / "run")

    def size(*overrides: str) -> tuple[int, int]:
        found = checkpoint_size(resolve.load_run_config(path, ["training.steps=1000", *overrides]), 100, run)
        return found.kept, found.most

    assert size("checkpoint.interval=100") == (3, 4)
    assert size("checkpoint.interval=1000") == (1, 2)
    assert size("checkpoint.interval=100", "checkpoint.keep_every=200") == (6, 7)
    fp32 = checkpoint_size(resolve.load_run_config(path), 100, run)
    bf16 = checkpoint_size(resolve.load_run_config(path, ["training.precision=bf16"]), 100, run)
    assert (fp32.bytes, bf16.bytes) == (1200, 1400)


def test_what_was_measured_counts_before_what_is_computed(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    config, run = (
        resolve.load_run_config(workspace.config("run"), ["cluster.node_mtbf_hours=100.0"]),
        workspace.run("run"),
    )
    assert save_interval(config, run) is None
    began(run, 1, base=0)
    attempt = run.attempt(1)
    begin = attempt.read_begin()
    assert begin is not None
    attempt.append_commit(
        CheckpointCommit(iteration=10, path="x", consumed_samples=80, time=0.0, seconds=7.0, files={"a": 30, "b": 12})
    )
    found = save_interval(config, run)
    assert found is not None
    assert (found.save, found.mtbf, found.mtbf_source) == (7.0, 360_000.0, "cluster.node_mtbf_hours 100 over 1 nodes")
    assert checkpoint_size(config, 100, run).bytes == 42
    AttemptEnd(
        attempt=1,
        cause="failed",
        reason="",
        exit_code=1,
        durable_iteration=10,
        progress=True,
        end_time=begin.start_time + 1800,
        action="retry",
    ).write(attempt.end)
    found = save_interval(config, Run(run.path))
    assert found is not None
    assert (found.mtbf, found.mtbf_source) == (1800.0, "1 failed attempts in 0.5 h of this run")


def test_bytes_for_people() -> None:
    assert [format_bytes(size) for size in (12, 1200, 42_200_000, 112e9, 999_900, 1.2e15)] == [
        "12 bytes",
        "1.2 kB",
        "42.2 MB",
        "112 GB",
        "1,000 kB",
        "1,200 TB",
    ]
