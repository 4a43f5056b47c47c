"""The jobs of a chain in the queue: the successor, the fallback job, and the cancellation by a person.

A successor is a pending job of this chain; a job that is still completing does not count. The fallback job waits
for the failure of the chain's newest job (`chain.failover` says what it does then). A person may cancel the chain
on a full disk: cancelling needs no file, and if STOP cannot be written the comments of the jobs hold the order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace

from relayrun.control.chain import excluded_nodes
from relayrun.control.chain.fallback import cancel_fallback_jobs, queue_fallback_job
from relayrun.control.job_log import log_line
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd, SuccessorJob
from relayrun.control.rundir.run import Run, stop_reason, write_stop
from relayrun.control.scheduler.base import RESERVATION_GONE, Job, Scheduler
from relayrun.control.trainers.registry import trainer_of
from relayrun.errors import RunDirError, SchedulerError, describe_owner
from relayrun.files import write_atomic


def cancel_chain(run: Run, scheduler: Scheduler, *, user: str) -> str:
    """End the chain and cancel its jobs, without waiting for a checkpoint; return what was done, in words.

    Raises RunDirError where this user may not write STOP or this is no run, SchedulerError where a job stays.
    """
    plan, unwritten = Plan.load(run), ""
    try:
        write_stop(run, ChainEnd("stopped", f"cancelled by {user}"))
    except PermissionError:
        hint = "`relayrun stop` asks the job that runs to save and leave"
        raise RunDirError(f"you may not write here: {describe_owner(run.path)}", where=run.stop, hint=hint) from None
    except OSError as error:
        unwritten = note_stop_in_jobs(run, plan, scheduler, error, user=user)
    withdrawn: list[str] = []
    with contextlib.suppress(SchedulerError):  # it finds STOP; it may be a former owner's
        withdrawn = cancel_fallback_jobs(plan, scheduler, anyone=True)
    jobs = scheduler.jobs(plan, anyone=True)
    for job in sorted(jobs, key=lambda job: not job.waits):  # or one that waits would start
        scheduler.cancel(job.id)
    said = f"cancelled {', '.join(f'{job.id} ({job.state.lower()})' for job in jobs)}" if jobs else "no job was there"
    said += f", and the fallback job {', '.join(withdrawn)}" if withdrawn else ""
    reason, saved = f"cancelled by {user}{unwritten}", "its checkpoints cannot be looked at"
    with contextlib.suppress(OSError, RunDirError):  # where the file system is away the jobs have gone all the same
        reason = stop_reason(run) or reason
        newest = next(Lineage(run).backwards(), None)
        saved = f"the newest checkpoint is that of iteration {newest.commit.iteration}" if newest else "no checkpoint"
    return f"the chain has ended: {reason}; {said}; {saved}"


def stop_chain_without_files(run: Run, plan: Plan, scheduler: Scheduler, error: OSError, *, user: str) -> str:
    """End a chain whose run directory takes neither trigger nor STOP; return what was done, in words.

    What waits is cancelled, and the ranks of the job that runs are asked by a signal to save and leave. Raises
    SchedulerError where a job stays that waits.
    """
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
            told.append(
                f"job {job.id} ({job.state.lower()}) could not be asked to leave ({error.message}): `relayrun cancel` "
                "ends it at once"
            )
    reason = f"stopped by {user}{unwritten}"
    with contextlib.suppress(OSError):
        reason = stop_reason(run) or reason
    return f"the chain ends: {reason}; {', '.join(told) or 'no job was there'}"


def note_stop_in_jobs(run: Run, plan: Plan, scheduler: Scheduler, error: OSError, *, user: str) -> str:
    """Write into the jobs of a chain that it has ended; return what is to be said of that. Raises SchedulerError."""
    for job in scheduler.jobs(plan, anyone=True):
        with contextlib.suppress(SchedulerError):  # a site may let nobody change a job; it is cancelled all the same
            scheduler.note_stop(job.id, user)
    return (
        f", which could not be written ({error.strerror}, in {run.path}): jobs that are still there know it by their "
        "comments; free some space, and call this again"
    )


def pending_jobs(plan: Plan, scheduler: Scheduler, *, own: str) -> list[Job]:
    """The chain's pending jobs but for `own`, the one that this runs in. Raises SchedulerError."""
    return [job for job in scheduler.jobs(plan) if job.id != own and job.waits]


def ensure_successor(
    run: Run,
    plan: Plan,
    scheduler: Scheduler,
    attempt: Attempt,
    *,
    own: str,
    options: Mapping[str, str],
    delay: int = 0,
) -> str:
    """Queue a job with these options behind `own`, unless one waits there already; return its id.

    Of several that wait one is left. Raises SchedulerError where none could be queued.
    """
    found = pending_jobs(plan, scheduler, own=own)
    if found:
        job_id = found[0].id
    else:
        wanted = excluded_nodes.next_job_options(run, plan, scheduler, options)
        try:
            job_id = scheduler.submit(plan, run.job_script, options=wanted, delay=delay)
        except SchedulerError:  # a limit of submitted jobs may leave room for one behind this one, not for two
            if not cancel_fallback_jobs(plan, scheduler) or pending_jobs(plan, scheduler, own=own):
                raise
            job_id = scheduler.submit(plan, run.job_script, options=wanted, delay=delay)
        log_line(f"queued job {job_id} behind this one" + (f", not before {delay} s from now" if delay else ""))
    for job in found[1:]:  # an order to queue one whose answer was lost, and then another
        cancel_job(scheduler, job)
    try:
        SuccessorJob(job_id=job_id, time=time.time()).write(attempt.successor)
        attempt.retry_successor.unlink(missing_ok=True)
    except OSError as error:  # it is queued; whether somebody cancels it will not be known
        log_line(f"{attempt.successor.name} not written: {error}")
    queue_fallback_job(run, plan, job_id, options=options)
    return job_id


def queue_first_job(run: Run, plan: Plan, scheduler: Scheduler) -> str:
    """Queue the first job of a prepared run, and a fallback job behind it; return its id. Raises SchedulerError."""
    evaluation = run.evaluation_script if run.evaluation_policy.exists() else None
    job_id = scheduler.submit_first(plan, run.job_script, evaluation)
    queue_fallback_job(run, plan, job_id, options=plan.sbatch_options)
    return job_id


def cancel_job(scheduler: Scheduler, job: Job) -> None:
    """Cancel one queued job by its id. Raises SchedulerError."""
    scheduler.cancel(job.id)
    log_line(f"cancelled queued job {job.id}")


def successor_options(job: Job, scheduler: Scheduler) -> dict[str, str]:
    """The options of the running job that hold for its successors.

    Not its time limit, which Slurm or a person may have lowered: they ask for the plan's. Nor the nodes that it leaves
    out because its `begin` failed there.
    """
    options = {name: value for name, value in job.options.items() if name != "time"}
    if not job.begin_failed_on or scheduler.nodes is None or "exclude" not in options:
        return options
    tried = set(job.begin_failed_on.split(","))
    kept = [node for node in scheduler.nodes.expand(options.pop("exclude")) if node not in tried]
    return options | ({"exclude": ",".join(kept)} if kept else {})


def read_job_stop(job: Job | None) -> ChainEnd | None:
    """The end of the chain that the comment of a job records; None without one. See `note_stop_in_jobs`."""
    return ChainEnd("stopped", f"stopped by {job.stopped_by}") if job is not None and job.stopped_by else None


def record_cancelled_successor(attempt: Attempt, scheduler: Scheduler) -> SuccessorJob | None:
    """The recorded successor, if somebody has cancelled it: noted, since a scheduler forgets its jobs after a while.

    Raises SchedulerError.
    """
    known = SuccessorJob.read(attempt.successor)
    if known is None or known.cancelled:
        return known
    if known.job_id == scheduler.current_job_id():
        return None  # it is the one that asks
    job = scheduler.query(known.job_id)
    if job is None or job.state != "CANCELLED":
        return None
    noted = replace(known, cancelled=True, cancelled_by=scheduler.cancelled_by(known.job_id))
    try:
        noted.write(attempt.successor)
    except OSError as error:
        log_line(f"{attempt.successor.name} not written: {error}")
    return noted


def end_by_cancelled_successor(attempt: Attempt, scheduler: Scheduler) -> ChainEnd | None:
    """The end of the chain if somebody cancelled the job behind this attempt; else None. Raises SchedulerError."""
    cancelled = record_cancelled_successor(attempt, scheduler)
    if cancelled is None:
        return None
    by = f" by {cancelled.cancelled_by}" if cancelled.cancelled_by else ""
    return ChainEnd("stopped", f"the successor, job {cancelled.job_id}, was cancelled{by}")


def continue_chain(
    run: Run, plan: Plan, scheduler: Scheduler, attempt: Attempt, *, own: str, delay: int
) -> ChainEnd | None:
    """Ensure that exactly one job follows, not before `delay` seconds; or return the end of the chain.

    What a person did to the queue stands: a job that was cancelled is not replaced, one that is held stays held.
    Raises SchedulerError where nothing could be queued.
    """
    if (stopped := read_job_stop(scheduler.query(own))) is not None:
        return stopped
    if plan.mode == "requeue":
        cancelled = end_by_cancelled_successor(
            attempt, scheduler
        )  # where another job was to take the place of this one
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
    started = attempt.read_begin()
    try:
        ensure_successor(
            run, plan, scheduler, attempt, own=own, options=started.options if started else {}, delay=delay
        )
    except SchedulerError as error:  # a limit of submitted jobs, say: this one does not need a second one
        if pending_jobs(plan, scheduler, own=own):  # it was queued all the same
            return None
        log_line(f"no job could be queued behind this one: {error.message}")
        requeue_job(run, plan, scheduler, attempt, own=own, delay=delay)
    return None


def requeue_job(run: Run, plan: Plan, scheduler: Scheduler, attempt: Attempt, *, own: str, delay: int) -> str:
    """Queue the running job again under its id, with the nodes that it then can have; return the id that goes on.

    That is another job's where this one could have no fewer nodes, and so many are not up. Whoever asks again hears of
    the same one: in front of it this one would wait, and hold it up. Raises SchedulerError.
    """
    if other := _replacement_of(plan, scheduler, attempt, own):
        return other
    try:
        few = excluded_nodes.requeue_node_count(run, plan, scheduler, own)
    except SchedulerError as error:
        log_line(f"with how many nodes job {own} may start is not known: {error.message}")
        few = None
    if few is not None and excluded_nodes.would_wait_for_nodes(run, few):
        if cancelled := end_by_cancelled_successor(attempt, scheduler):  # meanwhile: for the next try of `end`
            raise SchedulerError(cancelled.reason)
        try:
            return ensure_replacement(run, plan, scheduler, attempt, own=own, delay=delay)
        except SchedulerError as error:
            if found := pending_jobs(plan, scheduler, own=own):  # it was queued all the same, or by another agent
                return found[0].id
            log_line(
                f"no job can take the place of job {own}, which may wait for nodes that are not up: {error.message}"
            )
    log_line(f"job {own} is queued again, not before {delay} s from now")
    scheduler.requeue(own, delay=delay, few=few)
    return own


def ensure_replacement(run: Run, plan: Plan, scheduler: Scheduler, attempt: Attempt, *, own: str, delay: int) -> str:
    """See to it that another job goes on than `own`, which has lost nodes; return its id. Raises SchedulerError.

    Of such a job Slurm 22.05 changes nothing any more, so that it waits for as many nodes as before.
    """
    started = attempt.read_begin()
    for job in pending_jobs(plan, scheduler, own=own)[:1]:  # perhaps Slurm did not answer when the attempt ended
        _adapt_pending_job(run, plan, scheduler, job.id, delay=0)
    job_id = ensure_successor(
        run, plan, scheduler, attempt, own=own, options=started.options if started else {}, delay=delay
    )
    log_line(
        f"job {job_id} goes on in the place of job {own}, which has lost a node and would wait for as many as before"
    )
    return job_id


def cancel_replaced_job(attempt: Attempt, scheduler: Scheduler, *, own: str, job_id: str) -> None:
    """Cancel the job `own`, in whose place another one goes on.

    That is on record first: the next `begin` would take it for a person's wish. Raises SchedulerError and OSError.
    """
    write_atomic(attempt.made_place, job_id)
    scheduler.cancel(own)


def _replacement_of(plan: Plan, scheduler: Scheduler, attempt: Attempt, own: str) -> str | None:
    """The job that has taken the place of `own` already; where that queues itself again, any that waits."""
    if attempt.made_place.exists():
        return attempt.made_place.read_text()
    found = pending_jobs(plan, scheduler, own=own) if plan.mode == "requeue" else []
    return found[0].id if found else None


def _adapt_pending_job(run: Run, plan: Plan, scheduler: Scheduler, job_id: str, delay: int) -> None:
    """Let the waiting job start later, and without the nodes that are bad now. What fails is said and left."""
    try:
        if delay:
            scheduler.postpone(job_id, delay=delay)
            log_line(f"job {job_id} does not start before {delay} s from now")
        excluded_nodes.update_pending_job_nodes(run, plan, scheduler, job_id)
    except SchedulerError as error:
        log_line(f"job {job_id} stays as it is: {error.message}")
