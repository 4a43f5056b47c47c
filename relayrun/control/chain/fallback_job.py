"""What the fallback job does when it starts: a job of the chain has failed; is there anybody who goes on?

Where a job of the chain is queued or runs, the fallback job stands behind that one again. Where nothing is there, it
writes STOP if a person ended the chain, and else queues the next job, as the batch script does when `begin` fails
(`launchers/lib/again.sh`): later each time, without the node where it failed, and not for ever. Whether the ranks may
start is then for that job's `begin`.
"""

from __future__ import annotations

from relayrun.control import take_over
from relayrun.control.chain import campaign, fallback, messenger, next_nodes, successor
from relayrun.control.log import log_line
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.stop import stop_reason, write_stop
from relayrun.control.scheduler.base import (
    BEGIN_BACKOFF,
    MAX_FAILED_BEGINS,
    FallbackJobs,
    FallbackOrder,
    Job,
    Scheduler,
)
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import SchedulerError

FALLBACK_PATIENCE = 240.0
"""Seconds for which a controller that does not answer is asked again; then the batch script calls this again."""


def run_fallback_job(run: Run) -> int:
    """See to a chain one of whose jobs has failed; return an exit code.

    Raises SchedulerError and OSError, which another try may not meet.
    """
    plan = Plan.load(run)
    scheduler = scheduler_for_plan(plan, run, patience=FALLBACK_PATIENCE)
    own = scheduler.current_job_id()
    jobs = scheduler.fallback_jobs
    if jobs is None or not plan.fallback_job or stop_reason(run) is not None or take_over.is_taken_over(plan, own):
        return 0
    order = jobs.order(own)
    live = [job for job in scheduler.jobs(plan) if job.state != "COMPLETING"]  # such a one carries nothing on
    if live:
        last = next((job for job in live if job.waits), live[-1])
        known = scheduler.query(last.id)
        options, failed_begins = (known.options, known.failed_begins) if known else (plan.sbatch_options, 0)
        fallback.queue_fallback_job(run, plan, last.id, options=options, failed_begins=failed_begins)
        return 0
    failed = scheduler.query(order.job_id)
    reason = _why_it_ends(run, scheduler, order, failed)
    if reason is not None:
        write_stop(run, reason)
        log_line(f"the chain ends: {reason}")
        messenger.send_notices(run, plan)
        campaign.start_due_members_of(run)
        return 0
    _queue_next(run, plan, scheduler, jobs, order, failed)
    return 0


def _failed_begins(order: FallbackOrder, failed: Job | None) -> int:
    return 1 + max(order.failed_begins, failed.failed_begins if failed else 0)


def _why_it_ends(run: Run, scheduler: Scheduler, order: FallbackOrder, failed: Job | None) -> str | None:
    """What a person did to the queue, or that it has been tried often enough; None where the chain goes on."""
    if (stopped := successor.stop_reason_of_job(failed)) is not None:
        return stopped
    newest = run.newest_begun()
    words = successor.cancelled_successor_reason(newest, scheduler) if newest is not None else None
    if words is not None:
        return words
    if failed is not None and failed.state == "CANCELLED" and not _was_replaced(newest, failed):
        by = scheduler.cancelled_by(failed.id)
        return f"job {failed.id}, which was to go on, was cancelled" + (f" by {by}" if by else "")
    count = _failed_begins(order, failed)
    if count >= MAX_FAILED_BEGINS:
        return f"job {order.job_id} failed and left no successor, {count} times in a row"
    return None


def _was_replaced(newest: Attempt | None, job: Job) -> bool:
    """Whether the chain itself has cancelled the job, which was its newest that began."""
    begin = newest.read_begin() if newest is not None else None
    return newest is not None and begin is not None and begin.job_id == job.id and newest.made_place.exists()


def _queue_next(
    run: Run, plan: Plan, scheduler: Scheduler, jobs: FallbackJobs, order: FallbackOrder, failed: Job | None
) -> None:
    """Queue a job with the options of the one that failed. Raises SchedulerError."""
    newest = run.newest_begun()
    begin = newest.read_begin() if newest is not None else None
    given = successor.successor_options(failed, scheduler) if failed else begin.options if begin else {}
    tried = _tried_nodes(scheduler, failed)
    options = next_nodes.next_job_options(run, plan, scheduler, given, tried=tried)
    tried = [node for node in tried if node in options.get("exclude", "").split(",")]  # or there are too few others
    count = _failed_begins(order, failed)
    delay = BEGIN_BACKOFF << (count - 1)
    job_id = scheduler.submit(plan, run.job_script, options=options, delay=delay)
    log_line(f"job {order.job_id} failed and left no successor; job {job_id} goes on, not before {delay} s from now")
    fallback.queue_fallback_job(run, plan, job_id, options=options, failed_begins=count)
    try:
        jobs.count_failed_begins(job_id, count, ",".join(tried))
    except SchedulerError as error:  # a site may let nobody change a job; the new fallback job knows the count
        log_line(f"job {job_id} does not know how often the jobs before it failed: {error.message}")


def _tried_nodes(scheduler: Scheduler, failed: Job | None) -> list[str]:
    """The nodes where the batch scripts of this and the tries before it ran."""
    if failed is None or scheduler.nodes is None:
        return []
    own = scheduler.nodes.expand(failed.nodes)[:1] if failed.nodes else []
    return list(dict.fromkeys(filter(None, [*failed.begin_failed_on.split(","), *own])))
