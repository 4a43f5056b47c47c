"""What shows from outside that a chain needs a person: from a run's records and what the scheduler answered.

| symptom | event | when |
|---|---|---|
| gone | stopped | the chain has not ended, and nothing that would go on with it is queued or runs |
| held | stopped | a job is held, or waits for what never comes |
| budget | stopped | a job waits until its account has more time to spend |
| stuck-... | stopped | a run of a sweep, or a stage, waits for what never comes |
| silent | hang | a job runs, and its ranks have given no sign of life for longer than its supervisor allows |
| unbegun | hang | a job runs, and no attempt has begun in it |
| completing-..., suspended-... | hang | a job has neither run nor ended for an hour |
| saves | stalled | training is several saves beyond the newest checkpoint |
| stalled-... | stalled | no checkpoint for six hours of jobs, where nobody is told by notices |
| unwritable | disk | nothing can be written: the disk or a quota is full, or the file system is broken |
| mirror | disk | checkpoints wait for their copy in the second place for six hours of a job |
| purge-... | disk | the site would remove the newest checkpoint, or data of a chain that goes on, within a week |
| quota-... | disk | a quota, or the disk, will be full within a week at the pace at which it fills |
| room | disk | the disk has room for few more checkpoints, while no job of the run is at work |

One look proves little: who asks decides how long a symptom must be seen. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Literal

from relayrun.control.chain.watch import stall_limit
from relayrun.control.notify.events import low_disk_text, quota_notice_id, stalled_notice
from relayrun.control.notify.notices import NoticePolicy
from relayrun.control.rundir import mirror
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.storage_limits import DAY_SECONDS, PurgeForecast
from relayrun.control.scheduler import job_history
from relayrun.control.scheduler.base import Job
from relayrun.files import read_lines_backwards, temporary_prefix
from relayrun.watch.status.run_status import RunStatus

SAVES = 3
"""Training that is so many saves beyond the newest checkpoint has lost its saves; one is under way at most."""
ENDING_SECONDS = 300.0
"""What a supervisor that lives needs to end ranks that hang, or to write down how they ended."""
START_SECONDS = 600.0
"""What a job needs to begin, beyond the time that its ranks have to start: its supervisor waits so long for Slurm."""
CLOCK_TOLERANCE_SECONDS = 60.0
"""How much the clocks of nodes may differ."""
CHECKPOINTS = 2
"""The disk should have room for so many more checkpoints, where a run has no `notify` that says it."""
NOT_COPIED_SECONDS = 21600.0
"""For so long may a checkpoint wait for its copy while a job is at work that could make it."""
TRANSIENT_SECONDS = 3600.0
"""For so long may a job neither run nor end: nodes are cleaned up within minutes."""
TRANSIENT_STATES = ("COMPLETING", "CONFIGURING", "STOPPED", "SUSPENDED")
"""States in which a job has its nodes, and nothing of it runs."""
NO_PROGRESS_SECONDS = 21600.0
"""For so long may jobs run without a new checkpoint, where a run has no `notify` that says it."""


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """Something that a person should know of."""

    event: Literal["stopped", "hang", "stalled", "disk"]
    """What kind of notice tells it."""
    cause: str
    """The same for the same trouble, as long as it lasts."""
    reason: str
    """What is wrong, in one line."""
    go_on: str | None = None
    """The command that mends it, where it is one."""
    notice: str | None = None
    """The id of the notice, where a job of the chain may have written it as well."""
    patience: float = 0.0
    """Seconds for which it must be seen before it counts, where that is longer than who asks waits anyway."""


def find_symptoms(
    run: Run, plan: Plan, status: RunStatus, *, now: float, running_since: float | None, policy: NoticePolicy | None
) -> list[Symptom]:
    """Return what is wrong with a chain that has not ended.

    Args:
        status: as it is now, at `now`, in seconds since 1970.
        running_since: from when on the job that runs now was seen running at each look; None where none does.
        policy: who is told of what; what a job at work tells is left to the notices that it writes. None: nobody.
    """
    found = [
        *_gone(run, status),
        *_waiting(status),
        *_stuck_in_transient_state(status),
        *purged_soon(status.purges, now=now),
    ]
    found += _full_soon(status, now)
    full = _write_errors(run, status)
    found += full
    at_work = is_at_work(run, status, running_since)
    if status.state in ("running", "queued") and (policy is None or not at_work):
        found += _room(run, status, CHECKPOINTS if policy is None else policy.disk_checkpoints)
    if running_since is not None and not full:  # where nothing can be written, silence says little
        found += _at_work(run, plan, now) if at_work else _not_started(run, plan, status, now, running_since)
        if at_work and policy is None:
            found += _stalled(run, now)
        if at_work:
            found += _not_copied(run, now)
    return found


def is_at_work(run: Run, status: RunStatus, running_since: float | None) -> bool:
    """Whether the job that runs has begun an attempt that has not ended, and has given a sign of life since it runs.

    A job that Slurm starts a second time has the id of the attempt that it lost.
    """
    job, attempt = running_job(status), run.newest_begun()
    begin = None if attempt is None else attempt.read_begin()
    if job is None or running_since is None or attempt is None or begin is None or begin.job_id != job.id:
        return False
    return _last_sign(attempt, begin) >= running_since - CLOCK_TOLERANCE_SECONDS and attempt.read_end() is None


def _last_sign(attempt: Attempt, begin: AttemptStart) -> float:
    """When the attempt last gave a sign of life, in seconds since 1970."""
    end = attempt.read_end()
    ended = begin.start_time if end is None else end.end_time
    return max([begin.start_time, ended, *(beat.time for beat in attempt.read_heartbeats())])


def running_job(status: RunStatus) -> Job | None:
    """The job of a chain that runs now; one that is suspended, completes or waits is none."""
    return next((job for job in status.jobs if job.state == "RUNNING"), None)


def purged_soon(purges: Sequence[PurgeForecast], *, now: float) -> Iterator[Symptom]:
    """Yield what the site would remove within a week."""
    for purge in purges:
        if purge.is_soon(now):
            cause = f"purge-{purge.what}-{int(purge.time // DAY_SECONDS)}"
            words = f"{purge.words(now)}: read it, or copy it elsewhere (checkpoint.mirror, relayrun runs archive)"
            yield Symptom(event="disk", cause=cause, reason=words)


def never_starts(run: Run, why: str, *, whole: bool, others: int) -> Symptom:
    """What holds up a run of a campaign for good. `whole`: all that wait; `others`: so many besides, by the same."""
    words = f"nothing more of its campaign begins: {why}" if whole else f"it does not begin: {why}"
    words += f" ({others} more of its campaign do not either)" if others else ""
    cause = f"stuck-{hashlib.sha256(why.encode()).hexdigest()[:8]}"
    return Symptom(event="stopped", cause=cause, reason=words, go_on=f"relayrun status {run.path}")


def _full_soon(status: RunStatus, now: float) -> Iterator[Symptom]:
    for each in status.quotas:
        if status.state in ("running", "queued") and each.is_soon(now):
            words = f"{each.words(now)}: free some space, or lower checkpoint.keep_last"
            notice = quota_notice_id(each, now)
            yield Symptom(event="disk", cause=f"quota-{each.name}", reason=words, notice=notice)


def _gone(run: Run, status: RunStatus) -> Iterator[Symptom]:
    if status.state == "broken":
        submitted = int(run.plan.stat().st_mtime)  # a chain that is submitted again may die again
        cause = f"gone-{status.attempt or 0:04}-{submitted}"
        yield Symptom(event="stopped", cause=cause, reason=status.broken or "nothing goes on with it")


def _waiting(status: RunStatus) -> Iterator[Symptom]:
    for job in status.jobs:
        reason = status.pending.get(job.id)
        if not job.waits or reason is None:
            continue
        if job_history.never_starts(reason):
            held = "hel" in reason.lower() or "hold" in reason.lower()
            words = f"job {job.id} waits, and never starts unless a person changes something: {reason}"
            go_on = f"scontrol release {job.id}" if held else f"scontrol show job {job.id}"
            yield Symptom(event="stopped", cause=f"held-{job.id}", reason=words, go_on=go_on)
        elif job_history.waits_for_budget(reason):
            words = f"job {job.id} waits until its account has time to spend again: {reason}"
            yield Symptom(event="stopped", cause=f"budget-{job.id}", reason=words, go_on=f"scontrol show job {job.id}")


def _stuck_in_transient_state(status: RunStatus) -> Iterator[Symptom]:
    for job in status.jobs:
        if job.state in TRANSIENT_STATES:
            words = f"job {job.id} has been {job.state} for more than an hour, and nothing goes on with the chain"
            cause, go_on = f"{job.state.lower()}-{job.id}", f"scontrol show job {job.id}"
            yield Symptom(event="hang", cause=cause, reason=words, go_on=go_on, patience=TRANSIENT_SECONDS)


def _write_errors(run: Run, status: RunStatus) -> list[Symptom]:
    if status.state not in ("running", "queued"):
        return []
    folder = run.checkpoints if run.checkpoints.is_dir() else run.path
    error = write_error(folder)
    if error is None:
        return []
    words = f"nothing can be written to {folder}: {os.strerror(error.errno) if error.errno else error}"
    return [Symptom(event="disk", cause="unwritable", reason=words)]


def write_error(folder: Path) -> OSError | None:
    """Return why no small file can be written into a folder; None where one can: `statvfs` knows no quota."""
    try:
        fd, name = tempfile.mkstemp(dir=folder, prefix=temporary_prefix())
    except OSError as error:
        return error
    try:
        os.write(fd, bytes(4096))
        os.fsync(fd)
        return None
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
            os.unlink(name)


def _room(run: Run, status: RunStatus, checkpoints: int) -> Iterator[Symptom]:
    reason = low_disk_text(run, checkpoints=checkpoints)
    if reason is not None:
        attempt = status.attempt or 0
        yield Symptom(event="disk", cause="room", reason=reason, notice=f"disk-{attempt:04}")


def _not_started(run: Run, plan: Plan, status: RunStatus, now: float, running_since: float) -> Iterator[Symptom]:
    job, attempt = running_job(status), run.newest_begun()
    begin = None if attempt is None else attempt.read_begin()
    since = running_since
    if job is not None and attempt is not None and begin is not None and begin.job_id == job.id:
        since = max(since, _last_sign(attempt, begin))  # it has ended, and its job is about to
    if job is not None and now - since > max(plan.start_timeout, plan.hang_timeout) + START_SECONDS:
        words = f"job {job.id} has run for {_minutes(now - since)} without a sign of life"
        yield Symptom(event="hang", cause=f"unbegun-{job.id}", reason=words)


def _at_work(run: Run, plan: Plan, now: float) -> Iterator[Symptom]:
    attempt = run.newest_begun()
    begin = None if attempt is None else attempt.read_begin()
    if attempt is None or begin is None:
        return
    beats = attempt.read_heartbeats()
    sign = _last_sign(attempt, begin)
    limit = stall_limit(beats, hang_timeout=plan.hang_timeout, start_timeout=plan.start_timeout) + ENDING_SECONDS
    if now - sign > limit:
        where = f" in {max(beats, key=lambda beat: beat.time).phase}" if beats else ""
        words = f"no sign of life for {_minutes(now - sign)}{where}, and nobody ends it: job {begin.job_id}"
        yield Symptom(event="hang", cause=f"silent-{attempt.number:04}", reason=f"{words} on {begin.nodes}")
        return
    newest = next((commit.iteration for commit in attempt.commits_backwards()), None)
    base = begin.base_iteration if newest is None else newest
    iteration = max((beat.iteration for beat in beats), default=0)
    if plan.save_interval is None or iteration - base < SAVES * plan.save_interval:
        return
    words = f"no checkpoint since iteration {base}, and training is at {iteration}: one is due every"
    words += f" {plan.save_interval} iterations"
    for _, line in islice(read_lines_backwards(attempt.failed_saves), 1):
        words += f"; the last save failed: {line.get('error')}"
    yield Symptom(event="stalled", cause=f"saves-{attempt.number:04}-{base}", reason=words)


def _not_copied(run: Run, now: float) -> Iterator[Symptom]:
    attempt = run.newest_begun()
    begin = None if attempt is None else attempt.read_begin()
    if begin is None or mirror.read_mirror_policy(run) is None:
        return
    last = mirror.read_last_pass(run)
    copied = 0 if last is None or last.iteration is None else last.iteration
    newer = takewhile(lambda counted: counted.commit.iteration > copied, Lineage(run).backwards())
    waiting = [counted.commit.time for counted in newer if counted.published]
    if not waiting or now - max(begin.start_time, min(waiting)) <= NOT_COPIED_SECONDS:
        return
    words = (
        f"{len(waiting)} checkpoints wait for their copy in the second place; the newest copy is of {copied or 'none'}"
    )
    why = f": {last.complaint}" if last is not None and last.complaint else ""
    yield Symptom(event="disk", cause=f"mirror-{copied}", reason=words + why)


def _stalled(run: Run, now: float) -> Iterator[Symptom]:
    found = stalled_notice(run, since=run.plan.stat().st_mtime, patience=NO_PROGRESS_SECONDS, now=now)
    if found is not None:
        yield Symptom(event="stalled", cause=found[0], reason=found[1])


def _minutes(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.0f} min"
