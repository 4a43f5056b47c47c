"""The end of a chain at once: what `relayrun cancel` does, and a drill that is stopped."""

from __future__ import annotations

import contextlib

from relayrun.chain import fallback
from relayrun.errors import RunDirError, SchedulerError, whose
from relayrun.rundir.lineage import Lineage
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.rundir.stop import stop_reason, write_stop
from relayrun.scheduler.base import Scheduler


def cancel(run: Run, scheduler: Scheduler, *, user: str) -> str:
    """End the chain and cancel its jobs, without waiting for a checkpoint; return what was done, in words.

    Raises RunDirError where this user may not write STOP or this is no run, SchedulerError where a job stays.
    """
    plan = Plan.load(run)
    ended = stop_reason(run)
    if ended is None:
        try:
            write_stop(run, f"cancelled by {user}")
        except PermissionError:
            hint = "`relayrun stop` asks the job that runs to save and leave"
            raise RunDirError(f"you may not write here: {whose(run.path)}", where=run.stop, hint=hint) from None
    withdrawn: list[str] = []
    with contextlib.suppress(SchedulerError):  # it finds STOP; it may be a former owner's
        withdrawn = fallback.withdraw(plan, scheduler, anyone=True)
    jobs = scheduler.jobs(plan, anyone=True)
    for job in sorted(jobs, key=lambda job: not job.waits):  # or one that waits would start
        scheduler.cancel(job.id)
    said = f"cancelled {', '.join(f'{job.id} ({job.state.lower()})' for job in jobs)}" if jobs else "no job was there"
    said += f", and the fallback job {', '.join(withdrawn)}" if withdrawn else ""
    newest = next(Lineage(run).backwards(), None)
    saved = f"the newest checkpoint is that of iteration {newest.commit.iteration}" if newest else "no checkpoint"
    return f"the chain has ended: {stop_reason(run)}; {said}; {saved}"
