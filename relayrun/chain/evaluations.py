"""The supervisor's part of evaluations: one job for each checkpoint that is due, beside the chain and never in its way.

Exactly one over any number of attempts: who makes the checkpoint's folder submits; where a supervisor was killed
before it could record the job, the next one looks for it by its name and submits only if there is none; and of two
jobs, should it come to that, the second finds the first one's claim and ends.
"""

from __future__ import annotations

import time
from pathlib import Path

from relayrun.chain.log import log
from relayrun.errors import RelayrunError
from relayrun.rundir import evaluations
from relayrun.rundir.evaluations import EvaluationDir, Policy, Result, Submitted
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.scheduler.base import Scheduler


def attend(run: Run, plan: Plan, scheduler: Scheduler) -> None:
    """Submit what is due, and record evaluations whose jobs went without a word. What fails is left for later."""
    try:
        waiting = evaluations.unsettled(run)
        for attempt, commit in waiting:
            folder = evaluations.directory(run, commit.iteration, attempt)
            if not folder.result.exists():
                _attend(run, plan, scheduler, folder)
        evaluations.settle(run, waiting)
    except (RelayrunError, OSError) as error:
        log(f"evaluations are left for later: {getattr(error, 'message', error)}")


def _attend(run: Run, plan: Plan, scheduler: Scheduler, folder: EvaluationDir) -> None:
    known = Submitted.read(folder.submitted)
    if known is None:
        policy = Policy.read(run.evaluation_policy)
        if policy is not None:
            _submit(plan, scheduler, folder, run.evaluation_script, time_limit=policy.time_limit)
        return
    job = scheduler.query(known.job_id)
    if (job is not None and job.live) or folder.result.exists():
        return
    began = folder.claim.exists()
    how = "is not known to the scheduler any more" if job is None else f"ended ({job.state.lower()})"
    error = f"job {known.job_id} {how} {'without a result' if began else 'before it began'}"
    evaluations.finish(
        run,
        Result(
            iteration=folder.iteration,
            attempt=folder.attempt,
            status="failed",
            time=time.time(),
            job_id=known.job_id,
            error=error,
        ),
    )
    log(f"evaluation of iteration {folder.iteration} failed: {error}")


def _submit(plan: Plan, scheduler: Scheduler, folder: EvaluationDir, script: Path, *, time_limit: int) -> None:
    name = job_name(plan, folder)
    try:
        folder.path.mkdir()
        queued = None
    except FileExistsError:  # a supervisor was killed, or could not reach the scheduler
        queued = scheduler.named(name)
    job_id = queued or scheduler.submit_auxiliary(
        plan,
        script,
        name=name,
        arguments=[f"--iteration={folder.iteration}", f"--attempt={folder.attempt}"],
        limit=time_limit,
    )
    Submitted(job_id=job_id, time=time.time()).write(folder.submitted)
    log(f"job {job_id} evaluates iteration {folder.iteration}")


def job_name(plan: Plan, folder: EvaluationDir) -> str:
    """Slurm's name for the one evaluation job of a checkpoint; it differs from the name of the chain's jobs."""
    return f"{plan.job_name}-{folder.path.name}"
