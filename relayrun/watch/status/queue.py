"""The scheduler's answer about the jobs of a run; one query, whose result is passed on as a fact."""

from __future__ import annotations

from dataclasses import dataclass, field

from relayrun.control import chain_state
from relayrun.control.rundir import evaluations
from relayrun.control.rundir.evaluations import SubmittedEvaluation
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Job, JobEnd, Scheduler
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import SchedulerError, user_name

CLOCK_TOLERANCE_SECONDS = 3600.0
"""Largest difference between the clocks of this host and of the scheduler."""
RETRY_SECONDS = 5.0
"""Seconds for which a silent controller is asked again."""


@dataclass(frozen=True, kw_only=True)
class QueueStatus:
    """The scheduler's answer about the jobs of a run."""

    jobs: list[Job] = field(default_factory=list)
    fallback_jobs: list[Job] = field(default_factory=list)
    """Small jobs that continue the chain if one of `jobs` fails; see `relayrun.control.chain.jobs`."""
    error: str | None = None
    """Error of a scheduler that did not answer; None if it did."""
    hidden: str | None = None
    """Reason why the jobs of the run's owner, another user, are not visible."""
    evaluations: dict[str, str] = field(default_factory=dict)
    """State by job id of the evaluation jobs without a result."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Pending reasons by job id."""
    last_job: JobEnd | None = None
    """End of the newest job, if no job runs and the scheduler remembers it."""
    abandoned: list[str] = field(default_factory=list)
    """Ids of queued jobs that no process will start."""


def run_scheduler(run: Run) -> Scheduler:
    """Return the run's scheduler, for the orders of a person. Raises RunDirError if there is no run."""
    return scheduler_for_plan(Plan.load(run), run, patience=RETRY_SECONDS, ordered=True)


def query_queue(run: Run, plan: Plan | None = None, *, brief: bool = False) -> QueueStatus:
    """Query the chain's jobs of any user; a silent scheduler gives a status with `error`.

    `plan`: the run's plan, if already read. `brief`: skip evaluations. Raises RunDirError if there is no run.
    """
    plan = Plan.load(run) if plan is None else plan
    try:
        asked = scheduler_for_plan(plan, run, patience=RETRY_SECONDS)
        history = asked.history
        states = {} if brief else _evaluations(run, asked)
        jobs = asked.jobs(plan, anyone=True)
        waits = any(job.waits for job in jobs)
        hidden = not jobs and plan.owner is not None and chain_state.is_owned_by_another_user(plan)
        if hidden and history.other_jobs_are_hidden():
            name = user_name(plan.owner)
            return QueueStatus(hidden=f"Slurm shows the jobs of {name}, who owns this run, to nobody else")
        idle = all(job.waits or job.state == "COMPLETING" for job in jobs)
        since = run.plan.stat().st_mtime - CLOCK_TOLERANCE_SECONDS
        fallback_jobs = asked.live_fallback_jobs(plan, anyone=True)
        return QueueStatus(
            jobs=jobs,
            fallback_jobs=fallback_jobs,
            evaluations=states,
            reasons=history.pending_reasons(plan) if waits or fallback_jobs else {},
            last_job=history.last_job(plan, since=since) if idle else None,
            abandoned=history.abandoned_jobs() if waits else [],
        )
    except SchedulerError as error:
        return QueueStatus(error=error.message)


def _evaluations(run: Run, asked: Scheduler) -> dict[str, str]:
    """States by id of the evaluation jobs without a result. Raises SchedulerError."""
    waiting = {job_id: asked.query(job_id) for _, job_id in waiting_evaluations(run)}
    return {job_id: "gone" if job is None else job.state.lower() for job_id, job in waiting.items()}


def waiting_evaluations(run: Run) -> list[tuple[int, str]]:
    """Return (iteration, job id) of the submitted evaluations without a result."""
    return [
        (folder.iteration, submitted.job_id)
        for folder in evaluations.all_evaluations(run)
        if not folder.result.exists() and (submitted := SubmittedEvaluation.read(folder.submitted))
    ]
