"""Ways out of a chain of real jobs on this machine: job script, supervisor, signals, around a program that counts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relayrun.config.compose import resolve
from relayrun.control.chain import job_script
from relayrun.control.rundir import triggers
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import MAX_FAILED_BEGINS
from relayrun.control.scheduler.local import REQUEUE_EXIT_CODE, LocalScheduler
from relayrun.submit.run_plan import make_plan
from tests.plans import plan_with

from .masks import ROOT

PROGRAM = ROOT / "tests" / "chain" / "relay_program.py"

Poll = Callable[[Run], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A chain of jobs: arguments of the program, changes of the plan, and what happens beside them."""

    arguments: tuple[str, ...] = ("--steps=4", "--step-seconds=0.05")
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)
    beside: Poll | None = None
    script: str | None = None
    """Instead of the job script."""
    failed_begins: int = 0


def _touch_exit(run: Run) -> None:
    if run.attempt(1).metrics.exists() and not (run.triggers / "exit.done").exists():
        triggers.touch_trigger(run, "exit")


def _cancel(run: Run) -> None:
    if run.attempt(1).metrics.exists():
        LocalScheduler(run).cancel("1")


def _kill_batch_script(run: Run) -> None:
    mark = run.path / "killed"
    if run.attempt(1).metrics.exists() and not mark.exists():
        mark.touch()
        os.kill(_job(run, "1")["pid"], signal.SIGKILL)


def _skip_delay(run: Run) -> None:
    for path in (run.path / "local").glob("job-*.json"):
        job = json.loads(path.read_text(encoding="utf-8"))
        if job["state"] == "PENDING" and job["eligible_time"]:
            path.write_text(json.dumps(job | {"eligible_time": 0}), encoding="utf-8")


def _job(run: Run, job_id: str) -> dict[str, Any]:
    path = run.path / "local" / f"job-{int(job_id):04}.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


LONG = ("--steps=10000", "--step-seconds=0.05")

CASES = {
    "done": Case(),
    "several_jobs": Case(
        arguments=("--steps=40", "--step-seconds=0.35"), plan={"total_steps": 40, "time_limit": 20, "grace_period": 8.0}
    ),
    "crash_loop": Case(arguments=("--crash-at=0",), plan={"max_failed_attempts": 2}, beside=_skip_delay),
    "fatal": Case(arguments=("--fatal-at=2",)),
    "exit_trigger": Case(arguments=LONG, plan={"total_steps": 10000}, beside=_touch_exit),
    "cancelled": Case(arguments=LONG, plan={"total_steps": 10000}, beside=_cancel),
    "killed_batch_script": Case(
        arguments=("--steps=40", "--step-seconds=0.05"), plan={"total_steps": 40}, beside=_kill_batch_script
    ),
    "rank_killed": Case(arguments=("--killed=1",), plan={"max_failed_attempts": 1}),
    "hang": Case(
        arguments=("--steps=20", "--stop-rank=1", "--stop-at=2"), plan={"hang_timeout": 8, "max_failed_attempts": 1}
    ),
    "setup_fails": Case(plan={"setup": ["true", "false"]}),
    "module_is_missing": Case(plan={"modules": ["none"], "max_failed_attempts": 1}),
    "program_is_missing": Case(plan={"program": ["/nowhere/python"], "max_failed_attempts": 1}),
    "supervisor_fails": Case(script=f"exit {REQUEUE_EXIT_CODE}\n", failed_begins=MAX_FAILED_BEGINS - 1),
}
"""Ways out, by their names in the record."""


def play(name: str, config: Path, folder: Path) -> Run:
    """Run the chain of a case to its end; `said.txt` gets the events of the queue. Returns the run."""
    case = CASES[name]
    run = Run(folder / "run")
    run.path.mkdir()
    triggers.create_trigger_folder(run)
    plan = _plan(case, config, run, folder / "logs")
    plan.write(run.plan)
    text = job_script.job_script(plan, run) if case.script is None else f"#!/usr/bin/env bash\n{case.script}"
    run.job_script.write_text(text, encoding="utf-8")
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    if case.failed_begins:
        first = run.path / "local" / "job-0001.json"
        first.write_text(json.dumps(_job(run, "1") | {"failed_begins": case.failed_begins}), encoding="utf-8")
    events: list[str] = []
    beside = case.beside
    scheduler.run_queue(events.append, (lambda: beside(run)) if beside else lambda: None)
    (run.path / "said.txt").write_text("\n".join(_without_counts(events)) + "\n", encoding="utf-8")
    return run


def _plan(case: Case, config: Path, run: Run, logs: Path) -> Plan:
    program = [sys.executable, str(PROGRAM), f"--run-dir={run.path}", *case.arguments]
    own = {"program": program, "log_folder": str(logs), "total_steps": 4, "max_failed_attempts": 3}
    quick = {"grace_period": 1.0, "min_grace_period": 1.0, "max_grace_period": 1.0, "signal_seconds": 1}
    changes = case.plan
    if "grace_period" in changes:
        changes = {**changes, "min_grace_period": changes["grace_period"], "max_grace_period": changes["grace_period"]}
    made = make_plan(resolve.load_run_config(config, [f"run_dir={run.path}"]), run, ROOT, revision=1)
    return plan_with(made, **{**own, **quick, **changes})


def _without_counts(events: list[str]) -> list[str]:
    """The events, each once, without the numbers of jobs: how many jobs a chain needs depends on the machine."""
    return list(dict.fromkeys(re.sub(r"\bjob \d+", "job N", event) for event in events))
