"""Ranks of the real training program that hang are found by where they stand; those that are slow are left alone."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir import restarts
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from tests import random_kills
from tests.workspace import Workspace, ends, steps

from .test_local_recovery import assert_same_run, with_kills
from .test_local_training import submit

pytestmark = [pytest.mark.slow, pytest.mark.long]

HANG = 10
"""Seconds that a section may last here, or ten steps."""
STOPS = 30
BETWEEN = 25
"""Steps between two stops: limits begin with 20 measured ones."""


def settings(total: int, *, hooks: list[dict[str, Any]], **chain: object) -> dict[str, Any]:
    return with_kills() | {
        "training": {"steps": total, "eval_interval": 200, "hooks": hooks},
        "checkpoint": {"interval": 50, "memory_interval": 1},
        "chain": {"recovery": "node"} | chain,
    }


def newest(run: Run) -> int:
    return max((line["iteration"] for line in read_json_lines(run.attempt(1).metrics)), default=0)


def test_a_stopped_rank_is_named_and_a_round_begins(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    total = (STOPS + 1) * (BETWEEN + 5)
    values = settings(total, hooks=[])
    whole = submit(workspace.config("whole", **values))
    assert whole.returncode == 0, whole.stderr
    slow = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "step-delay=0.05"}}
    values = settings(total, hooks=[slow], hang_timeout=HANG) | {"job": {"time": "60"}}  # minutes, on a busy machine
    config = workspace.config("stopped", **values)
    run = workspace.run("stopped")
    stopped: list[tuple[int, float]] = []
    over = threading.Event()

    def stop() -> None:
        generator = random.Random(1)
        after = 0
        while len(stopped) < STOPS and not over.wait(0.05):
            if len(restarts.read_failed_restarts(run.attempt(1))) < len(stopped) or newest(run) < after + BETWEEN:
                continue
            over.wait(generator.uniform(0, 0.3))
            chosen = generator.choice(random_kills.living_ranks(run))
            after = newest(run)
            stopped.append((chosen.rank, time.time()))
            os.kill(chosen.pid, signal.SIGSTOP)

    stopper = threading.Thread(target=stop)
    stopper.start()
    done = submit(config)
    over.set()
    stopper.join(300)
    assert [end.cause for end in ends(run)] == ["done"], done.stderr
    found = restarts.read_failed_restarts(run.attempt(1))
    assert [failed.rank for failed in found] == [rank for rank, _ in stopped], [failed.told for failed in found]
    assert len(found) == STOPS
    longest = max(line["step_seconds"] for line in read_json_lines(run.metrics_view) if "step_seconds" in line)
    for failed, (rank, moment) in zip(found, stopped, strict=True):
        assert failed.words.startswith("hang: no progress for ")
        assert f"rank {rank} in " in failed.words
        assert "stopped" in failed.words
        assert failed.again
        assert failed.time - moment <= max(HANG, 10 * longest) + 60
        assert failed.steps_lost <= 1
    assert_same_run(run, workspace.run("whole"), last=total)


def test_slow_saves_and_reads_are_no_hang(tmp_path: Path) -> None:
    """24 of them, of 5 to 60 seconds, where ten steps take less than one."""
    workspace = Workspace.make(tmp_path)
    total = 420
    lengths = [5 + 55 * number / 11 for number in range(12)]
    reads = {f"{30 + 30 * number}:{number % 2}": length for number, length in enumerate(lengths)}
    saves = {str(45 + 30 * number): length for number, length in enumerate(lengths)}
    hook = {"hook": "tests.training.stalls:Stalls", "options": {"reads": reads, "saves": saves}}
    values = settings(total, hooks=[hook]) | {
        "checkpoint": {"interval": 15, "memory_interval": 1},
        "job": {"time": "60"},
    }
    done = submit(workspace.config("slow", **values))
    run = workspace.run("slow")
    assert [end.cause for end in ends(run)] == ["done"], done.stderr
    assert restarts.read_failed_restarts(run.attempt(1)) == []
    assert sorted(steps(run)) == list(range(1, total + 1))
    stood = [line["data_seconds"] for line in read_json_lines(run.metrics_view) if line.get("data_seconds", 0) > 4]
    assert len(stood) >= 6, "of rank 0"


def test_a_rank_that_reads_for_ever_is_a_hang_of_its_section(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    reads = {"30:1": 10_000.0}
    hook = {"hook": "tests.training.stalls:Stalls", "options": {"reads": reads, "saves": {}, "scale": 20}}
    values = settings(40, hooks=[hook], hang_timeout=60, auto_requeue=False) | {"job": {"time": "20"}}
    done = submit(workspace.config("late", **values))
    run = workspace.run("late")
    found = restarts.read_failed_restarts(run.attempt(1))
    assert [(failed.rank, failed.again) for failed in found] == [(1, True), (1, False)], done.stderr
    assert [end.cause for end in ends(run)] == ["hang"]
    assert (
        "in data after iteration 29; all ranks answered, others wait for rank 1 in stalled (stalls.py:"
        in found[0].words
    )
    assert "; by stacks/collectives-RANK.json ranks 0 wait in " in found[0].words
