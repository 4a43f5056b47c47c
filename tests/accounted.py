"""A run whose node time is known to the second, by hand: two jobs of two nodes, the first of which failed."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from relayrun import places
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import (
    AttemptEnd,
    AttemptOutcome,
    AttemptStart,
    CheckpointCommit,
    RankFailure,
    StartTimes,
)
from relayrun.control.rundir.run import Run
from relayrun.files import append_line
from tests.history import make_history

T = time.mktime(time.strptime("2026-11-20T08:00:00", "%Y-%m-%dT%H:%M:%S"))
"""When the first job was queued, in seconds since 1970."""

SACCT = "\n".join(
    [
        "41|FAILED|2|2026-11-20T08:00:00|2026-11-20T08:00:00|2026-11-20T08:01:00|2026-11-20T08:02:51",
        "42|COMPLETED|2|2026-11-20T08:01:05|2026-11-20T08:02:51|2026-11-20T08:04:05|2026-11-20T08:05:45",
    ]
)
"""What Slurm's accounting says of its two jobs."""

PARTS = {
    "step": 10 * 5.0,
    "data": 5.0,
    "save": 3.0 + 2.0,
    "evaluation": 6.0,
    "between": 0.5 + 7 * 0.5 + 1.0 + 5 * 1.0 + 1.0,
    "prolog": 3.0 + 4.0,
    "supervisor": 2.0 + 1.0,
    "launch": 10.0 + 10.0,
    "import": 20.0 + 20.0,
    "init": 10.0 + 10.0,
    "load": 2.0 + 5.0,
    "compile": 2.0 + 3.0,
    "redone": 3 * 5.5 + 2.5,
    "recovery": 4.0,
    "end": 4.5 + 4.5,
}
"""Seconds of each node."""


def make_project(folder: Path) -> Run:
    """Make a project of this folder, with the run as my-project/my-run."""
    (folder / places.PROJECT_MARKER).touch()
    return make_accounted(folder / "logs/runs/my-project/my-run")


def make_accounted(folder: Path, *, scheduler: str = "slurm", name: str = "my-project/my-run") -> Run:
    """Make the run; it lacks what only training needs."""
    run = make_history(folder, lines=1, attempts=1)
    plan = Plan.load(run)
    for path in (run.path / "local").glob("job-*.json"):
        path.unlink()
    for path in (*run.attempt(1).path.iterdir(), run.metrics_view, run.attempts_view):
        if path.is_file():
            path.unlink()
    replace(plan, run=name, scheduler=scheduler, nodes=2, total_steps=10).write(run.plan)  # type: ignore[arg-type]
    _first(run)
    _second(run)
    return Run(run.path)


def _first(run: Run) -> None:
    """Eight steps from the beginning, a checkpoint of the fifth, and a failure in the ninth."""
    _begin(run, 1, job="41", base=0, submit=0, eligible=0, start=60, script=63, begin=65)
    _started(run, 1, process=75, imported=95, initialised=105, loaded=107)
    at = 107.0
    for step in range(1, 9):
        took, save = (7.5 if step == 1 else 5.5), (3.0 if step == 6 else 0.0)
        at += took + save + 0.5
        _step(run, 1, step, at, took=took, data=0.5, save=save)
    _commit(run, 1, 5, at=T + 150.0, seconds=3.0)
    failed = at + 2.5
    folder = run.attempt(1).failures
    folder.mkdir(exist_ok=True)
    RankFailure(rank=1, node="n1", error="RuntimeError: gone", time=T + failed).write(folder / "rank-0001.json")
    RankFailure(rank=0, node="n0", error="RuntimeError: closed", time=T + failed + 1).write(folder / "rank-0000.json")
    append_line(run.node_failures, {"node": "n1", "attempt": 1, "reason": "RuntimeError: gone", "time": T + failed + 4})
    _end(run, 1, cause="failed", durable=5, at=failed + 4, code=1, action="continue")


def _second(run: Run) -> None:
    """From the checkpoint of the fifth step to the tenth, an evaluation, and the last save."""
    previous = T + 171.0
    weights = {"code": 1 << 31, "prose": 1 << 31}
    data = {
        "phases": [{"start": 0, "weights": weights}],
        "datasets": {"code": {"windows": 20}, "prose": {"windows": 4}},
    }
    times = {"submit": 65, "eligible": 171, "start": 245, "script": 249}
    _begin(run, 2, job="42", base=5, begin=250, previous_job_end=previous, **times)
    run.attempt(2).data.write_text(json.dumps(data))
    _started(run, 2, process=260, imported=280, initialised=290, loaded=295)
    at = 295.0
    for step in range(6, 11):
        took = 8.5 if step == 6 else 5.5
        at += took + 1.0
        _step(run, 2, step, at, took=took, data=0.5)
    at += 7.0
    line = {"iteration": 10, "validation": {"held-out": 2.5}, "evaluation_seconds": 6.0, "time": T + at}
    append_line(run.attempt(2).metrics, line)
    at += 3.0
    _commit(run, 2, 10, at=T + at, seconds=2.0)
    AttemptOutcome(outcome="done", reason="iteration 10 of 10 reached", iteration=10, time=T + at).write(
        run.attempt(2).outcome
    )
    _end(run, 2, cause="done", durable=10, at=at + 3.0, code=0, action="stop")


def _begin(run: Run, number: int, *, job: str, base: int, begin: float, **times: float) -> None:
    attempt = run.attempt(number)
    attempt.path.mkdir(parents=True, exist_ok=True)
    AttemptStart(
        attempt=number,
        job_id=job,
        job_name="j",
        nodes="n[0-1]",
        config_revision=1,
        base_iteration=base,
        base_path=str(run.checkpoint(base)) if base else None,
        start_time=T + begin,
        job_end_time=T + begin + 3600,
        job_submit_time=T + times["submit"],
        job_eligible_time=T + times["eligible"],
        job_start_time=T + times["start"],
        script_time=T + times["script"],
        previous_job_end=times.get("previous_job_end"),
        grace_period=60.0,
    ).write(attempt.begin)


def _started(run: Run, number: int, **times: float) -> None:
    StartTimes(**{name: T + at for name, at in times.items()}).write(run.attempt(number).started)


def _step(run: Run, number: int, step: int, at: float, *, took: float, data: float, save: float = 0.0) -> None:
    line: dict[str, Any] = {"iteration": step, "loss": 10.0 - 0.5 * step, "grad_norm": 1.0, "lr": 1e-4 * step}
    line |= {"tokens_per_second": 1000.0 / took, "step_seconds": took, "data_seconds": data, "save_seconds": save}
    line |= {"model_tflops_per_gpu": 400.0, "mfu": 0.4, "memory_bytes": 10**9 + step, "time": T + at, "skipped": None}
    append_line(run.attempt(number).metrics, line)


def _commit(run: Run, number: int, iteration: int, *, at: float, seconds: float) -> None:
    folder = run.checkpoint(iteration)
    folder.mkdir(parents=True, exist_ok=True)
    commit = CheckpointCommit(
        iteration=iteration, path=str(folder), consumed_samples=iteration, time=at, seconds=seconds
    )
    run.attempt(number).append_commit(commit)


def _end(run: Run, number: int, *, cause: str, durable: int, at: float, code: int, action: str) -> None:
    AttemptEnd(
        attempt=number,
        cause=cause,
        reason="made by hand",
        exit_code=code,
        durable_iteration=durable,
        progress=True,
        end_time=T + at,
        action=action,
        chain_end="done" if action == "stop" else None,
    ).write(run.attempt(number).end)
