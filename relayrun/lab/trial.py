"""A trial of a run's program: a short run that is killed and asked to leave on purpose, and what the chain sees of it.

The trial is a run of its own, `NAME-trial`. Its first attempt is killed behind a checkpoint; the second one goes on,
and is asked to save and leave. The report comes from the records of both attempts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import CommandConfig
from relayrun.control.rundir import triggers
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, is_stopped, stop_reason
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import ConfigError, InputError
from relayrun.files import read_json_lines
from relayrun.lab.small_run import start_submit


class TrialFinding(NamedTuple):
    """One promise of the chain for this program. `good`: the trial showed it."""

    good: bool
    words: str


def _prepare(path: Path, overrides: Sequence[str], *, minutes: int) -> tuple[Run, list[str]]:
    """Return the run of a trial and its overrides. Raises RelayrunError."""
    name = resolve.load_run_config(path, overrides).name
    changes = [*overrides, f"name={name}-trial", "run_dir=null", f"job.time={minutes}", "chain.auto_requeue=true"]
    config = resolve.load_run_config(path, changes)
    folder = config.command.checkpoint.folder if isinstance(config, CommandConfig) else None
    if folder is not None and f"command.checkpoint.folder={folder}" not in overrides:
        hint = "--set command.checkpoint.folder=... names another one for the trial"
        raise ConfigError(f"the program would write over {folder}", where="command.checkpoint.folder", hint=hint)
    if (where := Path(config.run_dir or "")).exists():
        raise InputError("there is a trial already", where=where, hint="remove it, or --set name=another")
    return Run(where), changes


def run_trial(path: Path, overrides: Sequence[str], *, minutes: int) -> list[TrialFinding]:
    """Submit the trial of a run config, disturb it, and return what it showed. `minutes`: limit of a job, and of the
    wait for each of its parts. Raises RelayrunError."""
    run, changes = _prepare(path, overrides, minutes=minutes)
    submitted = start_submit(path, changes, cwd=None)

    def wait(condition: Callable[[], object]) -> None:
        until = time.monotonic() + 60 * minutes
        while not condition() and not (run.plan.exists() and is_stopped(run)) and time.monotonic() < until:
            if submitted.poll():  # what it refuses it has said
                raise InputError("the trial was not submitted", where=path)
            time.sleep(0.5)

    first, second = run.attempt(1), run.attempt(2)
    wait(lambda: (saved := first.read_commits()) and _iterations(first)[-1:] > [saved[-1].iteration])
    if first.begin.exists() and not is_stopped(run):
        scheduler = scheduler_for_plan(Plan.load_trusted(run), run)
        scheduler.signal_ranks(first.started_record().job_id, signal.SIGKILL)
        wait(lambda: _iterations(second))
    if run.triggers.is_dir():
        triggers.touch_trigger(run, "exit")
    wait(lambda: False)
    with contextlib.suppress(subprocess.TimeoutExpired):
        submitted.wait(60)
    return [_progress(first), _checkpoints(run, first), _resume(second), _leave(run, second)]


def _progress(attempt: Attempt) -> TrialFinding:
    found = _iterations(attempt)
    said = f"iterations {found[0]} to {found[-1]} were reported" if found else "no iteration was reported"
    unmatched = attempt.unmatched.read_text(encoding="utf-8").splitlines() if attempt.unmatched.exists() else []
    return TrialFinding(bool(found), "; nothing fits ".join([said, *unmatched]))


def _checkpoints(run: Run, attempt: Attempt) -> TrialFinding:
    names = [os.path.relpath(each.path, run.checkpoints) for each in attempt.read_commits()]
    return TrialFinding(bool(names), f"checkpoints: {', '.join(names)}" if names else "no checkpoint was found")


def _resume(attempt: Attempt) -> TrialFinding:
    begin, end, found = attempt.read_begin(), attempt.read_end(), _iterations(attempt)
    if begin is None or begin.base_path is None:
        return TrialFinding(False, "no second attempt began with a checkpoint: nothing is known of a resume")
    good = bool(found) and begin.base_iteration <= found[0] and (end is None or end.cause != "fatal")
    first = f"its first iteration was {found[0]}" if found else "it reported no iteration"
    return TrialFinding(good, f"killed by SIGKILL it was to go on from iteration {begin.base_iteration}: {first}")


def _leave(run: Run, attempt: Attempt) -> TrialFinding:
    end = attempt.read_end()
    if end is None or end.cause != "exit":
        return TrialFinding(False, f"asked to save and leave it did not: {end.reason if end else stop_reason(run)}")
    return TrialFinding(True, f"asked to save and leave it did, with iteration {end.durable_iteration}")


def _iterations(attempt: Attempt) -> list[int]:
    return [int(line["iteration"]) for line in read_json_lines(attempt.metrics) if "restart" not in line]
