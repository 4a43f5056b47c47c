"""Which job of a chain died that cannot go on, how and where, in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import RESERVATION_GONE
from relayrun.control.scheduler.history import JobEnd
from relayrun.watch.status.queue import QueueStatus


def explain_broken_chain(
    run: Run, plan: Plan, queue: QueueStatus, begin: AttemptStart | None, last_end: AttemptEnd | None
) -> str:
    """Return which job died, how and where. `begin` and `last_end` are the newest attempt's."""
    if queue.fallback_jobs:
        waits = queue.fallback_jobs[0].id
        died = explain_broken_chain(run, plan, replace(queue, fallback_jobs=[]), begin, last_end)
        return f"{died}; the fallback job {waits} never starts: {queue.reasons[waits]}"
    job = queue.last_job
    if queue.abandoned:
        return f"job {', '.join(queue.abandoned)} waits, and nobody runs the queue: the terminal that did has gone"
    if gone := [job.id for job in queue.jobs if job.state == RESERVATION_GONE]:
        return f"job {', '.join(gone)} never starts: its reservation was deleted; `relayrun cancel` takes it away"
    newest = begin if begin is not None and begin.attempt > plan.submitted_after_attempt else None
    if newest is None or (job is not None and job.id != newest.job_id and not _ended_before(job, newest)):
        if job is None:
            return "nothing is queued, and no job has begun since the last submit; the scheduler remembers none"
        logs = [folder / f"{plan.job_name}-{job.id}.err" for folder in (Path(plan.log_folder), run.path)]
        log = next((path for path in logs if path.is_file()), None)
        where = f"its log: {log}" if log is not None else f"it left no log in {plan.log_folder}"
        return f"job {job.id} ({describe_job_end(job)}) died before it began; nothing is queued behind it; {where}"
    how = ", ".join(
        filter(
            None,
            [
                f"ended ({last_end.cause}: {last_end.reason})" if last_end is not None else "is gone without an end",
                describe_job_end(job) if job is not None and job.id == newest.job_id else f"on {newest.nodes}",
            ],
        )
    )
    log_words = f"; its log: {newest.log}" if newest.log is not None else ""
    return f"attempt {newest.attempt}, job {newest.job_id}, {how}; nothing is queued behind it{log_words}"


def _ended_before(job: JobEnd, begin: AttemptStart) -> bool:
    return job.end_time is not None and job.end_time < begin.start_time


def describe_job_end(job: JobEnd) -> str:
    """Return how a job ended, without its id."""
    code = f"exit code {job.exit_code}" if job.exit_code.isdecimal() else job.exit_code
    return ", ".join(filter(None, [job.state, code, f"on {job.nodes}" if job.nodes else "", job.reason]))
