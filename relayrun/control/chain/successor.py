"""The job behind this one: whether one waits, how one is queued, and what a person did to it.

Only a job of this chain that is pending is a successor. One that still ends, because its epilog takes long or a task
of it cannot be killed, is gone with its node and carries nothing on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from relayrun.control.chain import fallback, next_nodes
from relayrun.control.log import log
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import Successor
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import RESERVATION_GONE, Job, Scheduler
from relayrun.errors import SchedulerError
from relayrun.files import write_atomic


def waiting(plan: Plan, scheduler: Scheduler, *, own: str) -> list[Job]:
    """The chain's pending jobs but for `own`, the one that this runs in. Raises SchedulerError."""
    return [job for job in scheduler.jobs(plan) if job.id != own and job.waits]


def ensure(
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
    found = waiting(plan, scheduler, own=own)
    if found:
        job_id = found[0].id
    else:
        wanted = next_nodes.options_for(run, plan, scheduler, options)
        try:
            job_id = scheduler.submit(plan, run.job_script, options=wanted, delay=delay)
        except SchedulerError:  # a limit of submitted jobs may leave room for one behind this one, not for two
            if not fallback.withdraw(plan, scheduler) or waiting(plan, scheduler, own=own):
                raise
            job_id = scheduler.submit(plan, run.job_script, options=wanted, delay=delay)
        log(f"queued job {job_id} behind this one" + (f", not before {delay} s from now" if delay else ""))
    for job in found[1:]:  # an order to queue one whose answer was lost, and then another
        cancel(scheduler, job)
    try:
        Successor(job_id=job_id, time=time.time()).write(attempt.successor)
        attempt.retry_successor.unlink(missing_ok=True)
    except OSError as error:  # it is queued; whether somebody cancels it will not be known
        log(f"{attempt.successor.name} not written: {error}")
    fallback.put_behind(run, plan, job_id, options=options)
    return job_id


def queue_first(run: Run, plan: Plan, scheduler: Scheduler) -> str:
    """Queue the first job of a prepared run, and a fallback job behind it; return its id. Raises SchedulerError."""
    evaluation = run.evaluation_script if run.evaluation_policy.exists() else None
    job_id = scheduler.submit_first(plan, run.job_script, evaluation)
    fallback.put_behind(run, plan, job_id, options=plan.sbatch_options)
    return job_id


def cancel(scheduler: Scheduler, job: Job) -> None:
    """Cancel one queued job by its id. Raises SchedulerError."""
    scheduler.cancel(job.id)
    log(f"cancelled queued job {job.id}")


def own_options(job: Job, scheduler: Scheduler) -> dict[str, str]:
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


def stopped_words(job: Job | None) -> str | None:
    """Why the chain of a job has ended, where its comment alone says it; see `chain.cancel`."""
    return f"stopped by {job.stopped_by}" if job is not None and job.stopped_by else None


def note_cancelled(attempt: Attempt, scheduler: Scheduler) -> Successor | None:
    """The recorded successor, if somebody has cancelled it: noted, since a scheduler forgets its jobs after a while.

    Raises SchedulerError.
    """
    known = Successor.read(attempt.successor)
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
        log(f"{attempt.successor.name} not written: {error}")
    return noted


def cancelled_words(attempt: Attempt, scheduler: Scheduler) -> str | None:
    """Why the chain ends with this attempt, where somebody cancelled the job behind it. Raises SchedulerError."""
    cancelled = note_cancelled(attempt, scheduler)
    if cancelled is None:
        return None
    by = f" by {cancelled.cancelled_by}" if cancelled.cancelled_by else ""
    return f"the successor, job {cancelled.job_id}, was cancelled{by}"


def go_on(run: Run, plan: Plan, scheduler: Scheduler, attempt: Attempt, *, own: str, delay: int) -> str | None:
    """See to it that exactly one job follows, not before `delay` seconds; return why none may, where that is so.

    What a person did to the queue stands: a job that was cancelled is not replaced, one that is held stays held.
    Raises SchedulerError where nothing could be queued.
    """
    if (stopped := stopped_words(scheduler.query(own))) is not None:
        return stopped
    if plan.mode == "requeue":
        cancelled = cancelled_words(attempt, scheduler)  # where another job was to take the place of this one
        if cancelled is None:
            come_back(run, plan, scheduler, attempt, own=own, delay=delay)
        return cancelled
    found = waiting(plan, scheduler, own=own)
    if found:
        if found[0].state == RESERVATION_GONE:
            return f"the successor, job {found[0].id}, never starts: its reservation was deleted"
        _adapt(run, plan, scheduler, found[0].id, delay)
        return None
    cancelled = cancelled_words(attempt, scheduler)
    if cancelled is not None:
        return cancelled
    started = attempt.read_begin()
    try:
        ensure(run, plan, scheduler, attempt, own=own, options=started.options if started else {}, delay=delay)
    except SchedulerError as error:  # a limit of submitted jobs, say: this one does not need a second one
        if waiting(plan, scheduler, own=own):  # it was queued all the same
            return None
        log(f"no job could be queued behind this one: {error.message}")
        come_back(run, plan, scheduler, attempt, own=own, delay=delay)
    return None


def come_back(run: Run, plan: Plan, scheduler: Scheduler, attempt: Attempt, *, own: str, delay: int) -> str:
    """Queue the running job again under its id, with the nodes that it then can have; return the id that goes on.

    That is another job's where this one could have no fewer nodes, and so many are not up. Whoever asks again hears of
    the same one: in front of it this one would wait, and hold it up. Raises SchedulerError.
    """
    if other := _in_its_place(plan, scheduler, attempt, own):
        return other
    try:
        few = next_nodes.of_own_job(run, plan, scheduler, own)
    except SchedulerError as error:
        log(f"with how many nodes job {own} may start is not known: {error.message}")
        few = None
    if few is not None and next_nodes.too_few(run, few):
        if cancelled := cancelled_words(attempt, scheduler):  # meanwhile: for the next try of `end`
            raise SchedulerError(cancelled)
        try:
            return another(run, plan, scheduler, attempt, own=own, delay=delay)
        except SchedulerError as error:
            if found := waiting(plan, scheduler, own=own):  # it was queued all the same, or by another agent
                return found[0].id
            log(f"no job can take the place of job {own}, which may wait for nodes that are not up: {error.message}")
    log(f"job {own} is queued again, not before {delay} s from now")
    scheduler.requeue(own, delay=delay, few=few)
    return own


def another(run: Run, plan: Plan, scheduler: Scheduler, attempt: Attempt, *, own: str, delay: int) -> str:
    """See to it that another job goes on than `own`, which has lost nodes; return its id. Raises SchedulerError.

    Of such a job Slurm 22.05 changes nothing any more, so that it waits for as many nodes as before.
    """
    started = attempt.read_begin()
    for job in waiting(plan, scheduler, own=own)[:1]:  # perhaps Slurm did not answer when the attempt ended
        _adapt(run, plan, scheduler, job.id, delay=0)
    job_id = ensure(run, plan, scheduler, attempt, own=own, options=started.options if started else {}, delay=delay)
    log(f"job {job_id} goes on in the place of job {own}, which has lost a node and would wait for as many as before")
    return job_id


def make_place(attempt: Attempt, scheduler: Scheduler, *, own: str, job_id: str) -> None:
    """Cancel the job `own`, in whose place another one goes on.

    That is on record first: the next `begin` would take it for a person's wish. Raises SchedulerError and OSError.
    """
    write_atomic(attempt.made_place, job_id)
    scheduler.cancel(own)


def _in_its_place(plan: Plan, scheduler: Scheduler, attempt: Attempt, own: str) -> str | None:
    """The job that has taken the place of `own` already; where that queues itself again, any that waits."""
    if attempt.made_place.exists():
        return attempt.made_place.read_text()
    found = waiting(plan, scheduler, own=own) if plan.mode == "requeue" else []
    return found[0].id if found else None


def _adapt(run: Run, plan: Plan, scheduler: Scheduler, job_id: str, delay: int) -> None:
    """Let the waiting job start later, and without the nodes that are bad now. What fails is said and left."""
    try:
        if delay:
            scheduler.postpone(job_id, delay=delay)
            log(f"job {job_id} does not start before {delay} s from now")
        next_nodes.adapt(run, plan, scheduler, job_id)
    except SchedulerError as error:
        log(f"job {job_id} stays as it is: {error.message}")
