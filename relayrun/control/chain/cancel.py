"""The end of a chain by a person: `relayrun cancel`, a drill that is stopped, and `relayrun stop` on a full disk.

A person ends a chain because something is wrong, and that may be the disk. So no end needs a file to be written: Slurm
cancels the jobs, and where STOP cannot be written the order stands in the comments of those that are still there.
"""

from __future__ import annotations

import contextlib

from relayrun.control.chain import fallback
from relayrun.control.rundir.lineage import Lineage
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.stop import stop_reason, write_stop
from relayrun.control.scheduler.base import Scheduler
from relayrun.control.trainers.choose import trainer_of
from relayrun.errors import RunDirError, SchedulerError, describe_owner


def cancel_chain(run: Run, scheduler: Scheduler, *, user: str) -> str:
    """End the chain and cancel its jobs, without waiting for a checkpoint; return what was done, in words.

    Raises RunDirError where this user may not write STOP or this is no run, SchedulerError where a job stays.
    """
    plan, unwritten = Plan.load(run), ""
    try:
        write_stop(run, f"cancelled by {user}")
    except PermissionError:
        hint = "`relayrun stop` asks the job that runs to save and leave"
        raise RunDirError(f"you may not write here: {describe_owner(run.path)}", where=run.stop, hint=hint) from None
    except OSError as error:
        unwritten = note_stop_in_jobs(run, plan, scheduler, error, user=user)
    withdrawn: list[str] = []
    with contextlib.suppress(SchedulerError):  # it finds STOP; it may be a former owner's
        withdrawn = fallback.cancel_fallback_jobs(plan, scheduler, anyone=True)
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
        fallback.cancel_fallback_jobs(plan, scheduler, anyone=True)
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
