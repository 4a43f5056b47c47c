"""Results of evaluations, told to W&B's real client online and offline: each once, in the order in which they came."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.config.compose import resolve
from relayrun.control.rundir import evaluations
from relayrun.control.rundir.evaluations import EvaluationResult
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import update_tracker_runs
from relayrun.train.reporting import trackers
from tests.train.test_wandb_online import KEY, attempt, sync
from tests.wandb_service import WandBService
from tests.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    workspace = Workspace.make(tmp_path)
    made = workspace.run("run")
    made.config.mkdir(parents=True)
    made.config_revision(1).write_text(resolve.dump_run_config(resolve.load_run_config(workspace.config("run"))))
    made.plan.write_text('{"format": 2}')
    attempt(made, 1, base=0, last=30)
    update_tracker_runs(made)
    return made


def finish(run: Run, iteration: int, *, at: float, value: float, status: str = "done") -> None:
    evaluations.evaluation_dir(run, iteration, 1).path.mkdir(parents=True)
    result = EvaluationResult(iteration=iteration, attempt=1, status=status, time=at, results={"task": {"acc": value}})  # type: ignore[arg-type]
    evaluations.record_result(run, result)


def tell(run: Run, **environment: str) -> None:
    code = (
        "import sys, pathlib; from relayrun.train.export import evaluate; from relayrun.control.rundir.run import Run; "
        "evaluate.report_to_wandb(Run(pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.path)],
        env=os.environ | environment,
        text=True,
        capture_output=True,
        check=True,
        timeout=600,
    )
    assert "warning" not in done.stderr


def test_results_reach_the_service_once_however_late_they_come(run: Run) -> None:
    finish(run, 20, at=200.0, value=0.2)  # the later iteration was evaluated first
    finish(run, 10, at=300.0, value=0.1)
    finish(run, 5, at=350.0, value=0.0, status="failed")
    with WandBService() as service:
        tell(run, WANDB_API_KEY=KEY, WANDB_BASE_URL=service.url)
        finish(run, 30, at=400.0, value=0.3)
        tell(run, WANDB_API_KEY=KEY, WANDB_BASE_URL=service.url)
        sync(run, service)
        name = f"{update_tracker_runs(run)[0].id}-evaluation"
        rows = [(row["_step"], row["iteration"], row["evaluation/task/acc"]) for row in service.history(name)]
        assert rows == [(1, 20, 0.2), (2, 10, 0.1), (3, 30, 0.3)]
        training = service.history(update_tracker_runs(run)[0].id)
        assert len(training) > 20
        assert not [row for row in training if any("evaluation" in key for key in row)]


def test_offline_files_hold_them_once(run: Run) -> None:
    name = f"{update_tracker_runs(run)[0].id}-evaluation"
    for iteration in (10, 20):
        finish(run, iteration, at=float(iteration), value=0.5)
        tell(run, WANDB_MODE="offline")
    files = trackers.offline_wandb_files(run.path / "wandb", name)
    assert [row["iteration"] for path in files for row in trackers.wandb_history(path)] == [10, 20]
