"""The fallback job: one small job behind the chain's last one, which starts only where that one fails.

A batch script that is killed inside `begin`, before it has queued a successor, leaves nobody who could say or do
something; a waiting job that is cancelled while nothing runs leaves nobody either. `failover` is what the fallback
job does then. There is one for a chain: it is moved behind each new job. Where it cannot be had the chain goes on
without it: a line in the log, no second try.
"""

from __future__ import annotations

from collections.abc import Mapping

from relayrun.control.chain.job_script import FALLBACK_TIME_LIMIT
from relayrun.control.job_log import log_line
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import slurm_commands
from relayrun.control.scheduler.base import FallbackJobs, FallbackOrder, Job, Scheduler
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import SchedulerError
from relayrun.slurmtime import parse_time


def queue_fallback_job(
    run: Run, plan: Plan, job_id: str, *, options: Mapping[str, str | None], failed_begins: int = 0
) -> None:
    """Let a fallback job wait for the failure of the chain's newest job, which has these options.

    `failed_begins`: how often in a row the jobs before it could not begin.
    """
    scheduler = scheduler_for_plan(plan, run, patience=0)
    jobs = scheduler.fallback_jobs
    if not plan.fallback_job or jobs is None:
        return
    order = FallbackOrder(job_id=job_id, failed_begins=failed_begins)
    try:
        former = [job.id for job in _pending_fallback_jobs(plan, jobs)]
        if former and _move_fallback_job(jobs, former[0], order):
            return
        given = {name: value for name, value in options.items() if value is not None}
        jobs.queue(
            run.fallback_script,
            name=plan.fallback_job_name,
            order=order,
            options=_chain_options(plan, given),
            limit=_fallback_time_limit(plan, given),
        )
        for job in _pending_fallback_jobs(plan, jobs) if former else []:
            if job.id in former:
                scheduler.cancel(job.id)
    except SchedulerError as error:
        log_line(f"no fallback job behind job {job_id}: {error.message}")


def _pending_fallback_jobs(plan: Plan, jobs: FallbackJobs) -> list[Job]:
    return [job for job in jobs.live(plan.fallback_job_name) if job.waits]


def _move_fallback_job(jobs: FallbackJobs, job_id: str, order: FallbackOrder) -> bool:
    """Let the fallback job that waits stand behind another job; return whether it does."""
    try:
        jobs.move(job_id, order)
    except SchedulerError as error:  # a site may let nobody change a job; or it has just started
        log_line(f"fallback job {job_id} stays as it is, and another one is queued: {error.message}")
        return False
    return True


def _chain_options(plan: Plan, given: Mapping[str, str]) -> dict[str, str | None]:
    """All that the chain's jobs ask of sbatch: `given`, read back from one of them, wins over the plan."""
    planned = {"nodes": str(plan.nodes_of_job), "cpus-per-task": str(plan.cpus_per_task), **plan.sbatch_options}
    return planned | slurm_commands.gpu_options_like_script(given, plan.sbatch_options)


def _fallback_time_limit(plan: Plan, given: Mapping[str, str]) -> int:
    """Seconds that the fallback job may take: no more than a job of the chain, so that its partition allows them."""
    try:
        asked = parse_time(given["time"])
    except (KeyError, ValueError):  # the plan's; or UNLIMITED
        asked = plan.time_limit
    return min(FALLBACK_TIME_LIMIT, asked)


def cancel_fallback_jobs(plan: Plan, scheduler: Scheduler, *, anyone: bool = False) -> list[str]:
    """Cancel the fallback jobs that wait: this user's, or `anyone`'s; return their ids. Raises SchedulerError."""
    waiting = [job.id for job in live_fallback_jobs(plan, scheduler, anyone=anyone) if job.waits]
    for job_id in waiting:
        scheduler.cancel(job_id)
    return waiting


def live_fallback_jobs(plan: Plan, scheduler: Scheduler, *, anyone: bool = False) -> list[Job]:
    """The chain's fallback jobs that wait or run: this user's, or `anyone`'s. Raises SchedulerError."""
    jobs = scheduler.fallback_jobs
    return jobs.live(plan.fallback_job_name, anyone=anyone) if plan.fallback_job and jobs is not None else []
