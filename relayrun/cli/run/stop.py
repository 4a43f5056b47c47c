"""`relayrun save`, `relayrun stop` and `relayrun cancel`: ask a chain for a checkpoint, or end it.

No job of a chain starts after a stop. The exit trigger is written first: a running job, or a job that starts
meanwhile, obeys it. If the chain has no job, this command ends the chain itself.
"""

from __future__ import annotations

import argparse
import os
import time

from relayrun.cli import add_run
from relayrun.control import chain_state
from relayrun.control.chain import campaign, supervisor
from relayrun.control.chain.jobs import cancel_chain, stop_chain_without_files
from relayrun.control.rundir import find_runs, triggers
from relayrun.control.rundir.campaign import campaign_folders
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import Run, read_stop, stop_reason
from relayrun.control.scheduler.base import Job, Scheduler
from relayrun.errors import RunDirError, SchedulerError, user_name
from relayrun.watch import unsent_notices
from relayrun.watch.status import queue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun save`, `relayrun stop` and `relayrun cancel`."""
    add_run(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Request a checkpoint, or end the chain, after a checkpoint or at once."""
    print(ask(find_runs.find_run(options.name), options.command))
    return 0


def ask(found: Run, command: str) -> str:
    """Save, stop or cancel; return a sentence about the effect. Raises RelayrunError."""
    scheduler = queue.run_scheduler(found)
    if command == "save":
        said = request_save(found, scheduler)
    else:
        end = request_stop if command == "stop" else cancel_chain
        said = end(found, scheduler, user=user_name(os.geteuid()))
    unsent_notices.send_in_background(found)
    campaign.start_due_members(campaign_folders([found]))
    return said


def request_save(run: Run, scheduler: Scheduler) -> str:
    """Request a checkpoint; return a sentence about the effect.

    Raises RunDirError if this user may not, or if the run has no job.
    """
    plan = Plan.load(run)
    ended = stop_reason(run)
    if ended is not None:
        raise RunDirError(f"the chain of this run has ended: {ended}", where=run.stop, hint="there is nothing to save")
    try:
        jobs = scheduler.jobs(plan, anyone=True)
    except SchedulerError as error:
        triggers.touch_trigger(run, "save")
        return f"the job that runs saves after its step (the scheduler did not answer: {error.message})"
    at_work = _running_job(run, plan, jobs)
    if not jobs and at_work is None:
        raise RunDirError("no job of this run is running or queued, so there is nothing to save", where=run.path)
    try:
        triggers.touch_trigger(run, "save")
    except OSError as error:
        hint = f"`relayrun status {run.path}` says what could go: a checkpoint needs more room than the trigger"
        raise RunDirError(f"the trigger cannot be made: {error.strerror}", where=run.triggers, hint=hint) from None
    answer = f"the answer will lie in {run.triggers / 'save.done'}"
    if at_work is not None:
        return f"job {at_work} saves after the step that is under way and goes on; {answer}"
    return f"no job runs now; job {jobs[0].id} answers when it has started; {answer}"


def request_stop(run: Run, scheduler: Scheduler, *, user: str) -> str:
    """Ask a running attempt to save and end the chain, or end the chain here; return a sentence about the effect.

    Raises RunDirError if this user may not, or if there is no such run.
    """
    plan = Plan.load(run)
    try:
        return _stop_with_files(run, plan, scheduler, user=user)
    except OSError as error:
        if isinstance(error, PermissionError) or chain_state.is_owned_by_another_user(plan):
            raise
        return stop_chain_without_files(run, plan, scheduler, error, user=user)


def _stop_with_files(run: Run, plan: Plan, scheduler: Scheduler, *, user: str) -> str:
    """End the chain by its exit trigger and STOP. Raises OSError if a file cannot be written."""
    ended = read_stop(run)
    triggers.touch_trigger(run, "exit")
    try:
        at_work = _running_job(run, plan, scheduler.jobs(plan, anyone=True)) if ended is None else None
        if at_work is not None:
            return f"job {at_work} saves after the step that is under way, cancels what is queued and leaves"
        try:
            if chain_state.is_owned_by_another_user(plan):  # its plan may name the jobs of this user
                raise PermissionError
            supervisor.stop_chain(run, plan, scheduler, ended or ChainEnd("stopped", f"stopped by {user}"), own_job="")
        except PermissionError:
            return "you may not write STOP yourself: the next job of this run finds the trigger and ends the chain"
        left = scheduler.jobs(plan, anyone=True)
    except SchedulerError as error:
        return f"the job that runs, or else the next that starts, obeys (the scheduler did not answer: {error.message})"
    if left:
        names = ", ".join(f"{job.id} ({job.state.lower()})" for job in left)
        return f"what is still there ends at once or, where it runs, saves and leaves: {names}"
    trigger = triggers.read_trigger(run, "exit")
    if trigger is not None:
        newest = next(Lineage(run).backwards(), None)
        at = newest.commit.iteration if newest else 0
        triggers.acknowledge_trigger(run, trigger, iteration=at, result="the chain ends: no job was there to save")
    return f"the chain has ended: {stop_reason(run)}; nothing is queued"


def _running_job(run: Run, plan: Plan, jobs: list[Job]) -> str | None:
    """Id of the job that has its nodes. Another user's job may be hidden; its signs of life are not."""
    foreign = chain_state.is_owned_by_another_user(plan)
    sign = chain_state.newest_life_sign(run, plan, now=time.time()) if foreign else None
    return next((job.id for job in jobs if not job.waits), sign.job_id if sign else None)
