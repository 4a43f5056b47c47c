"""A run of five days as a chain leaves it: three attempts, a lost node, a rank that was started again."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relayrun import places
from relayrun.config.compose import resolve
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import (
    AttemptEnd,
    AttemptOutcome,
    AttemptStart,
    CheckpointCommit,
    RankFailure,
    StartTimes,
)
from relayrun.control.rundir.restarts import FailedRestart
from relayrun.control.rundir.run import Run
from relayrun.files import append_line
from tests.history import ROOT, make_history

T = time.mktime(time.strptime("2026-11-02T18:00:00", "%Y-%m-%dT%H:%M:%S"))
"""When the first job was queued, in seconds since 1970."""

STEPS = 6000
STEP_SECONDS = 60.0
SAVED_EVERY = 250
TOKENS = 1 << 22
"""How many one step trains on."""


@dataclass
class _Clock:
    """What the run has seen: seconds since `T`, and its chance."""

    at: float
    chance: random.Random


def make_pictured(folder: Path, *, name: str = "ada/llama3-8b", above: float = 2.1, seed: int = 1) -> Run:
    """Make the run as the project's `name`; its loss falls towards `above`, in nats per token."""
    (folder / places.PROJECT_MARKER).touch()
    run = make_history(folder / "logs/runs" / name, lines=1, attempts=1)
    plan = Plan.load(run)
    for path in [*(run.path / "local").glob("job-*.json"), run.metrics_view, run.attempts_view]:
        path.unlink()
    for path in run.attempt(1).path.iterdir():
        if path.is_file():
            path.unlink()
    replace(plan, run=name, scheduler="slurm", nodes=16, total_steps=STEPS).write(run.plan)
    _configs(run)
    clock = _Clock(at=0.0, chance=random.Random(seed))
    _attempt(run, 1, clock, nodes="nid[001012-001027]", queued=5400, first=1, last=2870, above=above)
    _leaves(run, 1, clock, "saved", "time limit near", 2870)
    _attempt(run, 2, clock, nodes="nid[001012-001027]", queued=900, first=2871, last=3930, above=above)
    _loses_a_node(run, clock, durable=3750)
    _attempt(run, 3, clock, nodes="nid[001012-001018,001020-001028]", queued=2700, first=3751, last=4810, above=above)
    _starts_a_rank_again(run, clock, at=4810, back=4750)
    _steps(run, 3, clock, first=4751, last=STEPS, above=above)
    _leaves(run, 3, clock, "done", f"iteration {STEPS} of {STEPS} reached", STEPS)
    return Run(run.path)


def _configs(run: Run) -> None:
    run.config.mkdir(exist_ok=True)
    for revision, values in ((1, ["checkpoint.interval=500"]), (2, [f"checkpoint.interval={SAVED_EVERY}"])):
        settings = ["project=ada", "name=llama3-8b", f"training.steps={STEPS}", *values]
        text = resolve.dump_run_config(resolve.load_run_config(ROOT / "configs/runs/llama3-1b.yaml", settings))
        run.config_revision(revision).write_text(text.replace(str(ROOT), "/users/ada/relayrun"))


def _attempt(
    run: Run, number: int, clock: _Clock, *, nodes: str, queued: float, first: int, last: int, above: float
) -> None:
    """A job that waited, started, and trained so many steps."""
    submit = T + clock.at
    clock.at += queued
    base = first - 1
    attempt = run.attempt(number)
    attempt.path.mkdir(parents=True, exist_ok=True)
    AttemptStart(
        attempt=number,
        job_id=str(880_412 + number),
        job_name="j",
        nodes=nodes,
        config_revision=min(number, 2),
        base_iteration=base,
        base_path=str(run.checkpoint(base)) if base else None,
        start_time=T + clock.at + 95,
        job_end_time=T + clock.at + 48 * 3600,
        job_submit_time=submit,
        job_eligible_time=submit,
        job_start_time=T + clock.at,
        script_time=T + clock.at + 90,
        previous_job_end=None if number == 1 else submit,
        grace_period=600.0,
    ).write(attempt.begin)
    at = T + clock.at
    StartTimes(process=at + 110, imported=at + 170, initialised=at + 260, loaded=at + 330).write(attempt.started)
    clock.at += 330
    sets = {"web": {"windows": 9_000_000}, "code": {"windows": 2_000_000}, "books": {"windows": 260_000}}
    weights = {"web": 3 << 30, "code": 3 << 28, "books": 1 << 28}
    attempt.data.write_text(json.dumps({"phases": [{"start": 0, "weights": weights}], "datasets": sets}))
    _steps(run, number, clock, first=first, last=last, above=above)


def _steps(run: Run, number: int, clock: _Clock, *, first: int, last: int, above: float) -> None:
    chance, attempt = clock.chance, run.attempt(number)
    lines = []
    for step in range(first, last + 1):
        took = STEP_SECONDS * chance.gauss(1.0, 0.006) + (45.0 if step == first else 0.0)
        took += 20.0 * (chance.random() < 0.004)
        save = 4.0 if step % SAVED_EVERY == 1 and step > first else 0.0
        clock.at += took + save + 0.4
        loss = above + 8.8 * (1 + step / 12) ** -0.62 + chance.gauss(0, 0.018)
        norm = 0.35 + 6 / (1 + step / 15) + abs(chance.gauss(0, 0.05)) + 2.2 * (chance.random() < 0.003)
        rate = 3e-4 * min(1.0, step / 200) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
        line: dict[str, Any] = {"iteration": step, "loss": loss, "grad_norm": norm, "lr": rate}
        line |= {"consumed_samples": 512 * step, "tokens_per_second": TOKENS / took, "step_seconds": took}
        line |= {"data_seconds": 0.02, "save_seconds": save, "model_tflops_per_gpu": 26_000 / took, "mfu": 26.3 / took}
        line |= {"memory_bytes": 78_300_000_000 + 9_000_000 * (step % 7), "time": T + clock.at, "skipped": None}
        lines.append(json.dumps(line))
        if step % 500 == 0:
            clock.at += 95
            held = {"held-out web": loss + 0.05, "held-out code": loss - 0.62}
            lines.append(
                json.dumps({"iteration": step, "validation": held, "evaluation_seconds": 94.0, "time": T + clock.at})
            )
        if step % SAVED_EVERY == 0:
            _commit(run, number, step, T + clock.at + 40)
    with open(attempt.metrics, "a") as file:
        file.write("\n".join(lines) + "\n")


def _commit(run: Run, number: int, step: int, at: float) -> None:
    folder = run.checkpoint(step)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"common.pt": 21_400, **{f"__{rank}_0.distcp": 1_505_000_000 for rank in range(64)}}
    commit = CheckpointCommit(
        iteration=step, path=str(folder), consumed_samples=512 * step, time=at, seconds=38.0 + step % 7, files=files
    )
    run.attempt(number).append_commit(commit)


def _leaves(run: Run, number: int, clock: _Clock, cause: Any, reason: str, last: int) -> None:
    clock.at += 45
    if last % SAVED_EVERY:
        _commit(run, number, last, T + clock.at)
    AttemptOutcome(outcome=cause, reason=reason, iteration=last, time=T + clock.at).write(run.attempt(number).outcome)
    clock.at += 8
    _end(run, number, clock, cause, reason, last, action="stop" if cause == "done" else "continue")
    if cause == "done":
        run.stop.write_text(f"state: done\nreason: done: {reason}\n")


def _loses_a_node(run: Run, clock: _Clock, *, durable: int) -> None:
    clock.at += 25
    words = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    folder = run.attempt(2).failures
    folder.mkdir(exist_ok=True)
    RankFailure(rank=29, node="nid001019", error=words, time=T + clock.at).write(folder / "rank-0029.json")
    strike = {"node": "nid001019", "attempt": 2, "reason": words, "time": T + clock.at + 4}
    append_line(run.node_failures, strike)
    clock.at += 31
    _end(run, 2, clock, "failed", f"rank 29 on nid001019: {words}", durable, code=1, action="continue")


def _starts_a_rank_again(run: Run, clock: _Clock, *, at: int, back: int) -> None:
    clock.at += 12
    failed = FailedRestart(
        restart=1,
        time=T + clock.at,
        rank=41,
        node="nid001023",
        words="killed by SIGBUS",
        iteration=at,
        base_iteration=3750,
        durable_iteration=back,
        next_iteration=back,
        again=True,
        steps_lost=at - back,
        seconds={"end": 3.1, "records": 0.2, "fork": 1.0, "groups": 4.8, "load": 9.2, "step": 61.0, "all": 79.3},
    )
    failed.append(run.attempt(3).failed_restarts)
    append_line(run.attempt(3).metrics, {"iteration": back, "restart": 2})
    clock.at += 20


def _end(
    run: Run, number: int, clock: _Clock, cause: str, reason: str, durable: int, *, action: str, code: int = 0
) -> None:
    AttemptEnd(
        attempt=number,
        cause=cause,
        reason=reason,
        exit_code=code,
        durable_iteration=durable,
        progress=True,
        end_time=T + clock.at,
        action=action,
        chain_end="done" if action == "stop" else None,
    ).write(run.attempt(number).end)
    clock.at += 6
