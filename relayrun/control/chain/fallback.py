"""The fallback job: one small job behind the chain's last job, which starts only if that job fails.

It covers a batch script that is killed inside `begin`, before it has queued a successor, and a waiting job that is
cancelled while no job runs. `failover` is what the fallback job runs. A chain has one: it is moved behind each new job.
If it cannot be queued the chain goes on without it, with a line in the log and no second try.
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
    """Queue a fallback job behind the chain's newest job, after `failed_begins` jobs in a row that could not begin."""
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
    try:
        jobs.move(job_id, order)
    except SchedulerError as error:  # a site may forbid changes of jobs; or it has just started
        log_line(f"fallback job {job_id} stays as it is, and another one is queued: {error.message}")
        return False
    return True


def _chain_options(plan: Plan, given: Mapping[str, str]) -> dict[str, str | None]:
    """Return all options of the chain's jobs: `given`, read back from one of them, overrides the plan."""
    planned = {"nodes": str(plan.nodes_of_job), "cpus-per-task": str(plan.cpus_per_task), **plan.sbatch_options}
    return planned | slurm_commands.gpu_options_like_script(given, plan.sbatch_options)


def _fallback_time_limit(plan: Plan, given: Mapping[str, str]) -> int:
    try:
        asked = parse_time(given["time"])
    except (KeyError, ValueError):  # not given, or UNLIMITED
        asked = plan.time_limit
    return min(FALLBACK_TIME_LIMIT, asked)


def cancel_fallback_jobs(plan: Plan, scheduler: Scheduler, *, anyone: bool = False) -> list[str]:
    """Cancel the pending fallback jobs: this user's, or `anyone`'s; return their ids. Raises SchedulerError."""
    waiting = [job.id for job in live_fallback_jobs(plan, scheduler, anyone=anyone) if job.waits]
    for job_id in waiting:
        scheduler.cancel(job_id)
    return waiting


def live_fallback_jobs(plan: Plan, scheduler: Scheduler, *, anyone: bool = False) -> list[Job]:
    """Return the chain's pending or running fallback jobs: this user's, or `anyone`'s. Raises SchedulerError."""
    jobs = scheduler.fallback_jobs
    return jobs.live(plan.fallback_job_name, anyone=anyone) if plan.fallback_job and jobs is not None else []
