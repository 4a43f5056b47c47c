"""The summary of a run, as one line of a table of many runs needs it: state, progress, checkpoint, last end.

`summarize_run` reads the records from the newest attempt backwards, so its cost does not grow with the age of the run.
It asks neither the clock nor the scheduler. `remaining_work` estimates the seconds and node hours left, from the pace
of the last attempts: saved iterations divided by the whole time of their jobs, without time in the queue.
`explain_broken_chain` says which job ended a chain that cannot continue, and how.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, starmap
from pathlib import Path
from typing import Any, Literal

from relayrun.control import chain_state
from relayrun.control.rundir import campaign
from relayrun.control.rundir.checkpoint_records import Lineage, ReadOnce, ResumePoint, started_attempts_backwards
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptStart, ChainEnd, ChainEndState
from relayrun.control.rundir.restarts import resets_iteration
from relayrun.control.rundir.run import Run, read_stop
from relayrun.control.scheduler import job_history
from relayrun.control.scheduler.base import RESERVATION_GONE
from relayrun.control.scheduler.job_history import JobEnd
from relayrun.errors import RunDirError
from relayrun.watch.status.cron_check_record import FolderCache, LastCronCheck, last_cron_check
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


PACE_ATTEMPTS = 5
"""Attempts whose pace counts."""


@dataclass(frozen=True, kw_only=True)
class AttemptPace:
    """What one attempt did. Times are seconds since 1970."""

    base_iteration: int
    durable_iteration: int
    """The newest that it made durable; its base where it saved nothing."""
    start_time: float
    until: float
    """Its end; of one that runs, its newest save."""
    end_time: float | None
    """Its end; None while it runs."""


@dataclass(frozen=True, kw_only=True)
class RemainingWork:
    """What is left to do."""

    iterations: int
    seconds: float
    """Seconds of jobs that run; time in the queue is not in it."""
    node_hours: float
    earliest_end: float | None
    """When the last iteration is durable if no job waits, in seconds since 1970; None while no job runs."""
    attempts: int
    """How many attempts the pace is of."""
    queue_seconds: float | None
    """What the last jobs waited behind the end of the one before, on average; None where there was no such pair."""


def remaining_work(
    past: Sequence[AttemptPace], *, iteration: int, total: int, nodes: int, running: bool, now: float
) -> RemainingWork | None:
    """Return what a run at `iteration` still needs of `nodes` nodes; None before anything is durable.

    `past`: its attempts, the oldest first. `running`: whether a job trains now.
    """
    last = past[-PACE_ATTEMPTS:]
    seconds = sum(max(0.0, each.until - each.start_time) for each in last)
    gained = sum(max(0, each.durable_iteration - each.base_iteration) for each in last)
    if not gained or not seconds:
        return None
    left = max(0, total - iteration)
    needed = left * seconds / gained
    waits = [
        max(0.0, after.start_time - before.end_time)
        for before, after in itertools.pairwise(last)
        if before.end_time is not None
    ]
    return RemainingWork(
        iterations=left,
        seconds=needed,
        node_hours=needed * nodes / 3600,
        earliest_end=now + needed if running else None,
        attempts=len(last),
        queue_seconds=sum(waits) / len(waits) if waits else None,
    )


ChainState = Literal["running", "queued", "waiting", "stopped", "broken", "idle", "unknown"]
"""State of a chain. `waiting`: its sweep, or the stage before it, begins it later. `broken`: it has not ended, and
nothing that would go on with it is queued or runs. `idle`: a chain of one job (`auto_requeue: false`) ended as planned,
or a submit is under way. `unknown`: the scheduler did not answer, or hides another user's jobs, and STOP is not
there."""

PLANNED_CAUSES = ("done", "saved", "exit")
"""Causes of an end that was meant: a chain of one job has done what it was asked for, and nothing is lost."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Where a run stands at one moment. Times are seconds since 1970, ages seconds."""

    run: str
    """Name of the run, as project/name."""
    path: str
    state: ChainState
    stop: str | None
    """Why the chain ended; None while it has not."""
    stop_state: ChainEndState | None
    """How the chain ended; None while it has not."""
    broken: str | None
    """Which job died, how and where, of a chain that cannot go on; None where it can."""
    attempt: int | None
    """Number of the newest attempt; None before the first job began."""
    job_id: str | None
    nodes: str | None
    begin_time: float | None
    iteration: int
    total_steps: int | None
    loss: float | None
    """Loss of the last step in nats per token; None before the first step."""
    tokens_per_second: float | None
    step_time: float | None
    """When the last step ended."""
    durable_iteration: int | None
    """0: nothing saved yet; None: there are checkpoints and none is whole, see `durable_fault`."""
    durable_path: str | None
    durable_age: float | None
    durable_fault: str | None
    remaining: RemainingWork | None
    """What is left to do at the pace of the last attempts; None before anything is durable."""
    last_end: str | None
    """Cause and reason of the newest attempt that has ended."""
    last_end_attempt: int | None
    sentinel: LastCronCheck | None
    """When the sentinel that looks after the run has last looked; None where none was set up."""

    @property
    def updated(self) -> float:
        """The newest time in the run's records."""
        return max(self.step_time or 0.0, self.begin_time or 0.0)


@dataclass(frozen=True, kw_only=True)
class DamagedRun:
    """A directory where a run should be, and what is wrong with it."""

    path: str
    error: str


def _chain_state(
    run: Run, plan: Plan, queue: QueueStatus, stop: ChainEnd | None, last_end: AttemptEnd | None
) -> ChainState:
    """`last_end`: of the newest attempt, where that has ended."""
    at_work = [job for job in queue.jobs if not job.waits]
    if plan.mode == "singleton" and last_end is not None:  # the batch script of a job that is COMPLETING has gone
        at_work = [job for job in at_work if job.state != "COMPLETING"]
    if at_work:
        return "running"
    if stop is not None:
        return "stopped"
    if queue.error is not None:
        return "unknown"
    if any(job.waits and job.state != RESERVATION_GONE and job.id not in queue.abandoned for job in queue.jobs):
        return "queued"
    if any(not job_history.never_starts(queue.reasons.get(job.id)) for job in queue.fallback_jobs):  # it waits for room
        return "queued"
    planned = not plan.auto_requeue and last_end is not None and last_end.cause in PLANNED_CAUSES
    newest = last_end is not None and last_end.attempt > plan.submitted_after_attempt
    if (planned and newest) or _submit_under_way(run):
        return "idle"
    return "waiting" if campaign.waits_for_campaign(run) else "broken"


def _submit_under_way(run: Run) -> bool:
    try:
        lock = os.open(f"{run.path}/.submit.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(lock)
    return False


def _newest_checkpoint(line: Lineage) -> tuple[ResumePoint | None, str | None]:
    try:
        return line.durable(), None
    except RunDirError as error:
        return None, error.message


@contextlib.contextmanager
def damaged_records_as_error(run: Run) -> Iterator[None]:
    """Raise RunDirError, with one clear message, where records of a run were edited, or torn by a disk."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunDirError(
            f"its records cannot be read: {type(error).__name__}: {error}",
            where=run.path,
            hint="look at plan.json and at the newest folder of attempts/",
        ) from None


def summarize_run(
    run: Run, queue: QueueStatus, *, now: float, plan: Plan | None = None, asked: FolderCache | None = None
) -> RunSummary:
    """Return where a run stands. `plan`: the run's, where it was read already. `asked`: see `last_cron_check`.

    Raises RunDirError, with one clear message, where the directory is no run or damaged.
    """
    with damaged_records_as_error(run):
        return RunRecords(run, Plan.load(run) if plan is None else plan, queue, now=now).standing(asked)


class RunRecords:
    """What is read of a run for one look. Raises RunDirError, and what records raise that were edited."""

    def __init__(self, run: Run, plan: Plan, queue: QueueStatus, *, now: float) -> None:
        self.run, self.plan, self.queue, self.now = run, plan, queue, now
        self._begun = ReadOnce(started_attempts_backwards(run))
        """The attempts that have begun, the newest first, each read once and as far as asked for."""
        self.line = Lineage(run, begun=self._begun)
        newest = next(iter(self._begun), None)
        self.number = None if newest is None else newest[0]
        self.begin = None if newest is None else newest[1]
        self.ended = next(((n, end) for n, _ in self._begun if (end := run.attempt(n).read_end())), None)
        """The newest attempt that has ended, and how."""
        open_ = self.number is not None and (self.ended is None or self.ended[0] != self.number)
        self.last_end = self.ended[1] if self.ended and not open_ else None
        """How the newest attempt has ended; None while it has not."""
        self.stop = read_stop(run)
        self.state = _chain_state(run, plan, queue, self.stop, self.last_end)
        if queue.hidden and self.stop is None:
            self.state = "running" if chain_state.newest_life_sign(run, plan, now=now) else "unknown"
        self.running = open_ and self.state in ("running", "unknown")
        self.step = _newest_step(run, self._begun)
        self.durable, self.durable_fault = _newest_checkpoint(self.line)

    def standing(self, asked: FolderCache | None) -> RunSummary:
        """Return it as a table of many runs tells it. `asked`: see `last_cron_check`."""
        durable, begin = self.durable, self.begin
        saved = next((c.commit for c in self.line.backwards() if durable and c.commit.path == durable.path), None)
        broken = self.state == "broken"
        return RunSummary(
            run=self.plan.run,
            path=str(self.run.path),
            state=self.state,
            stop=self.stop.reason if self.stop else None,
            stop_state=self.stop.state if self.stop else None,
            broken=explain_broken_chain(self.run, self.plan, self.queue, begin, self.last_end) if broken else None,
            attempt=self.number,
            job_id=begin.job_id if begin else None,
            nodes=begin.nodes if begin else None,
            begin_time=begin.start_time if begin else None,
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
            sentinel=last_cron_check(self.run, self.plan.owner, now=self.now, asked=asked),
        )

    def _remaining(self, durable: ResumePoint) -> RemainingWork | None:
        total, nodes = self.plan.end_iteration, self.plan.nodes_of_job
        if total is None:
            return None
        past = list(islice(filter(None, starmap(self._past, self._begun)), PACE_ATTEMPTS))[::-1]
        iteration = max(durable.iteration, self.step.get("iteration", 0) if self.running else 0)
        return remaining_work(past, iteration=iteration, total=total, nodes=nodes, running=self.running, now=self.now)

    def _past(self, number: int, begin: AttemptStart) -> AttemptPace | None:
        """What an attempt did; None where nobody wrote down when it ended."""
        end = self.run.attempt(number).read_end()
        if end is not None:
            reached, until = end.durable_iteration, end.end_time
        elif self.running and number == self.number:
            commits = (counted.commit for counted in self.line.backwards())
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
    """The newest metrics line that counts: an attempt's lines beyond the base of the next do not.

    `begun`: the attempts that have begun, the newest first.
    """
    limit = float("inf")
    for number, begin in begun:
        line: dict[str, Any]
        for line in run.attempt(number).metrics_backwards():
            if resets_iteration(line):
                limit = min(limit, line["iteration"])
            elif begin.base_iteration < line.get("iteration", 0) <= limit and "validation" not in line:
                return line
        limit = min(limit, begin.base_iteration)
    return {}
