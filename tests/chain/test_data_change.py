"""A real chain whose mixture, batch size and number of ranks change in mid-run: every sample is read once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from relayrun.config.sections.training import GlobalBatchSizes
from relayrun.control.rundir.records import AttemptStart
from relayrun.files import read_json, read_json_lines
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.tokens.order.schedule import Schedule
from tests.waiting import wait_for
from tests.workspace import Workspace, ends

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "launchers/submit.py", str(config), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def data_command(*arguments: str) -> str:
    command = [sys.executable, "-m", "relayrun.cli", "data", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, check=True, timeout=600
    ).stdout


@pytest.mark.long
def test_every_sample_is_read_once_over_changes_of_mixture_ramp_batch_and_ranks(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    log = tmp_path / "log"
    log.mkdir()
    run = workspace.run("run")

    def config(weights: dict[str, float], *, ranks: int, micro: int, batch: int, ramp: list[Any] | None = None) -> Path:
        mixture: dict[str, Any] = {
            name: {
                "path": f"{tmp_path}/data/shard{'abc'.index(name)}",
                "weight": weight,
                "order": "tests.chain.logged_order:Logged",
                "options": {"log": str(log)},
            }
            for name, weight in weights.items()
        }
        return workspace.config(
            "run",
            data={"tokenizer": f"{tmp_path}/tokenizer.json", "datasets": [], "mixture": mixture},
            training={"steps": 90, "micro_batch_size": micro, "global_batch_size": batch, "rampup_batch_size": ramp},
            job={"ntasks_per_node": ranks},
            cluster={"name": "local", "scheduler": "local", "environment": {"PYTHONPATH": str(ROOT)}},
        )

    def train_until(attempt: int, iteration: int, process: subprocess.Popen[str]) -> None:
        """Ask the chain to end once the attempt has come so far; the last one runs to its end."""

        def there() -> bool:
            return any(line["iteration"] >= iteration for line in read_json_lines(run.attempt(attempt).metrics))

        wait_for(lambda: process.poll() is not None or there(), 600, step=0.05)
        if process.poll() is None:
            (run.triggers / "exit").touch()
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, output + errors

    train_until(1, 15, start(config({"a": 3, "b": 1}, ranks=2, micro=2, batch=12, ramp=[4, 4, 60])))
    train_until(2, 45, start(config({"a": 1, "c": 2}, ranks=1, micro=3, batch=6), "--resume"))
    consumed = list(read_json_lines(run.attempt(2).commits))[-1]["consumed_samples"]
    ramp = [[2, consumed + 20], [8, consumed + 100]]
    train_until(3, 1000, start(config({"b": 1, "c": 1, "a": 0.5}, ranks=2, micro=1, batch=10, ramp=ramp), "--resume"))
    assert [end.cause for end in ends(run)] == ["exit", "exit", "done"]

    read = Counter[tuple[int, str, int]]()
    for file in log.iterdir():
        for line in file.read_text().splitlines():
            attempt, position = line.split()
            read[int(attempt), file.name.partition("-")[0], int(position)] += 1
    commits = [list(read_json_lines(run.attempt(number).commits))[-1]["consumed_samples"] for number in (1, 2, 3)]
    trained: set[tuple[str, int]] = set()
    for attempt, (first, end) in enumerate(zip([0, *commits], commits, strict=False), start=1):
        state = read_json(run.attempt(attempt).data)
        assert state["consumed_samples"] == first
        schedule = Schedule.from_json(state["phases"])
        assert [phase.start for phase in schedule.phases] == [0, *commits][:attempt]
        for k in range(first, end):
            place = schedule.locate(k)
            assert read[attempt, *place] == 1
            assert place not in trained
            trained.add(place)
    counts = schedule.counts(commits[-1])
    assert trained == {(name, position) for name, count in counts.items() for position in range(count)}
    assert len(trained) == commits[-1]
    lines = [line for line in read_json_lines(run.metrics_view) if "loss" in line]
    assert len(lines) == 90
    progress = TrainingProgress.resume(state["progress"], GlobalBatchSizes(10, ramp))
    for line in lines:
        samples = range(line["consumed_samples"] - line["global_batch_size"], line["consumed_samples"])
        assert {progress.iteration_of(k) for k in samples} == {line["iteration"]}
    assert {line["global_batch_size"] for line in lines} == {2, 4, 6, 8, 10, 12}

    ledger = data_command("ledger", str(run.path))
    assert f"{commits[-1]:,} samples in 90 steps" in ledger
    for name, count in counts.items():
        assert any(
            row.split("│")[1].strip() == name and row.split("│")[3].strip() == f"{count:,}"
            for row in ledger.splitlines()
            if row.count("│") > 5
        )
    shown = data_command("show", str(run.path), "--samples", f"{commits[0] - 1}:{commits[0] + 1}")
    assert shown.count("sample ") == 2
    assert [AttemptStart.read(run.attempt(number).begin).config_revision for number in (1, 2, 3)] == [1, 2, 3]  # type: ignore[union-attr]
