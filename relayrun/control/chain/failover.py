"""Failover: two programs that continue a chain whose batch script is gone.

The fallback job starts if a job of the chain fails. It waits again behind another job of the chain, writes STOP if a
person ended the chain, or queues the next job. An orphaned agent has lost its coordinator. If Slurm says that the batch
host is lost, it closes the attempt and queues the job again, or cancels it if another job continues. Every node may do
this; the records make it happen once.
"""

from __future__ import annotations

import time
from dataclasses import replace

from relayrun.control import decisions
from relayrun.control.chain import background, campaign, excluded_nodes, jobs, requested_options, supervisor
from relayrun.control.job_log import log_line, logged
from relayrun.control.rundir import restarts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.restarts import FailedRestart
from relayrun.control.rundir.run import Run, is_stopped, write_stop
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
"""Seconds for which a question to a controller that does not answer is repeated; then the batch script calls this
again."""


def run_fallback_job(run: Run) -> int:
    """Continue or end a chain after the failure of a job; return an exit code. Raises SchedulerError, OSError."""
    plan = Plan.load_in_job(run)
    scheduler = scheduler_for_plan(plan, run, patience=FALLBACK_PATIENCE)
    own = scheduler.current_job_id()
    fallback_jobs = scheduler.fallback_jobs
    if fallback_jobs is None or not plan.fallback_job:
        return 0
    if is_stopped(run):
        return 0
    order = fallback_jobs.order(own)
    live = [job for job in scheduler.jobs(plan) if job.state != "COMPLETING"]  # a completing job continues nothing
    if live:
        last = next((job for job in live if job.waits), live[-1])
        known = scheduler.query(last.id)
        count = known.failed_begins if known else 0
        jobs.queue_fallback_job(run, plan, last.id, failed_begins=count, patience=FALLBACK_PATIENCE)
        return 0
    failed = scheduler.query(order.job_id)
    ended = _chain_end(run, plan, scheduler, order, failed)
    if ended is not None:
        log_line(f"the chain ends: {ended.reason}")
        _write_stop_patiently(run, ended)
        background.send_notices(run, plan)
        campaign.start_due_members_of(run)
        return 0
    _queue_next(run, plan, scheduler, fallback_jobs, order, failed)
    return 0


def _write_stop_patiently(run: Run, ended: ChainEnd) -> None:
    """Write STOP, however long the run directory takes none: a later look may not know the reason, as Slurm forgets
    jobs. At the end of this job the batch script writes STOP, or the reason to its log."""
    while True:
        try:
            return write_stop(run, ended)
        except OSError as error:
            log_line(f"STOP not written: {error}")
        time.sleep(RETRY_SECONDS)


def _failed_begins(order: FallbackOrder, failed: Job | None) -> int:
    return 1 + max(order.failed_begins, failed.failed_begins if failed else 0)


def _chain_end(run: Run, plan: Plan, scheduler: Scheduler, order: FallbackOrder, failed: Job | None) -> ChainEnd | None:
    """Return the end of the chain if a person cancelled a job or too many tries failed; None if it goes on."""
    if (stopped := jobs.read_chain_end_from_comment(failed)) is not None:
        return stopped
    newest = run.newest_begun()
    ours = newest is not None and newest.number > plan.submitted_after_attempt
    if newest is not None and ours and (cancelled := jobs.end_by_cancelled_successor(newest, scheduler)) is not None:
        return cancelled
    # a fallback job may wait in the queue until Slurm has forgotten the job behind which it was queued
    if not _was_replaced(newest, order.job_id) and scheduler.cancelled(order.job_id, nodes=""):
        by = scheduler.cancelled_by(order.job_id)
        words = f"job {order.job_id}, which was to go on, was cancelled"
        return ChainEnd("stopped", words + (f" by {by}" if by else ""))
    count = _failed_begins(order, failed)
    if count >= MAX_FAILED_BEGINS:
        return ChainEnd("failed", f"job {order.job_id} failed and left no successor, {count} times in a row")
    return None


def _was_replaced(newest: Attempt | None, job_id: str) -> bool:
    """Return whether the chain itself cancelled the job, which was its newest that began."""
    begin = newest.read_begin() if newest is not None else None
    return newest is not None and begin is not None and begin.job_id == job_id and newest.replaced_by.exists()


def _queue_next(
    run: Run, plan: Plan, scheduler: Scheduler, fallback_jobs: FallbackJobs, order: FallbackOrder, failed: Job | None
) -> None:
    if failed is not None:
        failed = replace(failed, options=jobs.options_without_tried_nodes(failed, scheduler))
        requested_options.note_changes(run, plan, failed)
    given, tried = requested_options.wished_options(run), _tried_nodes(scheduler, failed)
    options = excluded_nodes.next_job_options(run, plan, scheduler, given, tried=tried)
    tried = [node for node in tried if node in options.get("exclude", "").split(",")]  # too few other nodes may be up
    count = _failed_begins(order, failed)
    delay = BEGIN_BACKOFF << (count - 1)
    job_id = scheduler.submit(plan, run.job_script, options=options, delay=delay)
    log_line(f"job {order.job_id} failed and left no successor; job {job_id} goes on, not before {delay} s from now")
    requested_options.record_accepted(run, plan, job_id)
    jobs.queue_fallback_job(run, plan, job_id, options=options, failed_begins=count, patience=FALLBACK_PATIENCE)
    # a site may forbid changes of jobs; the new fallback job knows the count
    with logged(f"job {job_id} does not know how often the jobs before it failed", SchedulerError):
        fallback_jobs.count_failed_begins(job_id, count, ",".join(tried))


def _tried_nodes(scheduler: Scheduler, failed: Job | None) -> list[str]:
    """Return the nodes on which the batch scripts of this try and the tries before it ran."""
    if failed is None or scheduler.nodes is None:
        return []
    own = scheduler.nodes.expand(failed.nodes)[:1] if failed.nodes else []
    return list(dict.fromkeys(filter(None, [*failed.begin_failed_on.split(","), *own])))


FIRST_NODE_SECONDS = 5.0
"""Interval between two questions of the first node."""
LATER_NODE_SECONDS = 10.0
"""Additional interval of each further node, so that the nodes do not ask Slurm at the same time."""
LONGEST_NODE_SECONDS = 300.0
"""Maximum interval, however many nodes there are."""
SPREAD_SECONDS = 60
"""Seconds over which the questions of nodes near the maximum interval are spread."""
RETRY_SECONDS = 30.0


def close_orphaned_attempt(run: Run, number: int, *, node: int, restart_number: int) -> int:
    """Wait until this job is over or its batch host is lost, then see that the job ends. Returns the agent's exit code.

    Every error is retried: no other process is left. `node`: number of this node in the job. `restart_number`: the
    newest restart that its agent knew, 0 before the first.
    """
    log_line(f"attempt {number}: the coordinator is gone; Slurm is asked whether the batch host is")
    told = False
    while True:
        time.sleep(RETRY_SECONDS if told else question_interval(node))
        try:
            plan, attempt = Plan.load_in_job(run), run.attempt(number)
            scheduler = scheduler_for_plan(plan, run, patience=0)
            own = scheduler.current_job_id()
            job = scheduler.query(own)
            if job is None or not job.live:
                log_line(f"job {own} is {'gone' if job is None else job.state}; nothing is left to do")
                return 1
            names = scheduler.nodes.expand(job.nodes) if job.nodes and scheduler.nodes else []
            if not (host := lost_batch_host(job, names)):
                continue
            if not told:
                log_line(
                    f"the batch host {host} is lost, and the batch script with it; this agent closes attempt {number}"
                )
            told = True
            _record_lost_batch_host(attempt, host, restart_number, run)
            supervisor.end_attempt(run, number, decisions.UNKNOWN_EXIT_CODE)
            if lost_batch_host(scheduler.query(own), names):  # a person or another agent may have ended it meanwhile
                _end_job(run, plan, attempt, own)
            return 1
        except Exception as error:  # any error: without this program the job would hold its nodes to its limit
            log_line(f"tried again: {getattr(error, 'message', '') or f'{type(error).__name__}: {error}'}")


def question_interval(node: int) -> float:
    """Return the seconds before each question of this node."""
    return min(FIRST_NODE_SECONDS + LATER_NODE_SECONDS * node, LONGEST_NODE_SECONDS - node % SPREAD_SECONDS)


def lost_batch_host(job: Job | None, names: list[str]) -> str:
    """Return the batch host that a job in state RUNNING has lost; empty if it is there. `names`: nodes of the job."""
    if job is None or job.state != "RUNNING" or not names or job.batch_host in names:
        return ""
    return job.batch_host


def _record_lost_batch_host(attempt: Attempt, host: str, number: int, run: Run) -> None:
    """Record once why the attempt ends, for `end_attempt`."""
    earlier = restarts.read_failed_restarts(attempt)
    begin = attempt.read_begin()
    if begin is None or attempt.read_end() is not None or any(host in each.lost for each in earlier):
        return
    iteration, durable = restarts.newest_recorded_iteration(attempt), Lineage(run).durable().iteration
    failed = FailedRestart(
        restart=max(1, number, *(each.restart + 1 for each in earlier)),
        time=time.time(),
        rank=None,
        node=host,
        words="the batch host is lost",
        iteration=iteration,
        base_iteration=earlier[-1].next_iteration if earlier else begin.base_iteration,
        durable_iteration=durable,
        next_iteration=durable,
        again=False,
        reason="the batch script is gone with it",
        steps_lost=max(0, iteration - durable),
        lost={host: ""},
    )
    failed.append(attempt.failed_restarts)


def _end_job(run: Run, plan: Plan, attempt: Attempt, own: str) -> None:
    """Requeue this job in front of the job that may wait behind it; cancel it if that job goes on, or no job shall."""
    record, scheduler = attempt.read_end(), scheduler_for_plan(plan, run)
    goes_on = ""
    stopped = is_stopped(run) or jobs.read_chain_end_from_comment(scheduler.query(own)) is not None
    if record is not None and record.action in ("continue", "retry") and not stopped:
        goes_on = jobs.requeue_job(run, plan, scheduler, attempt, own=own, delay=record.delay)
    if goes_on == own:
        return
    log_line(f"job {own} is cancelled")
    if goes_on:
        jobs.cancel_replaced_job(attempt, scheduler, own=own, job_id=goes_on)
    else:
        scheduler.cancel(own)
