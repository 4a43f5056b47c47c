"""The fallback job: one small job behind the chain's last one, which starts only where that one fails.

A batch script that is killed inside `begin`, before it has queued a successor, leaves nobody who could say or do
something; nor does a waiting job that is cancelled while nothing runs. What the fallback job does then is
`chain.fallback_job`. There is one for a chain: it is moved behind each new job. Where it cannot be had the chain goes
on without it: a line in the log, no second try.
"""

from __future__ import annotations

from collections.abc import Mapping

from relayrun.chain.log import log
from relayrun.errors import SchedulerError
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.scheduler.base import FallbackOrder, Job, Scheduler
from relayrun.scheduler.choose import for_plan


def put_behind(run: Run, plan: Plan, job_id: str, *, options: Mapping[str, str | None], failed_begins: int = 0) -> None:
    """Let a fallback job wait for the failure of the chain's newest job, which has these options.

    `failed_begins`: how often in a row the jobs before it could not begin.
    """
    jobs = for_plan(plan, run, patience=0).fallback_jobs
    if not plan.fallback_job or jobs is None:
        return
    order = FallbackOrder(job_id=job_id, failed_begins=failed_begins)
    try:
        waiting = [job.id for job in jobs.live(plan.fallback_job_name) if job.state == "PENDING"]
        if waiting:
            jobs.move(waiting[0], order)
        else:
            jobs.queue(run.fallback_script, name=plan.fallback_job_name, order=order, options=options)
    except SchedulerError as error:
        log(f"no fallback job behind job {job_id}: {error.message}")


def withdraw(plan: Plan, scheduler: Scheduler, *, anyone: bool = False) -> list[str]:
    """Cancel the fallback jobs that wait: this user's, or `anyone`'s; return their ids. Raises SchedulerError."""
    waiting = [job.id for job in live(plan, scheduler, anyone=anyone) if job.state == "PENDING"]
    for job_id in waiting:
        scheduler.cancel(job_id)
    return waiting


def live(plan: Plan, scheduler: Scheduler, *, anyone: bool = False) -> list[Job]:
    """The chain's fallback jobs that wait or run: this user's, or `anyone`'s. Raises SchedulerError."""
    jobs = scheduler.fallback_jobs
    return jobs.live(plan.fallback_job_name, anyone=anyone) if plan.fallback_job and jobs is not None else []
