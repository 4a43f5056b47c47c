"""The supervisor, a small program beside the ranks: `begin` before them, `watch` beside them, `end` after them.

It gathers facts, lets `decisions` judge, and acts. Its only state is the run directory, so it may be killed at any
point; the next job's `begin` completes a killed `end`. An error ends the program: the batch script then retries `end`,
and finally requeues the job itself (`launchers/lib/again.sh`). STOP is written only if another try would end in the
same way.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

from relayrun.control import chain_state, decisions
from relayrun.control.chain import (
    background,
    budget,
    campaign,
    evaluation_jobs,
    excluded_nodes,
    failure_reason,
    job_script,
    jobs,
    requested_options,
    surroundings,
)
from relayrun.control.chain_state import count_failed_attempts
from relayrun.control.diagnosis import Statement
from relayrun.control.failure_signatures import cause_words
from relayrun.control.job_log import log_line, log_size, logged, stdout_beside
from relayrun.control.rundir import checkpoint_records, merged_metrics, node_health, restarts, time_limit, triggers
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage, ResumePoint
from relayrun.control.rundir.plan import PLAN_FORMAT, Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptOutcome, AttemptStart, ChainEnd, Hang
from relayrun.control.rundir.run import Run, is_stopped, read_stop, write_stop
from relayrun.control.scheduler import error_lines
from relayrun.control.scheduler.base import CONTROLLER_PATIENCE, Job, Scheduler, user_python_path
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.control.scheduler.slurm_states import RESERVATION_GONE
from relayrun.control.trainers.base import Trainer
from relayrun.control.trainers.checkpoint_hashes import intact_base
from relayrun.control.trainers.registry import trainer_of
from relayrun.errors import RelayrunError, RunDirError, SchedulerError
from relayrun.files import fsync_directory, write_atomic
from relayrun.terminal import raw_stream

EXIT_CHAIN_ENDS = 10
"""Exit code of `begin` if the ranks must not start."""
EXIT_ATTEMPT_FAILED = 12
"""Exit code of `end` if the attempt failed and everything that follows from it is done."""
USEFUL_RESERVATION_SECONDS = 60.0
"""No further job begins if less time than this and the grace period is left before the end of the reservation."""


def begin_attempt(run: Run) -> int:
    """Open an attempt, or end the chain. Prints the attempt's directory for job.sh; returns the exit code. Raises
    SchedulerError and OSError, for which the caller retries; RunDirError after STOP is written."""
    plan = _plan_of_job(run, Plan.load_trusted, "begin")
    scheduler = scheduler_for_plan(plan, run)
    job_id = scheduler.current_job_id()
    try:
        return _decide_and_open(run, plan, scheduler, job_id)
    except SchedulerError:
        raise
    except RelayrunError as error:
        stop_chain(run, plan, scheduler, _could_not("begin", error), own_job=job_id)
        background.send_notices(run, plan)
        campaign.start_due_members_of(run)
        raise


def _plan_of_job(run: Run, load: Callable[[Run], Plan], aim: str) -> Plan:
    """Read the plan. Raises RunDirError after STOP is written: this version or this user cannot continue the run."""
    try:
        return load(run)
    except RunDirError as error:
        if run.plan.exists():
            write_stop(run, _could_not(aim, error))
        raise


def _could_not(aim: str, error: RelayrunError) -> ChainEnd:
    return ChainEnd("failed", f"this job could not {aim}: {error.message}")


def _decide_and_open(run: Run, plan: Plan, scheduler: Scheduler, job_id: str) -> int:
    job = scheduler.query(job_id)
    if job is None:
        raise SchedulerError(f"the scheduler does not know the job {job_id} that this runs in")
    scheduler.adopt(job, plan)
    if plan.format != PLAN_FORMAT:
        log_line(f"the run directory is brought from format {plan.format} to {PLAN_FORMAT}")
        plan = replace(plan, format=PLAN_FORMAT)
        plan.write(run.plan)
    cancelled, verdict = _close_predecessor(run, plan, scheduler)
    line = Lineage(run)
    chosen = line.chosen_by_hand()
    base = chosen or line.durable()
    if not checkpoint_records.is_checkpoint_of(run, base):
        base = ResumePoint(iteration=plan.load_iteration, path=plan.load_path)
    limit = budget.budget_end(run, plan, nodes=job.num_nodes, start=job.start_time or time.time())
    job = replace(job, end_time=limit.cap(*scheduler.job_end(job))[0])
    trigger = triggers.read_trigger(run, "exit")
    decision = decisions.decide_at_start(
        decisions.StartFacts(
            stopped=read_stop(run) or jobs.read_chain_end_from_comment(job),
            durable_iteration=base.iteration,
            total_steps=plan.total_steps,
            stop_after=plan.stop_after,
            exit_trigger=None if trigger is None else trigger.user,
            predecessor_cancelled=cancelled,
            verdict=verdict,
            failed_attempts=count_failed_attempts(run, plan),
            chain=plan.chain,
            budget=limit.setting and budget.why_over(run, plan, limit, next_grace_period(run, plan, line)[0]),
        )
    )
    if decision.chain_end is not None:
        with _told_to_slurm(run, plan, scheduler, cancelled=cancelled):
            stop_chain(run, plan, scheduler, ChainEnd(decision.chain_end, decision.reason), own_job=job_id)
        if trigger is not None:  # after STOP: an acknowledgement reports a fact
            with logged(f"trigger {trigger.name} not acknowledged", OSError):
                result = f"the chain ends: {decision.reason}"
                triggers.acknowledge_trigger(run, trigger, iteration=base.iteration, result=result)
        _update_views(run)
        background.send_notices(run, plan)
        campaign.start_due_members_of(run)
        return EXIT_CHAIN_ENDS
    if trainer_of(plan, run).lacks_hashes:
        base = intact_base(run, line, base, attempt=max(run.attempt_numbers(), default=0) + 1)
    job = replace(job, options=jobs.options_without_tried_nodes(job, scheduler))
    changed = requested_options.note_changes(run, plan, job, defaults=scheduler.default_options)
    attempt = _open_attempt(run, plan, scheduler, job, line, base, rolled_back=chosen is not None)
    chained = plan.chain.auto_requeue and plan.chain.mode == "singleton"
    followed = chained and _queue_successor(run, plan, scheduler, attempt, job_id, changed=changed)
    # a job that outlives a node must stay requeueable: after a loss Slurm may refuse changes of it
    followed = followed and not plan.outlives_nodes
    # at worst the job comes back beside its successor, and one of them is cancelled
    with logged(f"job {job.id} stays as it is", SchedulerError):
        scheduler.confirm_begin(job, followed=followed, log=failure_reason.stderr_file())
    evaluation_jobs.submit_due_evaluations(run, plan, scheduler_for_plan(plan, run, patience=0))
    campaign.start_due_members_of(run)
    log_line(f"attempt {attempt.number}, job {job_id}: {decision.reason}")
    print(attempt.path, file=raw_stream(sys.stdout))  # the batch script reads it
    return 0


def end_attempt(run: Run, number: int, exit_code: int) -> int:
    """Record how the attempt ended, and continue or end the chain; safe to call again. Returns the exit code."""
    plan = _plan_of_job(run, Plan.load_in_job, "go on")
    attempt = run.attempt(number)
    started = attempt.started_record()
    newest = run.newest_begun()
    if newest is not None and newest.number != number:
        log_line(f"attempt {number} has been overtaken; its end changes nothing")
        return 0
    patience = CONTROLLER_PATIENCE
    if plan.chain.mode == "requeue" and (over := attempt.job_end_time(started)) is not None:
        patience = max(patience, over - time.time())  # no other program would requeue this job
    scheduler = scheduler_for_plan(plan, run, patience=patience)
    own = scheduler.current_job_id()
    record = attempt.read_end()
    if record is None:
        cancelled = _cancelled(attempt, started, scheduler)
        reservation = _reservation_over(run, plan, started, scheduler, own)
        limit = budget.budget_end(run, plan, nodes=plan.nodes_of_job, start=time.time())
        reservation = reservation or budget.why_over(run, plan, limit, started.grace_period)
        with _told_to_slurm(run, plan, scheduler, cancelled=cancelled):
            record = _close(run, plan, attempt, exit_code, cancelled=cancelled, reservation=reservation)
    log_line(f"attempt {number} ended: {record.cause}: {record.reason}; newest checkpoint {record.durable_iteration}")
    chain_end = record.verdict
    if chain_end is None and record.action in ("continue", "retry"):
        chain_end = jobs.continue_chain(run, plan, scheduler, attempt, own=own, delay=record.delay)
    if chain_end is not None:
        log = failure_reason.attempt_log(attempt) if record.cause in ("failed", "fatal", "hang") else ""
        why = cause_words(record.failure, plan.chain.failure_signatures)
        words = "\n".join(filter(None, [f"cause: {why}" if why else "", failure_reason.log_excerpt(log)]))
        stop_chain(run, plan, scheduler, chain_end, own_job=own, words=words)
    evaluation_jobs.submit_due_evaluations(run, plan, scheduler_for_plan(plan, run, patience=0))
    if run.attempt_numbers()[-1] == number:  # else the next job's `watch` already writes them
        _update_views(run)  # last: by now the chain has been continued or ended
        background.send_notices(run, plan)
    leaves = record.action == "end"
    over = leaves or is_stopped(run)  # perhaps no later process starts the next run
    campaign.start_due_members_of(run, leaves=leaves, patience=CONTROLLER_PATIENCE if over else campaign.PATIENCE)
    return 0 if record.cause in ("done", "saved", "exit") else EXIT_ATTEMPT_FAILED


def _update_views(run: Run) -> None:
    """Update the merged metrics. On an error the next job's `watch` does it."""
    with logged("the merged views are left for later", OSError, RelayrunError):
        merged_metrics.MergedViews(run).update()


def next_grace_period(run: Run, plan: Plan, line: Lineage) -> tuple[float, float | None]:
    """Return the measured grace period of the next attempt and the duration of an evaluation, in seconds."""
    # an evaluated iteration has two lines
    newest = islice(merged_metrics.newest_valid_lines(run), 2 * time_limit.GRACE_STEPS)
    evaluations = merged_metrics.evaluation_seconds(run, time_limit.GRACE_SAVES)
    measured = time_limit.measured_grace_period(
        [entry["step_seconds"] for entry in newest if "step_seconds" in entry][::-1],
        line.newest_saves(time_limit.GRACE_SAVES),
        floor=plan.min_grace_period,
        ceiling=plan.max_grace_period,
        evaluation_seconds=evaluations,
    )
    evaluation = time_limit.percentile(evaluations, 0.95) if evaluations else None
    return plan.grace_period if measured is None else measured, evaluation


def _time_limit(plan: Plan, job: Job) -> float:
    """Return the seconds that Slurm or the reservation gives the job; at most the time limit of the plan."""
    if job.end_time is None or job.start_time is None or job.end_time - job.start_time > plan.time_limit - 1:
        return plan.time_limit
    return job.end_time - job.start_time


def _plan_for_time_limit(plan: Plan, job: Job) -> Plan:
    """Return the plan with the grace periods for the job's time limit if that is less than the plan's."""
    limit = _time_limit(plan, job)
    if limit >= plan.time_limit:
        return plan
    ceiling = min(plan.max_grace_period, limit / 2)
    first = ceiling if plan.min_grace_period == plan.max_grace_period else time_limit.first_grace_period(limit)
    return replace(
        plan,
        grace_period=min(plan.grace_period, first),
        min_grace_period=min(plan.min_grace_period, ceiling),
        max_grace_period=ceiling,
    )


def _open_attempt(
    run: Run, plan: Plan, scheduler: Scheduler, job: Job, line: Lineage, base: ResumePoint, *, rolled_back: bool
) -> Attempt:
    run.attempts.mkdir(exist_ok=True)
    number = max(run.attempt_numbers(), default=0) + 1
    previous = run.newest_begun()
    previous_end = None if previous is None else previous.read_end()
    attempt = run.attempt(number)
    attempt.path.mkdir()
    attempt.make_secret()
    fsync_directory(run.attempts)
    plan, ahead = _plan_for_time_limit(plan, job), chain_state.clock_ahead(job, scheduler)
    leave_before, evaluation = next_grace_period(run, plan, line)
    for text in line.quarantine(base, attempt=number):
        log_line(text)
    stderr = failure_reason.stderr_file()
    trainer = trainer_of(plan, run)
    begin = AttemptStart(
        attempt=number,
        job_id=job.id,
        job_name=plan.job_name,
        nodes=job.nodes,
        config_revision=plan.config_revision,
        base_iteration=base.iteration,
        base_path=base.path,
        rolled_back=rolled_back,
        start_time=time.time(),
        job_end_time=None if job.end_time is None else job.end_time + ahead,
        clock_ahead=ahead,
        job_submit_time=job.submit_time,
        job_eligible_time=job.eligible_time,
        job_start_time=job.start_time,
        script_time=chain_state.job_script_time(),
        previous_job_end=None if previous is None else chain_state.previous_job_end(previous, scheduler, own=job.id),
        grace_period=leave_before,
        evaluation_seconds=evaluation,
        min_grace_period=plan.min_grace_period,
        max_grace_period=plan.max_grace_period,
        log=stderr,
        log_offset=log_size(stderr),
        output_offset=log_size(stdout_beside(stderr)),
        folder=os.getcwd(),
        options=dict(job.options),
        previous_end=None if previous_end is None else f"{previous_end.cause}: {previous_end.reason}",
    )
    begin.write(attempt.begin)
    for folder in (attempt.heartbeats, attempt.failures, run.stacks(number)):
        folder.mkdir(parents=True, exist_ok=True)
    if plan.setup:
        script = job_script.setup_script(plan.setup, report=str(attempt.setup_failed))
        write_atomic(attempt.setup, script, mode=0o600)
    for text in trainer.prepare(base, attempt=number):
        log_line(text)
    variables = _environment(run, plan, scheduler, job, trainer, attempt, begin)
    write_atomic(attempt.path / "job.env", variables, mode=0o600)
    return attempt


def _queue_successor(run: Run, plan: Plan, scheduler: Scheduler, attempt: Attempt, own: str, *, changed: bool) -> bool:
    """Queue the next job; return whether one waits. On an error `watch` tries again. `changed`: a person changed this
    job while it waited."""
    try:
        # the end of the job before may have queued one that does not know the change
        for job in jobs.pending_jobs(plan, scheduler, own=own) if changed else []:
            jobs.cancel_job(scheduler, job)
        jobs.ensure_successor(run, plan, scheduler, attempt, own=own)
    except SchedulerError as error:
        attempt.retry_successor.touch()
        with contextlib.suppress(OSError):  # for a person, if the job dies alone
            attempt.retry_successor.write_text(error.message, encoding="utf-8")
        log_line(f"no successor yet: {error.message}")
        return False
    return True


def _reservation_over(run: Run, plan: Plan, started: AttemptStart, scheduler: Scheduler, own: str) -> str:
    """Return a sentence if the job's reservation, which Slurm may have removed from it, ends too soon; else ""."""
    name = started.options.get("reservation")
    job = scheduler.query(own) if name is not None else None
    if name is None or job is None:
        return ""
    end = scheduler.reservation_end(name, for_good=True)
    if end == math.inf or (
        "reservation" in job.options
        and (end is None or time.time() < end - started.grace_period - USEFUL_RESERVATION_SECONDS)
    ):
        return ""
    for job in map(scheduler.query, [job.id for job in jobs.pending_jobs(plan, scheduler, own=own)]):
        if job is not None and job.state != RESERVATION_GONE and job.options.get("reservation") != name:
            return ""  # a person moved it to another reservation
    ended = end is None or time.time() >= end
    when = "ended" if ended else f"ends at {time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(end))}"
    command = shlex.join(["relayrun", "resume", str(run.path), "--set", "job.reservation=null"])
    return f"reservation {name} {when}; to go on without it: {command}"


def _close(
    run: Run,
    plan: Plan,
    attempt: Attempt,
    exit_code: int,
    *,
    cancelled: bool,
    cancelled_by: str | None = None,
    reservation: str = "",
    end_time: float | None = None,
) -> AttemptEnd:
    """Write the end of an attempt. `end_time`: the end of its job; None: now."""
    started = attempt.started_record()
    _conclude(run, plan, attempt, started, exit_code)
    outcome, hang = AttemptOutcome.read(attempt.outcome), Hang.read(attempt.hang)
    left = exit_code != decisions.UNKNOWN_EXIT_CODE and outcome is not None and outcome.outcome != "fatal"
    if left and trainer_of(plan, run).lacks_hashes:
        background.hash_last_checkpoint(run, plan, job_end=attempt.job_end_time(started))
    now = checkpoint_records.resume_point(run)
    no_time = outcome is not None and outcome.outcome == "saved" and time_limit.had_no_time(attempt)
    progress = now.iteration > started.base_iteration
    failed = failure_reason.FailureReason(words="")
    if not (outcome or hang):
        failed = failure_reason.why_failed(run, plan, attempt, started, exit_code)
    fatal, said = failed.fatal, failed.said
    facts = decisions.EndFacts(
        outcome="fatal" if fatal else outcome.outcome if outcome else None,
        outcome_reason=fatal or (_leave_reason(plan, attempt, outcome) if outcome else ""),
        failure=failed.words,
        waits=said is not None and said.cause in ("network", "file system"),
        same_again=failed.same,
        exit_code=exit_code,
        hang=hang.words if hang and not outcome else None,
        cancelled=cancelled,
        cancelled_by=cancelled_by,
        base_iteration=started.base_iteration,
        durable_iteration=now.iteration,
        total_steps=plan.total_steps,
        stop_after=plan.stop_after,
        failed_attempts=count_failed_attempts(run, plan, last=attempt.number - 1),
        chain=plan.chain,
        reservation=reservation,
        attempts_without_time=1 + chain_state.count_attempts_without_time(run, plan) if no_time else 0,
    )
    decision = decisions.decide_at_end(facts)
    record = AttemptEnd(
        attempt=attempt.number,
        cause=decisions.end_cause(facts),
        reason=decision.reason,
        exit_code=exit_code,
        durable_iteration=now.iteration,
        progress=progress,
        end_time=time.time() if end_time is None else end_time,
        action=decision.action,
        chain_end=decision.chain_end,
        delay=decision.delay,
        no_time=no_time,
        failure="" if said is None else said.name,
        failure_key="" if said is None else said.key,
    )
    _record_node_failures(run, plan, attempt, started, record, said)
    if record.cause in ("failed", "unknown", "hang"):
        surroundings.record_surroundings(attempt, started)
    record.write(attempt.end)
    return record


def _leave_reason(plan: Plan, attempt: Attempt, outcome: AttemptOutcome) -> str:
    """Return why rank 0 left and, if it saved to be resumed, that the start took most of the time limit."""
    if outcome.outcome != "saved":
        return outcome.reason
    short = time_limit.explain_short_training_time(attempt, now=outcome.time, asked=plan.time_limit)
    return "; ".join(filter(None, [outcome.reason, short]))


def _record_node_failures(
    run: Run, plan: Plan, attempt: Attempt, started: AttemptStart, end: AttemptEnd, said: Statement | None
) -> None:
    record = partial(excluded_nodes.record_node_failures, run, attempt.number, now=end.end_time)
    record(node_health.sick_nodes(attempt), sick=True)
    if end.cause in ("failed", "unknown"):
        log, failures = failure_reason.first_failure_log(plan, attempt), failure_reason.read_failures(attempt)
        more, ntasks = plan.chain.failure_signatures, plan.rank_count(started.options)
        blame = error_lines.blamed_nodes(log, failures, ntasks=ntasks, said=said, more=more)
        record(blame)
        for node, reason in blame.items():
            log_line(f"a failure counted against node {node}: {reason}")
    record({node: each.words for each in restarts.read_failed_restarts(attempt) for node in each.lost})


def _conclude(run: Run, plan: Plan, attempt: Attempt, started: AttemptStart, exit_code: int) -> None:
    """Complete the records that a foreign program does not write. No rank is asked any more."""
    newest = restarts.attempt_start_of_restart(attempt, started)
    observer = trainer_of(plan, run).follow(newest, signal_ranks=lambda _number: None)
    if observer is not None:
        observer.conclude(None if exit_code == decisions.UNKNOWN_EXIT_CODE else exit_code)


def _close_predecessor(run: Run, plan: Plan, scheduler: Scheduler) -> tuple[bool, ChainEnd | None]:
    """Write the end that a killed batch script left out; return whether its job was cancelled, and its verdict. The
    scheduler is asked even if an end exists: a script can be killed, or misled, in the last seconds of its job."""
    attempt = run.newest_begun()
    if attempt is None:
        return False, None
    record, resumed = attempt.read_end(), attempt.number <= plan.submitted_after_attempt
    if resumed and record is not None:
        return False, None
    started = attempt.started_record()
    cancelled = _cancelled(attempt, started, scheduler)
    if record is None:
        end_time = chain_state.previous_job_end(attempt, scheduler, own=scheduler.current_job_id())
        if resumed and end_time is None:  # perhaps days ago: accounting knows
            since = started.start_time - 3600
            known = scheduler.history.allocations(plan, since=since, job_ids=[started.job_id])
            for each in (each for each in known if each.job_id == started.job_id and each.end is not None):
                end_time, cancelled = each.end, each.state == "CANCELLED"
        by = scheduler.cancelled_by(started.job_id) if cancelled else None
        code = decisions.UNKNOWN_EXIT_CODE
        with _told_to_slurm(run, plan, scheduler, cancelled=cancelled and not resumed, by=by):
            record = _close(run, plan, attempt, code, cancelled=cancelled, cancelled_by=by, end_time=end_time)
    if resumed:  # the record alone: a person has submitted since
        return False, None
    return cancelled, record.verdict or jobs.end_by_cancelled_successor(attempt, scheduler)


@contextlib.contextmanager
def _told_to_slurm(
    run: Run, plan: Plan, scheduler: Scheduler, *, cancelled: bool, by: str | None = None
) -> Iterator[None]:
    """Cancel the queued jobs if the run directory takes no record of the block, and the job of the attempt was
    `cancelled`: later no job could know that, since Slurm forgets jobs."""
    try:
        yield
    except OSError as error:
        if cancelled:
            log_line(jobs.stop_chain_without_files(run, plan, scheduler, error, user=by or jobs.SOMEBODY))
        raise


def _cancelled(attempt: Attempt, started: AttemptStart, scheduler: Scheduler) -> bool:
    """Return whether a person cancelled the attempt's job. The chain records its own cancellations before."""
    return scheduler.cancelled(started.job_id, nodes=started.nodes) and not attempt.replaced_by.exists()


def _environment(
    run: Run, plan: Plan, scheduler: Scheduler, job: Job, trainer: Trainer, attempt: Attempt, begin: AttemptStart
) -> str:
    """Return the text of an attempt's job.env, which job.sh sources: defaults of every rank, overridden by the site's
    variables; three arrays; the signal to leave, empty if only a file asks for it."""
    leave = trainer.leave_signal
    launch = scheduler.rank_launch(plan, job, leave_signal=leave)
    where = [f"--run-dir={run.path}", f"--attempt={attempt.number}"]
    own = trainer.environment(begin)
    path = [*filter(None, own.get("PYTHONPATH", "").split(":")), *job_script.python_path(plan)]
    environment = {
        **job_script.rank_defaults(
            job.options.get("cpus-per-task", str(plan.cpus_per_task)), trainer=plan.trainer, site=plan.environment
        ),
        "TORCH_FR_DUMP_TEMP_FILE": str(run.stacks(attempt.number) / "nccl-trace-"),  # torch appends the rank
        **launch.environment,
        **own,
        **plan.environment,
        "PYTHONPATH": ":".join(dict.fromkeys([*path, *user_python_path(os.environ)])),
    }
    program = job_script.rank_program(plan, trainer.command(begin), where=where)
    command = job_script.task_command(plan, launch.command, program, setup=attempt.setup, nodes=launch.nodes)
    lines = [
        *([f"unset {' '.join(launch.unset)}"] if launch.unset else []),
        *job_script.export_lines(environment),
        f"modules=({shlex.join(plan.modules)})",
        f"task_command=({shlex.join(command)})",
        f"signal_command=({shlex.join(launch.signal_command)})",
        f"leave_signal={'' if leave is None else leave.name.removeprefix('SIG')}",
        f"hang_seconds={max(60, math.ceil(plan.chain.hang_timeout))}",  # the watch may wait for a slow file system
    ]
    # Slurm's warning is the plan's: in a job with less time it comes with the start, and leave_from says it is early
    if _time_limit(plan, job) < plan.time_limit and begin.grace_period < plan.signal_seconds:
        lines.append(f"leave_from={math.floor((begin.job_end_time or 0) - begin.grace_period)}")
    return "\n".join(lines) + "\n"


def stop_chain(run: Run, plan: Plan, scheduler: Scheduler, ended: ChainEnd, *, own_job: str, words: str = "") -> None:
    """Write the reason to STOP first, so that a successor that starts meanwhile stops too; then cancel the queued jobs.
    Raises OSError if STOP cannot be written: then no job is cancelled, and the next job decides the same."""
    write_stop(run, ended, words=words)
    log_line(f"the chain ends: {ended.reason}")
    with logged("queued jobs not cancelled", SchedulerError):  # every job that starts finds STOP
        jobs.cancel_fallback_jobs(plan, scheduler)
        for job in jobs.pending_jobs(plan, scheduler, own=own_job):
            jobs.cancel_job(scheduler, job)
