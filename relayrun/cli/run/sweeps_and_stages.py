"""`relayrun sweep` and `relayrun stages`: submit, show, stop and resume several runs of one config."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from relayrun.cli import add_set_option
from relayrun.cli.run import stop as run_stop
from relayrun.cli.run.submit import YES_WORDS, check_plan
from relayrun.config.compose import campaign as config
from relayrun.config.compose import resolve
from relayrun.config.sections.batch_systems import batch_system
from relayrun.config.sections.chain import ChainSection
from relayrun.config.sections.dataclass_section import read_section
from relayrun.control.chain import campaign as supervisor
from relayrun.control.chain import jobs
from relayrun.control.chain.budget import SHARED_SETTINGS
from relayrun.control.rundir import campaign
from relayrun.control.rundir.campaign import Campaign, CampaignMember
from relayrun.control.rundir.find_runs import find_campaign
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import stop_reason
from relayrun.control.scheduler.factory import local_scheduler
from relayrun.control.scheduler.local import print_event
from relayrun.errors import InputError, RelayrunError, RunDirError, SchedulerError, user_name
from relayrun.leftovers import folder_lock
from relayrun.submit import campaign as submission
from relayrun.submit.cost import confirm_cost
from relayrun.watch import unsent_notices
from relayrun.watch.follow import ProgressFollower
from relayrun.watch.status import queue
from relayrun.watch.status.tables import run_cells
from relayrun.watch.text import json_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun sweep` and `relayrun stages`."""
    acts = parser.add_subparsers(dest="act", required=True)
    act = acts.add_parser("submit", help="make the directories of all runs, and begin the first ones")
    act.add_argument("config", type=Path, help="run config with a section `sweep` or `stages`")
    add_set_option(act, "override a setting of all runs, or of the section: --set sweep.at_once=2")
    act.add_argument("--yes", action="store_true", help=YES_WORDS)
    act.add_argument("--dry-run", action="store_true", help="check it and print the runs; write and submit nothing")
    act.set_defaults(run=submit)
    for name, run, words in (
        ("status", status, "the runs beside each other: what differs, state, loss, cost"),
        ("stop", stop, "begin nothing more; runs that are under way save and end"),
        ("resume", resume, "go on with a sweep or stages that were stopped, or whose terminal has gone"),
    ):
        act = acts.add_parser(name, help=words)
        act.set_defaults(run=run)
        act.add_argument(
            "name", metavar="CAMPAIGN", help="directory of the sweep or stages, or project/name below logs/runs"
        )
        if name == "status":
            act.add_argument("--json", action="store_true")
        if name == "resume":
            add_set_option(act, "change the budget of all runs together: --set chain.max_node_hours=480")


def submit(options: argparse.Namespace) -> int:
    """Submit a campaign or, with --dry-run, print its runs; return 1 if a local run was not completed."""
    described = config.describe_campaign(options.config, options.overrides, kind=options.command)
    if options.dry_run:
        for member in submission.make_campaign(described).members:
            words = ", ".join(
                filter(None, [config.settings_in_words(member.settings), submission.start_condition(member)])
            )
            print(f"{member.name}  {member.run_dir}  {words}", flush=True)
        return check_plan(described, resolve.read_settings(options.config, options.overrides))
    confirm_cost(submission.campaign_cost(described), yes=options.yes)
    new = submission.submit_campaign(described)
    folder = described.folder
    print(f"{len(described.runs)} runs, directory {folder}" + ("" if new else " (submitted before)"), flush=True)
    return start_due_members(folder)


def start_due_members(folder: Path) -> int:
    """Start the due members; with the local scheduler run all. Returns an exit code."""
    whole = Campaign.load(folder)
    if batch_system(whole.scheduler).one_machine:
        return run_here(folder, whole)
    look = supervisor.start_due_in_campaign(folder)
    for words in look.begun:
        print(words)
    _print_blocked(folder, look.stuck)
    return int(bool(look.stuck))


def _print_blocked(folder: Path, stuck: Mapping[str, str]) -> None:
    for words in supervisor.stuck_lines(stuck):
        print(f"{folder.name}: {words}", file=sys.stderr, flush=True)


def run_here(folder: Path, whole: Campaign) -> int:
    """Run all members one after the other on this machine, as their conditions allow; return an exit code."""
    tried: set[str] = set()
    stuck: dict[str, str] = {}
    while True:
        look = supervisor.start_due_in_campaign(folder, from_terminal=True)
        for words in look.begun:
            print(words, flush=True)
        _print_blocked(folder, {name: why for name, why in look.stuck.items() if stuck.get(name) != why})
        stuck = look.stuck
        left = [member for member in whole.members if member.name not in tried]
        member = next((each for each in left if _is_running(folder, each)), None)
        member = member or next((each for each in whole.members if _evaluates(each)), None)
        if member is None:
            break
        try:
            if member in left and _is_running(folder, member):
                tried.add(member.name)
                _run_queue(member)
            else:
                local_scheduler(member.run).run_queue(print_event)
        except (RunDirError, OSError) as error:
            print(f"{member.run.path.name}: it cannot be run: {error}", file=sys.stderr, flush=True)
    entries = submission.read_campaign_status(folder, now=time.time())
    submission.print_campaign(entries)
    return int(any(entry.state != "done" for entry in entries))


def _evaluates(member: CampaignMember) -> bool:
    """True if the chain has ended and an evaluation waits without a terminal: a stage may wait for it."""
    try:
        return stop_reason(member.run) is not None and local_scheduler(member.run).has_waiting_auxiliary
    except (RelayrunError, OSError, ValueError):
        return False


def _is_running(folder: Path, member: CampaignMember) -> bool:
    """True if a member has started and its chain has not ended, or if its records cannot be read."""
    try:
        return campaign.has_member_started(folder, member) and stop_reason(member.run) is None
    except (RelayrunError, OSError, ValueError):
        return True


def _run_queue(member: CampaignMember) -> None:
    run, plan = member.run, Plan.load(member.run)
    scheduler = local_scheduler(run)
    if not scheduler.jobs(plan):  # the terminal that ran it is gone, and its job too
        jobs.queue_first_job(run, plan, scheduler)
    print(f"{plan.run}: run directory {run.path}", flush=True)
    scheduler.run_queue(print_event, ProgressFollower(run, total_steps=plan.total_steps).poll)
    unsent_notices.send_in_background(run)


def status(options: argparse.Namespace) -> int:
    """Print the state of every run; nothing is started. Raises RelayrunError."""
    folder = find_campaign(options.name)
    look = supervisor.look_at_campaigns([folder])[folder]
    entries = submission.read_campaign_status(folder, now=time.time())
    if options.json:
        print(json_text([entry.as_json() for entry in entries]))
    else:
        submission.print_campaign(entries)
        for line in supervisor.campaign_lines(folder, look):
            print(line, file=sys.stderr)
    return 0


def stop(options: argparse.Namespace) -> int:
    """Start no more members, and stop running ones, each after a checkpoint. Raises RelayrunError."""
    folder = find_campaign(options.name)
    whole, user = Campaign.load(folder), user_name(os.geteuid())
    failed = False
    try:
        with folder_lock(folder) as mine:  # no other process starts members now
            if not mine:
                raise RunDirError("somebody begins runs of it right now", where=folder, hint="try again")
            campaign.write_campaign_stop(folder, f"stopped by {user}")
            try:
                supervisor.record_queued_members(folder, whole, patience=supervisor.PATIENCE)
            except SchedulerError as error:
                failed = True
                words = f"it is not known whether a job was queued that nobody wrote down ({error.message})"
                print(f"{words}: call it again", file=sys.stderr, flush=True)
    except PermissionError:
        hint = f"let {user_name(whole.owner)} stop it; `relayrun stop` asks the runs that are under way"
        raise RunDirError("you may not write here", where=folder, hint=hint) from None
    except OSError as error:  # e.g. a full disk: running members are stopped below
        failed = True
        print(f"{folder}: {error.strerror}: runs that wait may still begin, call it again", file=sys.stderr, flush=True)
    else:
        print(f"nothing more of {whole.name} begins")
    for member in whole.members:
        try:
            if _is_running(folder, member):
                words = run_stop.request_stop(member.run, queue.run_scheduler(member.run), user=user)
                print(f"{member.run.path.name}: {words}")
                unsent_notices.send_in_background(member.run)
        except (RelayrunError, OSError, ValueError) as error:
            failed = True
            print(f"{member.run.path.name}: it could not be stopped: {error}", file=sys.stderr, flush=True)
    return int(failed)


def resume(options: argparse.Namespace) -> int:
    """Let members start again; print the command for each run whose own chain was stopped. Raises RelayrunError."""
    folder = find_campaign(options.name)
    whole = Campaign.load(folder)
    if whole.owner != os.geteuid():
        raise RunDirError(f"these runs are {user_name(whole.owner)}'s", where=folder, hint="submit runs of your own")
    if options.overrides:
        _change_budget(folder, whole, options.overrides)
    campaign.campaign_stop_path(folder).unlink(missing_ok=True)
    for member in whole.members:  # on request, try what Slurm refused at once
        campaign.member_refused_path(folder, member.name).unlink(missing_ok=True)
    code = start_due_members(folder)
    for entry in submission.read_campaign_status(folder, now=time.time()):
        if entry.state in ("stopped", "failed"):
            words = f"{run_cells(entry.status)[0]} is {entry.state}: {entry.words}"
            print(f"{words}\n  -> relayrun resume {entry.status.path}")
    return code


def _change_budget(folder: Path, whole: Campaign, overrides: Sequence[str]) -> None:
    """Record limits for all runs together; those that run obey them within a minute. Raises RelayrunError."""
    given = resolve.read_overrides(overrides).values
    changed = given.pop("chain", {})
    if given or not changed.keys() <= {*SHARED_SETTINGS}:
        names = ", ".join(f"chain.{name}" for name in SHARED_SETTINGS)
        raise InputError("this is no setting of a budget", where=f"--set {overrides[-1]}", hint=f"give {names}")
    changed = whole.budget | changed
    try:
        read_section(ChainSection, changed, "chain")
    except ValueError as error:
        raise InputError(str(error), where="--set") from None
    replace(whole, budget=changed).save(folder)
