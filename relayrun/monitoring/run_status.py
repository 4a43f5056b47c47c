"""Where a run stands: its chain and queue, how far it is, what is durable, why the last attempt ended.

`gather` makes facts of the records and of what the scheduler answered; it asks neither clock nor scheduler.
`relayrun.monitoring.run_status_view` turns them into text.
"""

from __future__ import annotations

import fcntl
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from relayrun.chain import fallback, nodes, signs
from relayrun.chain.failed_attempts import failed_attempts
from relayrun.data.streams.cursor import BY_FAULT, LaneCursor, left_out
from relayrun.errors import RunDirError, SchedulerError, user_name
from relayrun.files import read_json, read_lines, read_lines_backwards
from relayrun.monitoring import unsent
from relayrun.monitoring.remaining import Past, Remaining, remaining
from relayrun.rundir import campaign, evaluations, mirror, node_health, purge, quarantine, rounds, triggers
from relayrun.rundir.evaluations import Result, Submitted
from relayrun.rundir.lineage import Durable, Lineage
from relayrun.rundir.mirror import LastPass
from relayrun.rundir.plan import Plan
from relayrun.rundir.purge import Purge
from relayrun.rundir.quarantine import LeftBehind
from relayrun.rundir.records import AttemptStart, End
from relayrun.rundir.run import Run, data_of_checkpoint
from relayrun.rundir.sentinel import Asked, LastLook, last_look
from relayrun.rundir.stop import stop_reason
from relayrun.rundir.stragglers import Straggler
from relayrun.rundir.triggers import Trigger
from relayrun.rundir.ways_back import goes_back
from relayrun.scheduler import history
from relayrun.scheduler.base import Job, Scheduler
from relayrun.scheduler.choose import for_plan
from relayrun.scheduler.history import JobEnd

State = Literal["running", "queued", "waiting", "stopped", "broken", "idle", "unknown"]
"""State of a chain. `waiting`: its sweep, or the stage before it, begins it later. `broken`: it has not ended, and
nothing that would go on with it is queued or runs. `idle`: a chain of one job (`auto_requeue: false`) ended as planned,
or a submit is under way. `unknown`: the scheduler did not answer, or hides another user's jobs, and STOP is not
there."""

PLANNED = ("done", "saved", "exit")
"""Causes of an end that was meant: a chain of one job has done what it was asked for, and nothing is lost."""

PATIENCE = 5.0
"""Seconds for which a controller that does not answer is asked again."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """What the scheduler answered about the jobs of a run."""

    jobs: list[Job] = field(default_factory=list)
    fallback_jobs: list[Job] = field(default_factory=list)
    """Small jobs that go on with the chain where one of `jobs` fails; see `relayrun.chain.fallback`."""
    error: str | None = None
    """Why the scheduler did not answer; None if it did."""
    hidden: str | None = None
    """Why the jobs of the run's owner, another user, are not known."""
    evaluations: dict[str, str] = field(default_factory=dict)
    """State, by id, of the jobs of evaluations that have no result yet."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why jobs wait, by id."""
    last_job: JobEnd | None = None
    """How the newest job that ran has ended, where nothing runs now and somebody remembers it."""
    abandoned: list[str] = field(default_factory=list)
    """Ids of queued jobs that nobody will start."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run at one moment. Times are seconds since 1970, ages and leads seconds."""

    run: str
    """Name of the run, as project/name."""
    path: str
    state: State
    mode: str
    auto_requeue: bool
    jobs: list[Job]
    """Jobs of the chain that are queued or run."""
    fallback_jobs: list[Job]
    """Small jobs that go on with the chain where one of `jobs` fails."""
    scheduler_error: str | None
    stop: str | None
    """Why the chain ended; None while it has not."""
    pending: dict[str, str]
    """Why queued jobs wait, in the scheduler's words, by id."""
    last_job: JobEnd | None
    """How the newest job that ran ended, where nothing runs now and the scheduler remembers it."""
    broken: str | None
    """Which job died, how and where, of a chain that cannot go on; None where it can."""
    go_on: str | None
    """The command that goes on with a broken chain."""

    attempt: int | None
    """Number of the newest attempt; None before the first job began."""
    job_id: str | None
    nodes: str | None
    begin_time: float | None
    phase: str | None
    """What the slowest node of a running attempt does: start, step, save or evaluation."""
    leave_time: float | None
    """When a running attempt saves and leaves, as reckoned when it began."""
    job_end_time: float | None
    """When the time limit of a running attempt is reached."""

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
    left_behind: list[LeftBehind]
    """Checkpoints of later iterations that are not whole, the newest first."""
    in_quarantine: list[LeftBehind]
    """Every checkpoint in quarantine, also those whose iterations have been computed again."""

    remaining: Remaining | None
    """What is left to do at the pace of the last attempts; None before anything is durable."""

    last_end: str | None
    """Cause and reason of the newest attempt that has ended."""
    last_end_attempt: int | None
    evaluations: list[Result]
    """Results of the evaluations, by iteration."""
    waiting_evaluations: dict[int, str]
    """Iterations whose evaluation has no result yet, and its job with its state as far as it is known."""
    failed_rounds: int
    """How often the ranks of the newest attempt failed; all but perhaps the last time they were started again inside
    the job."""
    last_failed_round: str | None
    """Who failed then, where, and what it took to go on."""
    sick_nodes: list[str]
    """What was found wrong with nodes of the newest attempt, and what was done about it, the newest last."""
    straggler: str | None
    """Which rank is slower than its peers, and in what; None where none is."""
    failed_saves: int
    """Saves of the whole run that did not work, after which training went on."""
    last_failed_save: str | None
    """Iteration and reason of the newest failed save."""
    failed_attempts: int
    """Attempts in a row, up to now, without a new durable iteration."""
    max_failed_attempts: int
    strikes: dict[str, int]
    """Nodes with the number of failed attempts that they are blamed for and that still count."""
    excluded: list[str]
    """Nodes that the next job leaves out for their strikes."""
    triggers: list[Trigger]
    """Triggers that were touched and not yet obeyed."""
    unsent_notices: int = 0
    """Notices that somebody should have been told of by now."""
    unsent_reason: str = ""
    """Why they were not sent."""
    mirror: LastPass | None = None
    """How the last pass of copying checkpoints to a second place ended; None where there was none."""
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    """Files and rows that streams could not read and left out, by data set and reason, up to the newest record."""
    purges: list[Purge] = field(default_factory=list)
    """When the newest checkpoint, and data of a chain that goes on, would be purged by the site."""
    sentinel: LastLook | None = None
    """When the sentinel that looks after the run has last looked; None where none was set up."""

    @property
    def updated(self) -> float:
        """The newest time in the run's records."""
        return max(self.step_time or 0.0, self.begin_time or 0.0)


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A directory where a run should be, and what is wrong with it."""

    path: str
    error: str


def scheduler(run: Run) -> Scheduler:
    """Return the run's scheduler, for a person who waits for the answer. Raises RunDirError where there is no run."""
    return for_plan(Plan.load(run), run, patience=PATIENCE)


def ask(run: Run) -> Queue:
    """Ask for the chain's jobs, whoever submitted them; a scheduler that does not answer is a fact like others."""
    try:
        asked = scheduler(run)
        waiting = {job_id: asked.query(job_id) for _, job_id in _waiting(run)}
        states = {job_id: "gone" if job is None else job.state.lower() for job_id, job in waiting.items()}
        plan = Plan.load(run)
        jobs = asked.jobs(plan, anyone=True)
        waiting_jobs = [job for job in jobs if job.state == "PENDING"]
        hidden = not jobs and plan.owner is not None and signs.is_anothers(plan) and plan.scheduler == "slurm"
        if hidden and history.others_are_hidden():
            name = user_name(plan.owner or 0)
            return Queue(hidden=f"Slurm shows the jobs of {name}, who owns this run, to nobody else")
        fallback_jobs = fallback.live(plan, asked, anyone=True)
        nothing_runs = all(job.state in ("PENDING", "COMPLETING") for job in jobs)
        return Queue(
            jobs=jobs,
            fallback_jobs=fallback_jobs,
            evaluations=states,
            reasons=history.pending_reasons(plan) if waiting_jobs or fallback_jobs else {},
            last_job=history.last_job(plan, run, since=_asked_since(run)) if nothing_runs else None,
            abandoned=history.abandoned(plan, run) if waiting_jobs else [],
        )
    except SchedulerError as error:
        return Queue(error=error.message)


def _asked_since(run: Run) -> float:
    """The last submit, with an hour for clocks that differ."""
    return run.plan.stat().st_mtime - 3600


def gather_all(
    runs: Sequence[Run], *, now: float, ask: Callable[[Run], Queue] = ask, plans: Mapping[Path, Plan] | None = None
) -> list[RunStatus | Damaged]:
    """Return the status of many runs, the newest first, damaged ones last.

    `plans`: those that were read already, by run directory. `ask` gives the jobs of one run; `monitoring.watcher` has
    one that asks for all runs together. Once Slurm has not answered it is not asked again, and not for runs that have
    been stopped.
    """
    found: list[RunStatus] = []
    damaged: list[Damaged] = []
    asked: Asked = {}
    silent: Queue | None = None
    for run in runs:
        try:
            if run.stop.exists():
                queue = Queue()
            elif silent is not None and Plan.load(run).scheduler == "slurm":
                queue = silent
            else:
                queue = ask(run)
                silent = queue if queue.error is not None else silent
            found.append(gather(run, queue, now=now, plan=(plans or {}).get(run.path), asked=asked))
        except (RunDirError, OSError) as error:  # what cannot be read of one hides no other
            damaged.append(Damaged(path=str(run.path), error=getattr(error, "message", None) or str(error)))
    return [*sorted(found, key=lambda status: -status.updated), *damaged]


def gather(run: Run, queue: Queue, *, now: float, plan: Plan | None = None, asked: Asked | None = None) -> RunStatus:
    """Return the status of a run. `plan`: the run's, where it was read already. `asked`: see `last_look`.

    Raises RunDirError, with one clear message, where the directory is no run or damaged.
    """
    try:
        return _gather(run, Plan.load(run) if plan is None else plan, queue, now, asked)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # records that were edited, or torn by a disk
        raise RunDirError(
            f"its records cannot be read: {type(error).__name__}: {error}",
            where=run.path,
            hint="look at plan.json and at the newest folder of attempts/",
        ) from None


def _gather(run: Run, plan: Plan, queue: Queue, now: float, asked: Asked | None) -> RunStatus:
    begun = [(number, begin) for number in run.attempt_numbers() if (begin := run.attempt(number).read_begin())]
    ended = [(number, end) for number, _ in begun if (end := run.attempt(number).read_end())]
    number, begin = begun[-1] if begun else (None, None)
    open_ = number is not None and (not ended or ended[-1][0] != number)
    stop = stop_reason(run)
    last_end = ended[-1][1] if ended and not open_ else None
    state = _state(run, plan, queue, stop, last_end)
    if queue.hidden and stop is None:
        state = "running" if signs.of_life(run, plan, now=now) else "unknown"
    running = open_ and state in ("running", "unknown")
    step = _last_step(run, begun)
    line = Lineage(run)
    durable, fault = _durable(line)
    saved = next((c.commit for c in line.backwards() if durable and c.commit.path == durable.path), None)
    strikes = nodes.read_strikes(run)
    counts: dict[str, int] = {}
    for strike in strikes:
        if now - strike.time < nodes.EXPIRE_SECONDS:
            counts[strike.node] = counts.get(strike.node, 0) + 1
    failures = [line for number, _ in begun for line in read_lines(run.attempt(number).failed_saves)]
    failed_rounds = rounds.read(run.attempt(number)) if number is not None else []
    beats = run.attempt(number).read_heartbeats() if running and number is not None else []
    end_time = begin.job_end_time if begin is not None and running else None
    late, why_late = unsent.not_sent(run, now=now)
    return RunStatus(
        run=plan.run,
        path=str(run.path),
        state=state,
        mode=plan.mode,
        auto_requeue=plan.auto_requeue,
        jobs=queue.jobs,
        fallback_jobs=queue.fallback_jobs,
        scheduler_error=f"the scheduler did not answer: {queue.error}" if queue.error else queue.hidden,
        stop=stop,
        pending={job.id: queue.reasons[job.id] for job in queue.jobs + queue.fallback_jobs if job.id in queue.reasons},
        last_job=queue.last_job,
        broken=_why_broken(run, plan, queue, begin, last_end) if state == "broken" else None,
        go_on=shlex.join(["relayrun", "resume", str(run.path)]) if state == "broken" else None,
        attempt=number,
        job_id=begin.job_id if begin else None,
        nodes=begin.nodes if begin else None,
        begin_time=begin.start_time if begin else None,
        phase=min(beats, key=lambda beat: beat.time).phase if beats else None,
        leave_time=end_time - begin.lead if begin is not None and end_time is not None else None,
        job_end_time=end_time,
        iteration=max(step.get("iteration", 0), begin.base_iteration if begin else 0),
        total_steps=plan.total_steps,
        loss=step.get("loss"),
        tokens_per_second=step.get("tokens_per_second"),
        step_time=step.get("time"),
        durable_iteration=durable.iteration if durable else None,
        durable_path=durable.path if durable else None,
        durable_age=now - saved.time if saved else None,
        durable_fault=fault,
        left_behind=quarantine.left_behind(run, line, durable) if durable else [],
        in_quarantine=quarantine.in_quarantine(run),
        remaining=_remaining(begun, dict(ended), line, plan, running, step, durable, now) if durable else None,
        last_end=f"{ended[-1][1].cause}: {ended[-1][1].reason}" if ended else None,
        last_end_attempt=ended[-1][0] if ended else None,
        evaluations=evaluations.results(run),
        waiting_evaluations={
            iteration: f"job {job_id}" + (f", {queue.evaluations[job_id]}" if job_id in queue.evaluations else "")
            for iteration, job_id in _waiting(run)
        },
        failed_rounds=len(failed_rounds),
        last_failed_round=failed_rounds[-1].told if failed_rounds else None,
        sick_nodes=[found.told for found in node_health.read(run.attempt(number))] if number is not None else [],
        straggler=Straggler.of(step["straggler"]).words if step.get("straggler") else None,
        failed_saves=len(failures),
        last_failed_save=f"iteration {failures[-1]['iteration']}: {failures[-1]['error']}" if failures else None,
        failed_attempts=failed_attempts(run, plan) - (1 if running else 0),
        max_failed_attempts=plan.max_failed_attempts,
        strikes=counts,
        excluded=nodes.excluded(strikes, nodes=plan.nodes, now=now),
        triggers=_pending(run),
        left_out=_left_out(run, line),
        purges=_purges(run, plan, durable, living=state != "stopped"),
        unsent_notices=late,
        unsent_reason=why_late,
        mirror=_last_pass(run),
        sentinel=last_look(run, plan.owner, now=now, asked=asked),
    )


def _remaining(
    begun: list[tuple[int, AttemptStart]],
    ended: dict[int, End],
    line: Lineage,
    plan: Plan,
    running: bool,
    step: dict[str, Any],
    durable: Durable,
    now: float,
) -> Remaining | None:
    past = []
    for number, begin in begun:
        end = ended.get(number)
        if end is not None:
            reached, until = end.durable_iteration, end.end_time
        elif running and number == begun[-1][0]:
            commits = (counted.commit for counted in line.backwards())
            newest = next((commit for commit in commits if commit.time >= begin.start_time), None)
            reached = newest.iteration if newest else begin.base_iteration
            until = newest.time if newest else begin.start_time
        else:  # nobody wrote down when it ended
            continue
        past.append(
            Past(
                base_iteration=begin.base_iteration,
                durable_iteration=reached,
                start_time=begin.start_time,
                until=until,
                end_time=end.end_time if end is not None else None,
            )
        )
    iteration = max(durable.iteration, step.get("iteration", 0) if running else 0)
    total, nodes = plan.end_iteration, plan.nodes_of_job
    if total is None:
        return None
    return remaining(past, iteration=iteration, total=total, nodes=nodes, running=running, now=now)


def _waiting(run: Run) -> list[tuple[int, str]]:
    """(iteration, job id) of the evaluations that were submitted and have no result."""
    return [
        (folder.iteration, submitted.job_id)
        for folder in evaluations.every(run)
        if not folder.result.exists() and (submitted := Submitted.read(folder.submitted))
    ]


def _state(run: Run, plan: Plan, queue: Queue, stop: str | None, last_end: End | None) -> State:
    """`last_end`: of the newest attempt, where that has ended."""
    at_work = [job for job in queue.jobs if job.state != "PENDING"]
    if plan.mode == "singleton" and last_end is not None:  # the batch script of a job that is COMPLETING has gone
        at_work = [job for job in at_work if job.state != "COMPLETING"]
    if at_work:
        return "running"
    if stop is not None:
        return "stopped"
    if queue.error is not None:
        return "unknown"
    if any(job.state == "PENDING" and job.id not in queue.abandoned for job in queue.jobs):
        return "queued"
    if any(not history.for_ever(queue.reasons.get(job.id)) for job in queue.fallback_jobs):  # it waits for room
        return "queued"
    planned = not plan.auto_requeue and last_end is not None and last_end.cause in PLANNED
    newest = last_end is not None and last_end.attempt > plan.submitted_after_attempt
    if (planned and newest) or _submit_under_way(run):
        return "idle"
    return "waiting" if campaign.waits(run) else "broken"


def _submit_under_way(run: Run) -> bool:
    try:
        with open(run.path / ".submit.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _why_broken(run: Run, plan: Plan, queue: Queue, begin: AttemptStart | None, last_end: End | None) -> str:
    """Which job died, how and where. `begin` and `last_end` are the newest attempt's."""
    if queue.fallback_jobs:
        waits = queue.fallback_jobs[0].id
        died = _why_broken(run, plan, replace(queue, fallback_jobs=[]), begin, last_end)
        return f"{died}; the fallback job {waits} never starts: {queue.reasons[waits]}"
    job = queue.last_job
    if queue.abandoned:
        return f"job {', '.join(queue.abandoned)} waits, and nobody runs the queue: the terminal that did has gone"
    newest = begin if begin is not None and begin.attempt > plan.submitted_after_attempt else None
    if newest is None or (job is not None and job.id != newest.job_id and not _older(job, newest)):
        if job is None:
            return "nothing is queued, and no job has begun since the last submit; the scheduler remembers none"
        logs = [folder / f"{plan.job_name}-{job.id}.err" for folder in (Path(plan.log_folder), run.path)]
        log = next((path for path in logs if path.is_file()), None)
        where = f"its log: {log}" if log is not None else f"it left no log in {plan.log_folder}"
        return f"job {job.id} ({job_words(job)}) died before it began; nothing is queued behind it; {where}"
    how = ", ".join(
        filter(
            None,
            [
                f"ended ({last_end.cause}: {last_end.reason})" if last_end is not None else "is gone without an end",
                job_words(job) if job is not None and job.id == newest.job_id else f"on {newest.nodes}",
            ],
        )
    )
    log_words = f"; its log: {newest.log}" if newest.log is not None else ""
    return f"attempt {newest.attempt}, job {newest.job_id}, {how}; nothing is queued behind it{log_words}"


def _older(job: JobEnd, begin: AttemptStart) -> bool:
    return job.end_time is not None and job.end_time < begin.start_time


def job_words(job: JobEnd) -> str:
    """How a job ended, without its id."""
    code = f"exit code {job.exit_code}" if job.exit_code.isdecimal() else job.exit_code
    return ", ".join(filter(None, [job.state, code, f"on {job.nodes}" if job.nodes else "", job.reason]))


def _purges(run: Run, plan: Plan, durable: Durable | None, *, living: bool) -> list[Purge]:
    if not plan.purge_days:
        return []
    found = [purge.of_checkpoint(durable.iteration, durable.path, plan.purge_days)] if durable else []
    found += [purge.of_data(run, plan.purge_days)] if living else []
    return [each for each in found if each is not None]


def _durable(line: Lineage) -> tuple[Durable | None, str | None]:
    try:
        return line.durable(), None
    except RunDirError as error:
        return None, error.message


def _last_pass(run: Run) -> LastPass | None:
    try:
        return mirror.read_last(run)
    except RunDirError as error:  # it must not hide where the run stands
        return LastPass(time=0.0, iteration=None, behind=0, complaint=error.message)


def _left_out(run: Run, line: Lineage) -> dict[str, dict[str, int]]:
    """What streams could not read and left out, from the newest checkpoint that says where their lanes stood."""
    commit = next((counted.commit for counted in line.backwards()), None)
    path = None if commit is None else data_of_checkpoint(Path(commit.path))
    if path is None or not path.is_file():
        return {}
    found: dict[str, dict[str, int]] = {}
    for name, standing in read_json(path).get("streams", {}).items():
        lanes = [LaneCursor(*cursor) for cursor in standing["cursors"]]
        counts = {"files": sum(lane.files for lane in lanes)} | left_out(lanes)
        faults = {
            reason: count for reason, count in counts.items() if count and reason in ("files", *BY_FAULT.values())
        }
        found |= {name: faults} if faults else {}
    return found


def _pending(run: Run) -> list[Trigger]:
    """Triggers that wait; none for who may not look into the folder."""
    try:
        return [trigger for name in triggers.NAMES if (trigger := triggers.look(run, name))]
    except PermissionError:
        return []


def _last_step(run: Run, begun: list[tuple[int, AttemptStart]]) -> dict[str, Any]:
    """The newest metrics line that counts: an attempt's lines beyond the base of the next do not."""
    limit = float("inf")
    for number, begin in reversed(begun):
        line: dict[str, Any]
        for _, line in read_lines_backwards(run.attempt(number).metrics):
            if goes_back(line):
                limit = min(limit, line["iteration"])
            elif begin.base_iteration < line.get("iteration", 0) <= limit and "validation" not in line:
                return line
        limit = min(limit, begin.base_iteration)
    return {}
