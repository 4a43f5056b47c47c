"""The jobs of a chain in the queue: the successor, the fallback job, and the cancellation by a person.

A successor is a pending job of this chain; a completing job does not count. The fallback job, one small job behind the
chain's newest job, starts only if that job fails: its batch script was killed inside `begin`, or somebody cancelled a
waiting job while no job runs (`chain.failover` is its program). A person may cancel the chain on a full disk: if STOP
cannot be written, the comments of the jobs hold the order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from relayrun.control import chain_state
from relayrun.control.chain import excluded_nodes, requested_options
from relayrun.control.chain.job_script import FALLBACK_TIME_LIMIT
from relayrun.control.job_log import log_line, logged
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd, SuccessorJob
from relayrun.control.rundir.run import Run, stop_reason, write_stop
from relayrun.control.scheduler import slurm_commands
from relayrun.control.scheduler.base import FallbackJobs, FallbackOrder, Job, Scheduler
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.control.scheduler.slurm_states import RESERVATION_GONE
from relayrun.control.trainers.registry import trainer_of
from relayrun.errors import RunDirError, SchedulerError, describe_owner
from relayrun.files import write_atomic

SOMEBODY = "somebody"
"""In the comment of a job: a user whose name Slurm does not tell."""


def queue_fallback_job(
    run: Run,
    plan: Plan,
    job_id: str,
    *,
    options: Mapping[str, str] | None = None,
    failed_begins: int = 0,
    patience: float = 0,
) -> bool:
    """Queue a fallback job behind the chain's newest job, after `failed_begins` jobs in a row that could not begin;
    return False if Slurm did not answer. `options`: of that job beside the plan's; None: the wished ones."""
    scheduler = scheduler_for_plan(plan, run, patience=patience)
    jobs = scheduler.fallback_jobs
    if not plan.fallback_job or jobs is None:
        return True
    order = FallbackOrder(job_id=job_id, failed_begins=failed_begins)
    try:
        former = [job.id for job in scheduler.live_fallback_jobs(plan) if job.waits]
        if former and _move_fallback_job(jobs, former[0], order):
            return True
        given = requested_options.wished_options(run) if options is None else options
        planned = {"nodes": str(plan.nodes_of_job), "cpus-per-task": str(plan.cpus_per_task), **plan.sbatch_options}
        jobs.queue(
            run.fallback_script,
            name=plan.fallback_job_name,
            order=order,
            options=planned | slurm_commands.gpu_options_like_script(given, plan.sbatch_options),
            limit=min(FALLBACK_TIME_LIMIT, plan.time_limit),
        )
        for job in scheduler.live_fallback_jobs(plan) if former else []:
            if job.waits and job.id in former:
                scheduler.cancel(job.id)
    except SchedulerError as error:
        log_line(f"no fallback job behind job {job_id}: {error.message}")
        return not isinstance(error, slurm_commands.NoAnswerError)
    return True


def queue_owed_fallback_job(run: Run, plan: Plan, attempt: Attempt) -> None:
    """Queue the fallback job behind the successor for which Slurm did not answer before."""
    known = SuccessorJob.read(attempt.successor)
    if known is not None and known.fallback_owed and queue_fallback_job(run, plan, known.job_id):
        replace(known, fallback_owed=False).write(attempt.successor)


def _move_fallback_job(jobs: FallbackJobs, job_id: str, order: FallbackOrder) -> bool:
    try:
        jobs.move(job_id, order)
    except SchedulerError as error:  # a site may forbid changes of jobs; or it has just started
        log_line(f"fallback job {job_id} stays as it is, and another one is queued: {error.message}")
        return False
    return True


def cancel_fallback_jobs(plan: Plan, scheduler: Scheduler, *, anyone: bool = False) -> list[str]:
    """Cancel the pending fallback jobs: this user's, or `anyone`'s; return their ids. Raises SchedulerError."""
    waiting = [job.id for job in scheduler.live_fallback_jobs(plan, anyone=anyone) if job.waits]
    for job_id in waiting:
        scheduler.cancel(job_id)
    return waiting


def queue_first_job(run: Run, plan: Plan, scheduler: Scheduler) -> str:
    """Queue the first job of a prepared run, and a fallback job behind it; return its id. Raises SchedulerError."""
    evaluation = run.evaluation_script if run.evaluation_policy.exists() else None
    job_id = scheduler.submit_first(plan, run.job_script, evaluation)
    requested_options.record_accepted(run, plan, job_id)
    queue_fallback_job(run, plan, job_id)
    return job_id


def ensure_successor(run: Run, plan: Plan, scheduler: Scheduler, attempt: Attempt, *, own: str, delay: int = 0) -> str:
    """Queue a job behind `own` unless one is pending; return its id. Several pending jobs are reduced to one."""
    found = pending_jobs(plan, scheduler, own=own)
    if found:
        job_id = found[0].id
    else:
        wanted = excluded_nodes.next_job_options(run, plan, scheduler, requested_options.wished_options(run))
        try:
            job_id = scheduler.submit(plan, run.job_script, options=wanted, delay=delay)
        except SchedulerError:  # a limit of submitted jobs may allow one job behind this one, but not two
            if not cancel_fallback_jobs(plan, scheduler) or pending_jobs(plan, scheduler, own=own):
                raise
            job_id = scheduler.submit(plan, run.job_script, options=wanted, delay=delay)
        log_line(f"queued job {job_id} behind this one" + (f", not before {delay} s from now" if delay else ""))
        requested_options.record_accepted(run, plan, job_id)
    for job in found[1:]:  # the answer to a submit was lost, and a second job was submitted
        cancel_job(scheduler, job)
    owed = not queue_fallback_job(run, plan, job_id)
    with logged(f"{attempt.successor.name} not written", OSError):  # it is queued; its cancellation will go unnoticed
        SuccessorJob(job_id=job_id, time=time.time(), fallback_owed=owed).write(attempt.successor)
        attempt.retry_successor.unlink(missing_ok=True)
    return job_id


def pending_jobs(plan: Plan, scheduler: Scheduler, *, own: str) -> list[Job]:
    """Return the chain's pending jobs except `own`, the job of this process. Raises SchedulerError."""
    return [job for job in scheduler.jobs(plan) if job.id != own and job.waits]


def cancel_job(scheduler: Scheduler, job: Job) -> None:
    """Cancel one queued job by its id. Raises SchedulerError."""
    scheduler.cancel(job.id)
    log_line(f"cancelled queued job {job.id}")


def options_without_tried_nodes(job: Job, scheduler: Scheduler) -> dict[str, str]:
    """Return the options of the running job without the excluded nodes on which its `begin` failed."""
    options = dict(job.options)
    if not job.begin_failed_on or scheduler.nodes is None or "exclude" not in options:
        return options
    tried = set(job.begin_failed_on.split(","))
    kept = [node for node in scheduler.nodes.expand(options.pop("exclude")) if node not in tried]
    return options | ({"exclude": ",".join(kept)} if kept else {})


def read_chain_end_from_comment(job: Job | None) -> ChainEnd | None:
    """Return the end of the chain that the comment of a job records, if it does; see `note_stop_in_jobs`."""
    return ChainEnd("stopped", f"stopped by {job.stopped_by}") if job is not None and job.stopped_by else None


def record_cancelled_successor(
    attempt: Attempt, scheduler: Scheduler, *, note_waiting: Callable[[Job], object] = lambda _: None
) -> SuccessorJob | None:
    """Return the successor if it was cancelled, and note that: a scheduler forgets jobs. Raises SchedulerError.
    `note_waiting` gets a successor that waits."""
    known = SuccessorJob.read(attempt.successor)
    if known is None or known.cancelled:
        return known
    if known.job_id == scheduler.current_job_id():
        return None  # the successor itself asks
    job = scheduler.query(known.job_id)
    if job is not None and job.waits:
        note_waiting(job)
    if (job is not None and job.live) or not scheduler.cancelled(known.job_id, nodes=""):
        return None
    noted = replace(known, cancelled=True, cancelled_by=scheduler.cancelled_by(known.job_id))
    try:
        noted.write(attempt.successor)
    except OSError as error:
        log_line(f"{attempt.successor.name} not written: {error}")
        with contextlib.suppress(SchedulerError):
            scheduler.note_stop(scheduler.current_job_id(), noted.cancelled_by or SOMEBODY)
    return noted


def end_by_cancelled_successor(attempt: Attempt, scheduler: Scheduler) -> ChainEnd | None:
    """Return the end of the chain if somebody cancelled the successor of this attempt. Raises SchedulerError."""
    cancelled = record_cancelled_successor(attempt, scheduler)
    if cancelled is None:
        return None
    by = f" by {cancelled.cancelled_by}" if cancelled.cancelled_by else ""
    return ChainEnd("stopped", f"the successor, job {cancelled.job_id}, was cancelled{by}")


def continue_chain(
    run: Run, plan: Plan, scheduler: Scheduler, attempt: Attempt, *, own: str, delay: int
) -> ChainEnd | None:
    """Ensure that exactly one job follows, to start after `delay` seconds or later; or return the end of the chain.

    A person's acts in the queue stand: a cancelled job is not replaced, a held job stays held. Raises SchedulerError if
    no job could be queued.
    """
    if (stopped := read_chain_end_from_comment(scheduler.query(own))) is not None:
        return stopped
    if plan.chain.mode == "requeue":
        cancelled = end_by_cancelled_successor(attempt, scheduler)  # another job may replace this one
        if cancelled is None:
            requeue_job(run, plan, scheduler, attempt, own=own, delay=delay)
        return cancelled
    found = pending_jobs(plan, scheduler, own=own)
    if found:
        if found[0].state == RESERVATION_GONE:
            return ChainEnd("stopped", f"the successor, job {found[0].id}, never starts: its reservation was deleted")
        _adapt_pending_job(run, plan, scheduler, found[0].id, delay)
        return None
    cancelled = end_by_cancelled_successor(attempt, scheduler)
    if cancelled is not None:
        return cancelled
    try:
        ensure_successor(run, plan, scheduler, attempt, own=own, delay=delay)
    except SchedulerError as error:  # for example a limit of submitted jobs: a requeue needs no second job
        if pending_jobs(plan, scheduler, own=own):  # it was queued all the same
            return None
        log_line(f"no job could be queued behind this one: {error.message}")
        requeue_job(run, plan, scheduler, attempt, own=own, delay=delay)
    return None


def _adapt_pending_job(run: Run, plan: Plan, scheduler: Scheduler, job_id: str, delay: int) -> None:
    """Delay the waiting job, and exclude the nodes that are bad now. Errors are logged."""
    with logged(f"job {job_id} stays as it is", SchedulerError):
        if delay:
            scheduler.postpone(job_id, delay=delay)
            log_line(f"job {job_id} does not start before {delay} s from now")
        if (job := scheduler.query(job_id)) is not None and job.waits:
            requested_options.note_changes(run, plan, job)
        if excluded_nodes.update_pending_job_nodes(run, plan, scheduler, job_id):
            requested_options.record_accepted(run, plan, job_id)


def requeue_job(run: Run, plan: Plan, scheduler: Scheduler, attempt: Attempt, *, own: str, delay: int) -> str:
    """Requeue the running job under its id, with the nodes that it can have; return the id of the job that goes on.

    That is another job if this one would keep a lowered time limit, or cannot start with fewer nodes and too few are
    up. A repeated call returns the same job. Raises SchedulerError.
    """
    if other := _replacement_of(plan, scheduler, attempt, own):
        return other
    minimum = None
    with logged(f"with how many nodes job {own} may start is not known", SchedulerError):
        minimum = excluded_nodes.requeue_node_count(run, plan, scheduler, own)
    lost = LOST_NODE if minimum is not None and excluded_nodes.would_wait_for_nodes(run, minimum) else ""
    job = None if lost else scheduler.query(own)
    if why := lost or (LESS_TIME if job is not None and requested_options.has_less_time(run, plan, job) else ""):
        # cancelled meanwhile: the next try of `end` sees it
        if cancelled := end_by_cancelled_successor(attempt, scheduler):
            raise SchedulerError(cancelled.reason)
        try:
            return ensure_replacement(run, plan, scheduler, attempt, own=own, delay=delay, why=why)
        except SchedulerError as error:
            if found := pending_jobs(plan, scheduler, own=own):  # it was queued all the same, or by another agent
                return found[0].id
            log_line(f"no job can take the place of job {own}, {why}: {error.message}")
    log_line(f"job {own} is queued again, not before {delay} s from now")
    scheduler.requeue(own, delay=delay, minimum=minimum)
    return own


def _replacement_of(plan: Plan, scheduler: Scheduler, attempt: Attempt, own: str) -> str | None:
    """Return the job that already replaces `own`; in mode `requeue` any pending job does."""
    if attempt.replaced_by.exists():
        return attempt.replaced_by.read_text()
    found = pending_jobs(plan, scheduler, own=own) if plan.chain.mode == "requeue" else []
    return found[0].id if found else None


LESS_TIME = "whose time limit was lowered, and which only an operator may raise"
LOST_NODE = "which has lost a node and would wait for as many as before"


def ensure_replacement(
    run: Run, plan: Plan, scheduler: Scheduler, attempt: Attempt, *, own: str, delay: int, why: str = LOST_NODE
) -> str:
    """Ensure that another job replaces `own`, which cannot be requeued as it is, for the reason `why`; return its
    id."""
    for job in pending_jobs(plan, scheduler, own=own)[:1]:  # Slurm may not have answered when the attempt ended
        _adapt_pending_job(run, plan, scheduler, job.id, delay=0)
    job_id = ensure_successor(run, plan, scheduler, attempt, own=own, delay=delay)
    log_line(f"job {job_id} goes on in the place of job {own}, {why}")
    return job_id


def cancel_replaced_job(attempt: Attempt, scheduler: Scheduler, *, own: str, job_id: str) -> None:
    """Cancel `own` after recording its replacement, else the next `begin` would take it for a person's wish."""
    write_atomic(attempt.replaced_by, job_id)
    scheduler.cancel(own)


def cancel_chain(run: Run, scheduler: Scheduler, *, user: str) -> str:
    """End the chain and cancel its jobs, without waiting for a checkpoint; return a sentence about it. Raises
    RunDirError if this is no run, another user's, or not writable; SchedulerError if a job stays."""
    plan, unwritten = Plan.load(run), ""
    try:
        if chain_state.is_owned_by_another_user(plan):  # its plan may name the jobs of this user
            raise PermissionError
        write_stop(run, ChainEnd("stopped", f"cancelled by {user}"))
    except PermissionError:
        hint = "`relayrun stop` asks the job that runs to save and leave"
        raise RunDirError(f"you may not write here: {describe_owner(run.path)}", where=run.stop, hint=hint) from None
    except OSError as error:
        unwritten = note_stop_in_jobs(run, plan, scheduler, error, user=user)
    withdrawn: list[str] = []
    done: list[str] = []
    try:
        jobs = scheduler.jobs(plan, anyone=True)
        with contextlib.suppress(SchedulerError):  # it would find STOP
            withdrawn = [job.id for job in scheduler.live_fallback_jobs(plan, anyone=True) if job.waits]
        # else a pending job would start
        waiting_first = [job.id for job in sorted(jobs, key=lambda job: not job.waits)]
        if not (jobs or withdrawn) or not scheduler.cancel_together([*withdrawn, *waiting_first]):
            withdrawn = []
            with contextlib.suppress(SchedulerError):  # it may belong to a former owner
                withdrawn = cancel_fallback_jobs(plan, scheduler, anyone=True)
            for job_id in waiting_first:
                scheduler.cancel(job_id)
                done.append(job_id)
    except SchedulerError as error:
        error.message += f"; cancelled: {', '.join(done) or 'no job'}"
        error.message += "" if unwritten else "; STOP is written: a queued job ends at its start, a running one goes on"
        error.hint = error.hint or "call `relayrun cancel` again when the scheduler answers"
        raise
    said = f"cancelled {', '.join(f'{job.id} ({job.state.lower()})' for job in jobs)}" if jobs else "no job was there"
    said += f", and the fallback job {', '.join(withdrawn)}" if withdrawn else ""
    reason, saved = f"cancelled by {user}{unwritten}", "its checkpoints cannot be looked at"
    with contextlib.suppress(OSError, RunDirError):  # the jobs are cancelled even if the file system is away
        reason = stop_reason(run) or reason
        newest = next(Lineage(run).backwards(), None)
        saved = f"the newest checkpoint is that of iteration {newest.commit.iteration}" if newest else "no checkpoint"
    return f"the chain has ended: {reason}; {said}; {saved}"


def stop_chain_without_files(run: Run, plan: Plan, scheduler: Scheduler, error: OSError, *, user: str) -> str:
    """End a chain whose run directory accepts neither trigger nor STOP; return a sentence about it. Pending jobs are
    cancelled, and a signal asks the ranks to save and leave. Raises SchedulerError if a pending job stays."""
    unwritten = note_stop_in_jobs(run, plan, scheduler, error, user=user)
    with contextlib.suppress(SchedulerError):
        cancel_fallback_jobs(plan, scheduler, anyone=True)
    told = []
    leave = trainer_of(plan, run).leave_signal
    for job in sorted(scheduler.jobs(plan, anyone=True), key=lambda job: not job.waits):
        if job.waits:
            scheduler.cancel(job.id)
            told.append(f"cancelled {job.id}")
            continue
        try:
            if leave is None:
                raise SchedulerError("its program hears no signal")
            scheduler.signal_ranks(job.id, leave)
            told.append(f"the ranks of job {job.id} are asked to save and leave")
        except SchedulerError as error:
            who = f"job {job.id} ({job.state.lower()}) could not be asked to leave ({error.message})"
            told.append(f"{who}: `relayrun cancel` ends it at once")
    reason = f"stopped by {user}{unwritten}"
    with contextlib.suppress(OSError):
        reason = stop_reason(run) or reason
    return f"the chain ends: {reason}; {', '.join(told) or 'no job was there'}"


def note_stop_in_jobs(run: Run, plan: Plan, scheduler: Scheduler, error: OSError, *, user: str) -> str:
    """Record in the comments of a chain's jobs that it has ended; return a clause about it. Raises SchedulerError."""
    for job in scheduler.jobs(plan, anyone=True):
        # a site may forbid changes of jobs; the job is cancelled all the same
        with contextlib.suppress(SchedulerError):
            scheduler.note_stop(job.id, user)
    return (
        f", which could not be written ({error.strerror}, in {run.path}): jobs that are still there know it by their "
        "comments; free some space, and call this again"
    )
