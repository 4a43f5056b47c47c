"""The summary of a run, one line of a table of many runs: state, progress, checkpoint, last end.

The records are read from the newest attempt backwards, so the cost does not grow with the age of the run; neither clock
nor scheduler is read. The time left follows from the pace of the last attempts: saved iterations divided by the whole
time of their jobs, without time in the queue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, starmap
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal

from relayrun.control import chain_state
from relayrun.control.rundir import campaign
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage, ReadOnce, ResumePoint, started_attempts_backwards
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptStart, ChainEnd, ChainEndState
from relayrun.control.rundir.restarts import resets_iteration
from relayrun.control.rundir.run import Run, read_stop
from relayrun.control.scheduler import slurm_states
from relayrun.control.scheduler.base import Job, JobEnd
from relayrun.errors import RunDirError
from relayrun.files import read_bytes
from relayrun.leftovers import is_locked
from relayrun.watch.status.cron_check_record import FolderCache, LastCronCheck, last_cron_check
from relayrun.watch.status.queue import QueueStatus

PACE_ATTEMPTS = 5
"""Number of attempts from which the pace is computed."""
RunState = Literal["done", "stopped", "failed", "running", "queued", "blocked", "unknown"]
"""State of a run, in every command and page.

done, stopped, failed: as in STOP; without STOP, a chain of one job (`auto_requeue: false`) has ended as planned (done,
stopped), or no job that continues the chain is queued or running (failed). queued: a job waits, a submit is under way,
or the run's sweep or the stage before it starts it later. blocked: its waiting job never starts unless a person changes
something. unknown: the scheduler did not answer, or hides another user's jobs.
"""
UNFINISHED_STATES = ("running", "queued", "unknown")
"""States in which a job may write into the run's directory, now or later."""
PLANNED_CAUSES = ("done", "saved", "exit")
"""Planned causes of an end: a chain of one job has done its work, and nothing is lost."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """State and progress of a run. Times are seconds since 1970, ages seconds."""

    run: str
    """Name of the run, as project/name."""
    path: str
    state: RunState
    stop: str | None
    """Reason of the chain's end; None if it has not ended."""
    stop_state: ChainEndState | None
    """Kind of the chain's end; None if it has not ended."""
    broken: str | None
    """Job that ended a chain that cannot continue, how and where; None if it can."""
    attempt: int | None
    """Number of the newest attempt; None before the first job began."""
    job_id: str | None
    nodes: str | None
    begin_time: float | None
    pending: dict[str, str]
    """Pending reasons of the scheduler by job id."""
    iteration: int
    total_steps: int | None
    loss: float | None
    """Loss of the last step in nats per token; None before the first step."""
    tokens_per_second: float | None
    step_time: float | None
    """End of the last step."""
    durable_iteration: int | None
    """0: nothing saved yet; None: all checkpoints are damaged or incomplete, see `durable_fault`."""
    durable_path: str | None
    durable_age: float | None
    durable_fault: str | None
    remaining: RemainingWork | None
    """Work left at the pace of the last attempts; None before any save."""
    last_end: str | None
    """Cause and reason of the newest ended attempt."""
    last_end_attempt: int | None
    sentinel: LastCronCheck | None
    """The last cron check of the run's folder; None if none is set up."""

    @property
    def updated(self) -> float:
        """The newest time in the run's records."""
        return max(self.step_time or 0.0, self.begin_time or 0.0)


@dataclass(frozen=True, kw_only=True)
class DamagedRun:
    """A directory that should hold a run, and its error."""

    path: str
    error: str
    updated: ClassVar[float] = -inf  # behind every run


def summarize_run(
    run: Run, queue: QueueStatus, *, now: float, plan: Plan | None = None, cache: FolderCache | None = None
) -> RunSummary:
    """Return the summary of a run. `plan`: the run's plan, if already read. `cache`: see `last_cron_check`.

    Raises RunDirError if the directory is not a run or its records are damaged.
    """
    with damaged_records_as_error(run):
        return RunRecords(run, Plan.load(run) if plan is None else plan, queue, now=now).summary(cache)


@contextlib.contextmanager
def damaged_records_as_error(run: Run) -> Iterator[None]:
    """Turn errors of edited or torn records into a RunDirError with one message."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        words = f"its records cannot be read: {type(error).__name__}: {error}"
        hint = "look at plan.json and at the newest folder of attempts/"
        raise RunDirError(words, where=run.path, hint=hint) from None


class RunRecords:
    """The records of a run that a status needs. Raises RunDirError, and any error that edited records raise."""

    def __init__(self, run: Run, plan: Plan, queue: QueueStatus, *, now: float) -> None:
        self.run, self.plan, self.queue, self.now = run, plan, queue, now
        self._begun = ReadOnce(started_attempts_backwards(run))
        """Started attempts, newest first, each read once and only as far as needed."""
        self.lineage = Lineage(run, begun=self._begun)
        newest = next(iter(self._begun), None)
        self.number = None if newest is None else newest[0]
        self.begin = None if newest is None else newest[1]
        self.ended = next(((n, end) for n, _ in self._begun if (end := run.attempt(n).read_end())), None)
        """The newest ended attempt: its number and end."""
        open_ = self.number is not None and (self.ended is None or self.ended[0] != self.number)
        self.last_end = self.ended[1] if self.ended and not open_ else None
        """End of the newest attempt; None while it runs."""
        self.stop = read_stop(run)
        self.state = run_state(run, plan, queue, self.stop, self.last_end, now=now)
        self.living = self.stop is None or self.state == "running"
        self.broken = self.living and self.state == "failed"
        working = [job.id for job in queue.jobs if not job.waits]
        over = self.begin is not None and bool(working) and self.begin.job_id not in working  # no job could record it
        self.running = open_ and self.state in ("running", "unknown") and not over
        self.step = _newest_step(run, self._begun)
        self.durable: ResumePoint | None = None
        self.durable_fault: str | None = None
        try:
            self.durable = self.lineage.durable()
        except RunDirError as error:
            self.durable_fault = error.message

    def summary(self, cache: FolderCache | None) -> RunSummary:
        """Return the summary. `cache`: see `last_cron_check`."""
        durable, begin = self.durable, self.begin
        ids = [job.id for job in self.queue.jobs + self.queue.fallback_jobs]
        saved = next((c.commit for c in self.lineage.backwards() if durable and c.commit.path == durable.path), None)
        broken = None
        if self.broken:
            broken = explain_broken_chain(self.run, self.plan, self.queue, begin, self.last_end)
        elif self.state == "blocked":
            broken = "; ".join(words for words, _ in blocked_jobs(self.run, self.queue.jobs, self.queue.reasons))
        return RunSummary(
            run=self.plan.run,
            path=str(self.run.path),
            state=self.state,
            stop=self.stop.reason if self.stop else None,
            stop_state=self.stop.state if self.stop else None,
            broken=broken,
            attempt=self.number,
            job_id=begin.job_id if begin else None,
            nodes=begin.nodes if begin else None,
            begin_time=begin.start_time if begin else None,
            pending={job_id: why for job_id, why in self.queue.reasons.items() if job_id in ids},
            iteration=max(self.step.get("iteration", 0), begin.base_iteration if begin else 0),
            total_steps=self.plan.total_steps,
            loss=self.step.get("loss"),
            tokens_per_second=self.step.get("tokens_per_second"),
            step_time=self.step.get("time"),
            durable_iteration=durable.iteration if durable else None,
            durable_path=durable.path if durable else None,
            durable_age=self.now - saved.time if saved else None,
            durable_fault=self.durable_fault,
            remaining=self._remaining(durable) if durable else None,
            last_end=f"{self.ended[1].cause}: {self.ended[1].reason}" if self.ended else None,
            last_end_attempt=self.ended[0] if self.ended else None,
            sentinel=last_cron_check(self.run, self.plan.owner, now=self.now, cache=cache),
        )

    def _remaining(self, durable: ResumePoint) -> RemainingWork | None:
        total, nodes = self.plan.end_iteration, self.plan.nodes_of_job
        if total is None:
            return None
        past = list(islice(filter(None, starmap(self._past, self._begun)), PACE_ATTEMPTS))[::-1]
        iteration = max(durable.iteration, self.step.get("iteration", 0) if self.running else 0)
        return remaining_work(past, iteration=iteration, total=total, nodes=nodes, running=self.running, now=self.now)

    def _past(self, number: int, begin: AttemptStart) -> AttemptPace | None:
        """The progress of an attempt; None if its end was not recorded."""
        end = self.run.attempt(number).read_end()
        if end is not None:
            reached, until = end.durable_iteration, end.end_time
        elif self.running and number == self.number:
            commits = (counted.commit for counted in self.lineage.backwards())
            newest = next((commit for commit in commits if commit.time >= begin.start_time), None)
            reached = newest.iteration if newest else begin.base_iteration
            until = newest.time if newest else begin.start_time
        else:
            return None
        return AttemptPace(
            base_iteration=begin.base_iteration,
            durable_iteration=reached,
            start_time=begin.start_time,
            until=until,
            end_time=end.end_time if end is not None else None,
        )


def _newest_step(run: Run, begun: Iterable[tuple[int, AttemptStart]]) -> dict[str, Any]:
    """The newest metrics line that counts: lines of an attempt beyond the base of the next one do not."""
    limit = inf
    for number, begin in begun:
        line: dict[str, Any]
        for line in run.attempt(number).metrics_backwards():
            if resets_iteration(line):
                limit = min(limit, line["iteration"])
            elif begin.base_iteration < line.get("iteration", 0) <= limit and "validation" not in line:
                return line
        limit = min(limit, begin.base_iteration)
    return {}


def run_state(
    run: Run, plan: Plan, queue: QueueStatus, stop: ChainEnd | None, last_end: AttemptEnd | None, *, now: float
) -> RunState:
    """Return the state of a run. `last_end`: the end of the newest attempt, if it has ended."""
    if queue.hidden and stop is None:
        return "running" if chain_state.newest_life_sign(run, plan, now=now) else "unknown"
    at_work = [job for job in queue.jobs if not job.waits]
    if plan.chain.mode == "singleton" and last_end is not None:  # the batch script of a COMPLETING job has ended
        at_work = [job for job in at_work if job.state != "COMPLETING"]
    if at_work:
        return "running"
    if stop is not None:
        return stop.state
    if queue.error is not None:
        return "unknown"
    waiting = [job for job in queue.jobs if job.waits and job.id not in queue.abandoned]
    blocked = [job for job in waiting if slurm_states.is_blocked(job.state, queue.reasons.get(job.id))]
    if len(blocked) < len(waiting):
        return "queued"
    if blocked:
        return "blocked"
    starts = not all(slurm_states.never_starts(queue.reasons.get(job.id)) for job in queue.fallback_jobs)
    if starts or is_locked(run.path / ".submit.lock") or campaign.waits_for_campaign(run):
        return "queued"
    newest = last_end if last_end is not None and last_end.attempt > plan.submitted_after_attempt else None
    if newest is None or plan.chain.auto_requeue or newest.cause not in PLANNED_CAUSES:
        return "failed"
    return "done" if newest.cause == "done" else "stopped"


def blocked_jobs(run: Run, jobs: Iterable[Job], reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a sentence about each waiting job that never starts, and the command that mends it."""
    return [
        (
            f"job {job.id} never starts unless a person changes something: {reasons.get(job.id) or job.state}",
            slurm_states.mending_command(job.id, job.state, reasons.get(job.id), run=str(run.path)),
        )
        for job in jobs
        if slurm_states.is_blocked(job.state, reasons.get(job.id))
    ]


def explain_broken_chain(
    run: Run, plan: Plan, queue: QueueStatus, begin: AttemptStart | None, last_end: AttemptEnd | None
) -> str:
    """Return which job died, how and where. `begin` and `last_end` belong to the newest attempt."""
    if queue.fallback_jobs:
        waits = queue.fallback_jobs[0].id
        died = explain_broken_chain(run, plan, replace(queue, fallback_jobs=[]), begin, last_end)
        return f"{died}; the fallback job {waits} never starts: {queue.reasons[waits]}"
    job = queue.last_job
    if queue.abandoned:
        return f"job {', '.join(queue.abandoned)} waits, and nobody runs the queue: the terminal that did has gone"
    newest = begin if begin is not None and begin.attempt > plan.submitted_after_attempt else None
    if newest is None or (
        job is not None and job.id != newest.job_id and (job.end_time is None or job.end_time >= newest.start_time)
    ):
        if job is None:
            return "nothing is queued, and no job has begun since the last submit; the scheduler remembers none"
        logs = [folder / f"{plan.job_name}-{job.id}.err" for folder in (Path(plan.log_folder), run.path)]
        log = next((path for path in logs if path.is_file()), None)
        where = f"its log: {log}" if log is not None else f"it left no log in {plan.log_folder}"
        return f"job {job.id} ({describe_job_end(job)}) died before it began; nothing is queued behind it; {where}"
    ended = f"ended ({last_end.cause}: {last_end.reason})" if last_end is not None else "is gone without an end"
    where = describe_job_end(job) if job is not None and job.id == newest.job_id else f"on {newest.nodes}"
    how = ", ".join(filter(None, [ended, where]))
    log_words = f"; its log: {newest.log}" if newest.log is not None else ""
    refused = _refusal(run.attempt(newest.attempt)) if last_end is None else ""
    behind = f"nothing could be queued behind it: {refused}" if refused else "nothing is queued behind it"
    return f"attempt {newest.attempt}, job {newest.job_id}, {how}; {behind}{log_words}"


def _refusal(attempt: Attempt) -> str:
    """Return Slurm's words if no successor could be queued, else an empty text."""
    with contextlib.suppress(OSError):
        return " ".join(read_bytes(attempt.retry_successor).decode(errors="replace").split())
    return ""


def describe_job_end(job: JobEnd) -> str:
    """Return how a job ended, without its id."""
    code = f"exit code {job.exit_code}" if job.exit_code.isdecimal() else job.exit_code
    return ", ".join(filter(None, [job.state, code, f"on {job.nodes}" if job.nodes else "", job.reason]))


@dataclass(frozen=True, kw_only=True)
class AttemptPace:
    """Progress of one attempt. Times are seconds since 1970."""

    base_iteration: int
    durable_iteration: int
    """Newest iteration that it saved; its base if it saved none."""
    start_time: float
    until: float
    """Its end, or its newest save if it runs."""
    end_time: float | None
    """Its end; None while it runs."""


@dataclass(frozen=True, kw_only=True)
class RemainingWork:
    """Estimate of the work left."""

    iterations: int
    seconds: float
    """Seconds of running jobs, without time in the queue."""
    node_hours: float
    earliest_end: float | None
    """Time at which the last iteration is saved if no job waits, in seconds since 1970; None if no job runs."""
    attempts: int
    """Number of attempts that the pace is computed from."""
    queue_seconds: float | None
    """Mean wait of the last jobs after the end of their predecessor; None without such a pair."""


def remaining_work(
    past: Sequence[AttemptPace], *, iteration: int, total: int, nodes: int, running: bool, now: float
) -> RemainingWork | None:
    """Return the work left for a run at `iteration` on `nodes` nodes; None before any save.

    `past`: its attempts, oldest first. `running`: True if a job trains now.
    """
    last = past[-PACE_ATTEMPTS:]
    seconds = sum(max(0.0, each.until - each.start_time) for each in last)
    gained = sum(max(0, each.durable_iteration - each.base_iteration) for each in last)
    if not gained or not seconds:
        return None
    left = max(0, total - iteration)
    needed = left * seconds / gained
    pairs = [(before.end_time, after.start_time) for before, after in pairwise(last)]
    waits = [max(0.0, start - end) for end, start in pairs if end is not None]
    return RemainingWork(
        iterations=left,
        seconds=needed,
        node_hours=needed * nodes / 3600,
        earliest_end=now + needed if running else None,
        attempts=len(last),
        queue_seconds=sum(waits) / len(waits) if waits else None,
    )
