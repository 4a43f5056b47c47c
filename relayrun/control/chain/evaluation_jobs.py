"""Evaluation jobs: one job for each due checkpoint, beside the chain and never in its way.

The process that makes the checkpoint's folder submits; if it is killed before it records the job, the next one looks
for the job by name. If two jobs exist all the same, the second finds the first at work, or its result, and ends.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from relayrun.control.job_log import log_line, logged
from relayrun.control.rundir import evaluations
from relayrun.control.rundir.evaluations import (
    EvaluationClaim,
    EvaluationDir,
    EvaluationPolicy,
    EvaluationResult,
    SubmittedEvaluation,
    UnqueuedEvaluation,
)
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Scheduler
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import RelayrunError, SchedulerError
from relayrun.leftovers import folder_lock

LOCK_PATIENCE = 5.0
"""Seconds of waiting for another process that submits evaluations of the same run."""


def submit_due_evaluations(run: Run, plan: Plan, scheduler: Scheduler) -> None:
    """Submit due evaluations, and record those whose jobs ended without a result. Errors are logged."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no evaluations, no locks, or a full disk, which the next write reports
            stack.enter_context(folder_lock(run.evaluations, patience=LOCK_PATIENCE))
        _attend_all(run, plan, scheduler)  # even if another process hangs: this may be the last look


def submit_left_evaluations(run: Run) -> None:
    """Submit the due evaluations without a job of a chain that has ended: no job of its own looks again. Raises
    RelayrunError and OSError."""
    if run.evaluation_policy.exists() and evaluations.unqueued_iterations(run):
        plan = Plan.load_trusted(run)
        submit_due_evaluations(run, plan, scheduler_for_plan(plan, run, patience=0))


def _attend_all(run: Run, plan: Plan, scheduler: Scheduler) -> None:
    with logged("evaluations are left for later", RelayrunError, OSError):
        for attempt, commit in evaluations.due_checkpoints(run):
            folder = evaluations.evaluation_dir(run, commit.iteration, attempt)
            if not folder.result.exists():
                _attend(run, plan, scheduler, folder)


def _attend(run: Run, plan: Plan, scheduler: Scheduler, folder: EvaluationDir) -> None:
    known = SubmittedEvaluation.read(folder.submitted)
    if known is None:
        policy = EvaluationPolicy.read(run.evaluation_policy)
        if policy is not None:
            _submit(plan, scheduler, folder, run.evaluation_script, time_limit=policy.time_limit)
        return
    job = scheduler.query(known.job_id)
    if (job is not None and job.live) or folder.result.exists():
        return
    claim = EvaluationClaim.read(folder.claim)
    began = claim is not None and claim.job_id == known.job_id
    how = "is not known to the scheduler any more" if job is None else f"ended ({job.state.lower()})"
    error = f"job {known.job_id} {how} {'without a result' if began else 'before it began'}"
    result = EvaluationResult(
        iteration=folder.iteration,
        attempt=folder.attempt,
        status="failed",
        time=time.time(),
        job_id=known.job_id,
        error=error,
    )
    evaluations.record_result(run, result)
    log_line(f"evaluation of iteration {folder.iteration} failed: {error}")


def _submit(plan: Plan, scheduler: Scheduler, folder: EvaluationDir, script: Path, *, time_limit: int) -> None:
    name = f"{plan.job_name}-{folder.path.name}"  # another name than the chain's
    try:
        folder.path.mkdir()
        queued = None
    except FileExistsError:  # an earlier supervisor was killed, or could not reach the scheduler
        queued = scheduler.find_job(name)
    arguments = [f"--iteration={folder.iteration}", f"--attempt={folder.attempt}"]
    try:
        job_id = queued or scheduler.submit_auxiliary(plan, script, name=name, arguments=arguments, limit=time_limit)
    except SchedulerError as error:  # for `status`: nobody reads the log alone
        UnqueuedEvaluation(error=error.message, time=time.time()).write(folder.not_queued)
        raise
    SubmittedEvaluation(job_id=job_id, time=time.time()).write(folder.submitted)
    folder.not_queued.unlink(missing_ok=True)
    log_line(f"job {job_id} evaluates iteration {folder.iteration}")
