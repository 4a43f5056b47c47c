"""The little program beside the ranks: `begin` before them, `watch` beside them, `end` after them.

It gathers facts, lets `decide` judge, and acts: records, the successor, the end of the chain. It keeps no
state but the run directory's files, so it may be killed at any point; the next job's `begin` makes up for
what a killed `end` left undone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from relayrun.chain import decide, render
from relayrun.chain.plan import Plan
from relayrun.chain.scheduler import Job, Scheduler, for_plan
from relayrun.errors import RunDirError, SchedulerError
from relayrun.files import fsync_directory, write_atomic
from relayrun.rundir import triggers, views
from relayrun.rundir.layout import AttemptDir, RunDir
from relayrun.rundir.records import Begin, End, Left, durable

CHAIN_ENDS = 10
"""Exit code of `begin` when the ranks must not start."""

WATCH_SECONDS = 2.0


def begin(run: RunDir) -> int:
    """Open an attempt, or end the chain. Prints the attempt's directory, for job.sh."""
    plan = Plan.load(run)
    scheduler = for_plan(plan, run)
    job_id = scheduler.current_job_id()
    job = scheduler.query(job_id)
    if job is None:
        raise SchedulerError(f"the scheduler does not know the job {job_id} that this runs in")
    if job.name != plan.job_name:  # the first job of a Bash launcher: from here on a singleton of its chain
        scheduler.rename(job_id, plan.job_name)
    cancelled = _close_predecessor(run, scheduler)
    base = durable(run)
    failed = failed_attempts(run, plan)
    trigger = triggers.look(run, "exit")
    pending = [other.id for other in scheduler.jobs(plan) if other.id != job_id]
    decision = decide.at_begin(
        decide.BeginFacts(
            stopped=_stop_reason(run),
            durable_iteration=base.iteration,
            total_steps=plan.total_steps,
            exit_trigger=None if trigger is None else trigger.user,
            predecessor_cancelled=cancelled,
            failed_attempts=failed,
            max_failed_attempts=plan.max_failed_attempts,
            auto_requeue=plan.auto_requeue,
            successor_pending=bool(pending),
        )
    )
    if decision.action == "stop":
        if trigger is not None:
            triggers.acknowledge(run, trigger, iteration=base.iteration, result=f"the chain ends: {decision.reason}")
        _stop_chain(run, plan, scheduler, decision.reason, own_job=job_id)
        views.write_views(run)
        return CHAIN_ENDS
    attempt = _new_attempt(run)
    now = time.time()
    Begin(
        attempt=attempt.number,
        job_id=job_id,
        job_name=plan.job_name,
        nodes=job.nodes,
        config_revision=plan.config_revision,
        base_iteration=base.iteration,
        base_path=base.path,
        start_time=now,
        job_end_time=job.end_time,
        lead=plan.lead,
        options=dict(job.options),
        previous_end=_previous_end(run, attempt.number),
    ).write(attempt.begin)
    run.debug.joinpath(attempt.path.name).mkdir(parents=True, exist_ok=True)
    write_atomic(attempt.path / "job.env", _environment(plan, scheduler, job, attempt.number))
    views.write_views(run)
    if decision.submit_successor:
        successor = scheduler.submit(plan, run.job_script, options=job.options)
        _log(f"queued job {successor} behind this one")
    _log(f"attempt {attempt.number}, job {job_id}: {decision.reason}")
    print(attempt.path)
    return 0


def watch(run: RunDir, number: int) -> int:
    """Keep the metrics view up to date until SIGTERM."""
    attempt = run.attempt(number)
    leaving = False

    def leave(_number: int, _frame: FrameType | None) -> None:
        nonlocal leaving
        leaving = True

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    offset = 0
    parent = os.getppid()
    while not leaving and os.getppid() == parent:
        offset = _follow(attempt, run, offset)
        time.sleep(WATCH_SECONDS)
    return 0


def end(run: RunDir, number: int, exit_code: int) -> int:
    """Close the attempt: record how it ended and what becomes of the chain."""
    plan = Plan.load(run)
    scheduler = for_plan(plan, run)
    attempt = run.attempt(number)
    if run.attempt_numbers()[-1] != number:
        _log(f"attempt {number} has been overtaken; its end changes nothing")
        return 0
    record, decision = _close(run, plan, attempt, exit_code, scheduler.cancelled)
    views.write_views(run)
    _log(f"attempt {number} ended: {record.cause}: {record.reason}; durable iteration {record.durable_iteration}")
    own = scheduler.current_job_id()
    if decision.action == "stop":
        _stop_chain(run, plan, scheduler, decision.reason, own_job=own)
    elif decision.action == "retry":
        _cancel_others(plan, scheduler, own)
        options = started.options if (started := Begin.read(attempt.begin)) else {}
        successor = scheduler.submit(plan, run.job_script, options=options, delay=decision.delay)
        _log(f"queued job {successor}, not before {decision.delay} s from now")
    return 0 if record.cause in ("done", "saved", "exit") else 1


def failed_attempts(run: RunDir, plan: Plan) -> int:
    """Attempts in a row, up to the newest, that ended without durable progress since the last explicit submit."""
    count = 0
    for number in reversed(run.attempt_numbers()):
        record = End.read(run.attempt(number).end)
        if number <= plan.submitted_after_attempt or (record is not None and record.progress):
            break
        count += 1
    return count


def _close(
    run: RunDir, plan: Plan, attempt: AttemptDir, exit_code: int, cancelled: Callable[[str], bool]
) -> tuple[End, decide.Decision]:
    """Judge an attempt whose ranks have gone, and write its end.json."""
    started = Begin.read(attempt.begin)
    if started is None:
        raise RunDirError("this attempt never began", where=attempt.path)
    left = Left.read(attempt.outcome)
    now = durable(run)
    facts = decide.EndFacts(
        outcome=left.outcome if left else None,
        outcome_reason=left.reason if left else "",
        exit_code=exit_code,
        cancelled=cancelled(started.job_id),
        base_iteration=started.base_iteration,
        durable_iteration=now.iteration,
        total_steps=plan.total_steps,
        failed_attempts=failed_attempts(run, plan) - 1,  # it counts this one too, as long as it has no end
        max_failed_attempts=plan.max_failed_attempts,
        auto_requeue=plan.auto_requeue,
    )
    decision = decide.at_end(facts)
    cause = "cancelled" if facts.cancelled and facts.outcome in (None, "saved") else (facts.outcome or "failed")
    record = End(
        attempt=attempt.number,
        cause=cause,
        reason=decision.reason,
        exit_code=exit_code,
        durable_iteration=now.iteration,
        progress=now.iteration > started.base_iteration,
        end_time=time.time(),
    )
    record.write(attempt.end)
    return record, decision


def _close_predecessor(run: RunDir, scheduler: Scheduler) -> bool:
    """Write the end that a killed batch script left out; return whether its job had been cancelled.

    Asked also where an end is there: a script can be killed, or misled, in the last seconds of its job.
    """
    numbers = run.attempt_numbers()
    if not numbers:
        return False
    attempt = run.attempt(numbers[-1])
    started = Begin.read(attempt.begin)
    plan = Plan.load(run)
    if started is None or attempt.number <= plan.submitted_after_attempt:
        return False
    cancelled = scheduler.cancelled(started.job_id)
    if not attempt.end.exists():
        _close(run, plan, attempt, -1, lambda _job_id: cancelled)
    return cancelled


def _new_attempt(run: RunDir) -> AttemptDir:
    run.attempts.mkdir(exist_ok=True)
    number = max(run.attempt_numbers(), default=0) + 1
    attempt = run.attempt(number)
    attempt.path.mkdir()
    fsync_directory(run.attempts)
    return attempt


def _previous_end(run: RunDir, number: int) -> str | None:
    record = End.read(run.attempt(number - 1).end) if number > 1 else None
    return None if record is None else f"{record.cause}: {record.reason}"


def _environment(plan: Plan, scheduler: Scheduler, job: Job, attempt: int) -> str:
    """job.env: defaults that every rank needs, then the site's own, which win."""
    environment = {
        "PYTHONPATH": plan.package_root + (":" + os.environ["PYTHONPATH"] if os.environ.get("PYTHONPATH") else ""),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(plan.cpus_per_task),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron-core's overlap relies on the order of kernel launches
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **scheduler.rendezvous(job),
        **plan.environment,
    }
    return render.attempt_environment(
        environment=environment,
        modules=plan.modules,
        task_command=render.task_command(plan, scheduler.task_command(plan, job), attempt),
        signal_command=scheduler.signal_command(job.id),
    )


def _stop_reason(run: RunDir) -> str | None:
    try:
        return run.stop.read_text(encoding="utf-8").partition("\n")[0]
    except FileNotFoundError:
        return None


def _stop_chain(run: RunDir, plan: Plan, scheduler: Scheduler, reason: str, *, own_job: str) -> None:
    """Say why in STOP first, so that a successor that starts meanwhile stops too; then cancel what is queued."""
    if _stop_reason(run) is None:
        write_atomic(run.stop, f"{reason}\n\nThe chain has ended. To go on all the same: submit with --resume.\n")
    _log(f"the chain ends: {reason}")
    _cancel_others(plan, scheduler, own_job)


def _cancel_others(plan: Plan, scheduler: Scheduler, own_job: str) -> None:
    """Cancel the queued jobs of this chain, each by its id."""
    for job in scheduler.jobs(plan):
        if job.id != own_job and job.state == "PENDING":
            scheduler.cancel(job.id)
            _log(f"cancelled queued job {job.id}")


def _follow(attempt: AttemptDir, run: RunDir, offset: int) -> int:
    """Append what is new and whole in the attempt's metrics to the merged view; return the new offset."""
    try:
        with open(attempt.metrics, "rb") as file:
            file.seek(offset)
            new = file.read()
    except FileNotFoundError:
        return offset
    whole = new[: new.rfind(b"\n") + 1]
    if whole:
        with open(run.metrics_view, "ab") as view:
            view.write(whole)
    return offset + len(whole)


def _log(text: str) -> None:
    print(f"[relayrun {time.strftime('%Y-%m-%dT%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
