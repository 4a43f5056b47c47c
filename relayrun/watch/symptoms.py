"""Symptoms of a chain that needs a person, found in a run's records and the scheduler's answer.

| symptom | event | condition |
|---|---|---|
| gone | stopped | the chain has not ended, and no job that continues it is queued or running |
| held | stopped | a job is held, or its pending reason never clears |
| budget | stopped | a job waits for its account's budget |
| stuck-... | stopped | a run of a sweep, or a stage, waits for an event that never comes |
| silent | hang | a job runs, and its ranks have been silent for longer than its supervisor allows |
| unbegun | hang | a job runs, and no attempt has begun in it |
| completing-..., suspended-... | hang | a job has neither run nor ended for an hour |
| saves | stalled | training is several saves ahead of the newest checkpoint |
| stalled-... | stalled | six hours of jobs without a checkpoint, in a run without notices |
| unwritable | disk | no file can be written: the disk or a quota is full, or the file system is broken |
| mirror | disk | checkpoints have waited for their copy for six hours of a job, or for an hour and a pass says why |
| quota-... | disk | a quota has room for few more checkpoints than are kept |
| room | disk | the disk has room for few more checkpoints, while no job of the run is at work |

The caller decides how long a symptom must last before it counts. Uses the standard library alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from relayrun.control.chain.watch import stall_limit
from relayrun.control.failure_signatures import classify
from relayrun.control.notify.events import low_disk_text, mirror_notice, quota_notice_id, stalled_notice
from relayrun.control.notify.notices import NoticePolicy
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import slurm_states
from relayrun.control.scheduler.base import Job
from relayrun.files import read_json_lines_backwards, write_error
from relayrun.watch.status.run_status import RunStatus
from relayrun.watch.status.summary import blocked_jobs
from relayrun.watch.text import format_seconds

SAVES = 3
"""Save intervals by which training may be ahead of the newest checkpoint; one save at most is under way."""
ENDING_SECONDS = 300.0
"""Time that a live supervisor needs to end hung ranks, or to record their end."""
START_SECONDS = 600.0
"""Time that a job needs to begin, beyond its ranks' start timeout: its supervisor waits so long for Slurm."""
CLOCK_TOLERANCE_SECONDS = 60.0
"""Largest difference between the clocks of nodes."""
CHECKPOINTS = 2
"""Checkpoints that the disk should have room for, if the run's `notify` does not say."""
TRANSIENT_SECONDS = 3600.0
"""Time that a job may neither run nor end: nodes are cleaned up within minutes."""
TRANSIENT_STATES = ("COMPLETING", "CONFIGURING", "STOPPED", "SUSPENDED")
"""States of a job that has its nodes and does not run."""
NO_PROGRESS_SECONDS = 21600.0
"""Time that jobs may run without a new checkpoint, if the run's `notify` does not say."""


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """A problem that a person should know of."""

    event: Literal["stopped", "hang", "stalled", "disk"]
    """Event of the notice that reports it."""
    cause: str
    """Identifies the problem as long as it lasts."""
    reason: str
    """The problem in one line."""
    go_on: str | None = None
    """The command that solves it, if a command does."""
    notice: str | None = None
    """Id of the notice, if a job of the chain may write it as well."""
    patience: float = 0.0
    """Seconds that the symptom must last before it counts, if longer than the caller waits anyway."""
    release: str = ""
    """Id of the job that may start again if it is released; empty if that is for a person to decide."""


def find_symptoms(
    run: Run, plan: Plan, status: RunStatus, *, now: float, running_since: float | None, policy: NoticePolicy | None
) -> list[Symptom]:
    """Return the symptoms of a chain that has not ended.

    Args:
        status: the status at `now`, in seconds since 1970.
        running_since: time from which every check saw the current job running; None if no job runs.
        policy: events that are reported; a job at work reports its own by notices. None: nobody is notified.
    """
    found = [*_gone(run, status), *_waiting(status)]
    full = _write_errors(run, status)
    room = CHECKPOINTS if policy is None else policy.disk_checkpoints
    found += [*_quotas_used_up(status, now, room), *full]
    at_work = is_at_work(run, status, running_since)
    untold = status.has_job and (policy is None or not at_work)
    if untold and (words := low_disk_text(run, checkpoints=room)):
        found.append(Symptom(event="disk", cause="room", reason=words, notice=f"disk-{status.attempt or 0:04}"))
    if running_since is not None and not full:  # ranks that cannot write are silent, too
        found += _at_work(run, plan, now) if at_work else _not_started(run, plan, status, now, running_since)
        if at_work and (words_of := mirror_notice(run, now)):
            found.append(Symptom(event="disk", cause="mirror", reason=words_of[1], notice=words_of[0]))
        since = run.plan.stat().st_mtime
        if at_work and policy is None and (words_of := stalled_notice(run, since, NO_PROGRESS_SECONDS, now)):
            found.append(Symptom(event="stalled", cause=words_of[0], reason=words_of[1]))
    return found


def is_at_work(run: Run, status: RunStatus, running_since: float | None) -> bool:
    """True if the running job's attempt goes on and its ranks gave a sign since the job began, also after a requeue."""
    job, attempt = running_job(status), run.newest_begun()
    begin = None if attempt is None else attempt.read_begin()
    if job is None or running_since is None or attempt is None or begin is None or begin.job_id != job.id:
        return False
    return _last_sign(attempt, begin) >= running_since - CLOCK_TOLERANCE_SECONDS and attempt.read_end() is None


def _last_sign(attempt: Attempt, begin: AttemptStart) -> float:
    """Time of the attempt's last heartbeat, begin or end, in seconds since 1970."""
    end = attempt.read_end()
    ended = begin.start_time if end is None else end.end_time
    return max([begin.start_time, ended, *(beat.time for beat in attempt.read_heartbeats())])


def running_job(status: RunStatus) -> Job | None:
    """Return the chain's job in the state RUNNING; suspended, completing and pending jobs do not count."""
    return next((job for job in status.jobs if job.state == "RUNNING"), None)


def _quotas_used_up(status: RunStatus, now: float, room: int) -> Iterator[Symptom]:
    for each in status.quotas:
        if status.has_job and each.is_scarce(room):
            words = f"{each.words()}: free some space, or lower checkpoint.keep_last"
            notice = quota_notice_id(each, now)
            yield Symptom(event="disk", cause=f"quota-{each.name}", reason=words, notice=notice)


def _gone(run: Run, status: RunStatus) -> Iterator[Symptom]:
    if status.state == "failed" and status.stop is None:
        submitted = int(run.plan.stat().st_mtime)  # a chain that is resubmitted may die again
        cause = f"gone-{status.attempt or 0:04}-{submitted}"
        words = "; ".join(filter(None, [status.broken or "nothing goes on with it", status.why]))
        yield Symptom(event="stopped", cause=cause, reason=words)


def _waiting(status: RunStatus) -> Iterator[Symptom]:
    for job in status.jobs:
        reason = status.pending.get(job.id)
        kind, show = slurm_states.reason_of(reason).kind, f"scontrol show job {job.id}"
        for words, mend in blocked_jobs(Run(Path(status.path)), [job], status.pending):
            release = job.id if slurm_states.is_held_after_launch(job.state, reason) else ""
            yield Symptom(event="stopped", cause=f"held-{job.id}", reason=words, go_on=mend, release=release)
        if slurm_states.is_blocked(job.state, reason):
            continue
        if job.waits and kind == "budget":
            words = f"job {job.id} waits until its account has time to spend again: {reason}"
            yield Symptom(event="stopped", cause=f"budget-{job.id}", reason=words, go_on=show)
        elif slurm_states.is_unknown_state(job.state) or (job.waits and kind == "unknown"):
            said = f"{job.state.lower()}, {reason or 'no reason'}"
            words = f"relayrun does not know what Slurm says of job {job.id}: {said}"
            yield Symptom(event="hang", cause=f"unknown-{job.id}", reason=words, go_on=show, patience=TRANSIENT_SECONDS)
        elif job.state in TRANSIENT_STATES:
            words = f"job {job.id} has been {job.state} for more than an hour, and nothing goes on with the chain"
            cause = f"{job.state.lower()}-{job.id}"
            yield Symptom(event="hang", cause=cause, reason=words, go_on=show, patience=TRANSIENT_SECONDS)


def _write_errors(run: Run, status: RunStatus) -> list[Symptom]:
    folder = run.checkpoints if run.checkpoints.is_dir() else run.path
    error = write_error(folder) if status.has_job else None
    if error is None:
        return []
    words = f"nothing can be written to {folder}: {os.strerror(error.errno) if error.errno else error}"
    known = classify(words)
    return [Symptom(event="disk", cause="unwritable", reason=words, go_on=known.advice if known else None)]


def _not_started(run: Run, plan: Plan, status: RunStatus, now: float, running_since: float) -> Iterator[Symptom]:
    job, attempt = running_job(status), run.newest_begun()
    begin = None if attempt is None else attempt.read_begin()
    since = running_since
    if job is not None and attempt is not None and begin is not None and begin.job_id == job.id:
        since = max(since, _last_sign(attempt, begin))  # the attempt has ended, its job soon does
    if job is not None and now - since > max(plan.chain.start_timeout, plan.chain.hang_timeout) + START_SECONDS:
        words = f"job {job.id} has run for {format_seconds(now - since)} without a sign of life"
        yield Symptom(event="hang", cause=f"unbegun-{job.id}", reason=words)


def _at_work(run: Run, plan: Plan, now: float) -> Iterator[Symptom]:
    attempt = run.newest_begun()
    begin = None if attempt is None else attempt.read_begin()
    if attempt is None or begin is None:
        return
    beats = attempt.read_heartbeats()
    sign = _last_sign(attempt, begin)
    limit = stall_limit(beats, plan.chain) + ENDING_SECONDS
    if now - sign > limit:
        where = f" in {max(beats, key=lambda beat: beat.time).phase}" if beats else ""
        words = f"no sign of life for {format_seconds(now - sign)}{where}, and nobody ends it: job {begin.job_id}"
        yield Symptom(event="hang", cause=f"silent-{attempt.number:04}", reason=f"{words} on {begin.nodes}")
        return
    newest = next((commit.iteration for commit in attempt.commits_backwards()), None)
    base = begin.base_iteration if newest is None else newest
    iteration = max((beat.iteration for beat in beats), default=0)
    if plan.save_interval is None or iteration - base < SAVES * plan.save_interval:
        return
    words = f"no checkpoint since iteration {base}, and training is at {iteration}: one is due every"
    words += f" {plan.save_interval} iterations"
    for _, line in islice(read_json_lines_backwards(attempt.failed_saves), 1):
        words += f"; the last save failed: {line.get('error')}"
    yield Symptom(event="stalled", cause=f"saves-{attempt.number:04}-{base}", reason=words)
