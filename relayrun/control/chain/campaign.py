"""Starts the members (runs) of a campaign, each exactly once: at the end of a chain, from its watch, or from a command.

The records alone decide which members may start, and every process that looks starts them under the campaign's lock. A
process that is killed between the order to Slurm and its record leaves a job with the name of the run, which the next
look finds. A member whose records cannot be read, that Slurm refuses, or whose condition can never hold is stuck: it is
reported and does not delay the others.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from relayrun.config.sections.batch_systems import batch_system
from relayrun.control.chain import budget, jobs
from relayrun.control.job_log import log_line
from relayrun.control.rundir import campaign, checkpoint_records
from relayrun.control.rundir.campaign import Campaign, CampaignMember, MemberRefused, MemberStarted
from relayrun.control.rundir.checkpoint_records import BEGINNING, ResumePoint
from relayrun.control.rundir.plan import Plan, chain_job_name, fallback_job_name
from relayrun.control.rundir.run import Run, is_stopped, read_stop
from relayrun.control.scheduler.base import Scheduler
from relayrun.control.scheduler.factory import scheduler_class, scheduler_for_plan
from relayrun.control.scheduler.slurm_commands import NoAnswerError, NotInstalledError, TooManyJobsError
from relayrun.errors import RelayrunError, RunDirError, SchedulerError
from relayrun.leftovers import folder_lock

PATIENCE = 5.0
"""Seconds for which a question to a controller that does not answer is repeated."""
REFUSED_RETRY_SECONDS = 30.0
"""Seconds until a member that Slurm refused is tried again, doubled each time: a refusal may pass, for example when
nodes are not back yet after a restart of the controller."""
REFUSED_RETRY_CEILING = 600.0
_REFUSED = "its first job is refused"
_FOR_NOW = (NoAnswerError, NotInstalledError, TooManyJobsError)
"""Errors that keep every member from being queued now, but not later."""
_UNREADABLE = (RelayrunError, OSError, KeyError, TypeError, ValueError, AttributeError)
"""Errors that missing, torn or edited records raise."""


class MemberStartError(RelayrunError):
    """One member cannot start; others may."""


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """The condition of a member that has not started."""

    base: ResumePoint | None = None
    """The checkpoint to start from; None: the member waits, or never starts."""
    why: str = ""
    stuck: bool = False
    """It starts only if a person changes something, as far as known."""
    again: float = 0.0
    """Time of the next try after a refusal of Slurm, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class CampaignPassResult:
    """The result of one look at a campaign."""

    begun: list[str] = field(default_factory=list)
    """The members that were started, in words."""
    stuck: dict[str, str] = field(default_factory=dict)
    """By member, why it needs a person to start; under `""` the reason that blocks all members."""
    due: str = ""
    """The members that could start now and by what, where the look itself starts nothing."""


def start_due_members_of(run: Run, *, leaves: bool = False, patience: float = PATIENCE) -> None:
    """Start the due members of the campaign that a run belongs to, if any. Errors are logged and left for later.

    `leaves`: this is the last job of the run's chain, even without STOP. `patience`: seconds of waiting for the
    controller and for the campaign's lock.
    """
    with contextlib.suppress(OSError):
        leaves = leaves or is_stopped(run)
    start_due_members(campaign.campaign_folders([run]), leaving=run if leaves else None, patience=patience)


def start_due_members(
    folders: Iterable[Path],
    *,
    leaving: Run | None = None,
    patience: float = PATIENCE,
    say: Callable[[str], None] = log_line,
) -> dict[Path, CampaignPassResult]:
    """Start the due members of these campaigns; return the result of each look by folder. Errors are logged."""
    return _visit(folders, partial(start_due_in_campaign, leaving=leaving, patience=patience), say)


def look_at_campaigns(folders: Iterable[Path]) -> dict[Path, CampaignPassResult]:
    """Return by folder which members of anybody's campaigns need a person or could start; nothing is started."""
    return _visit(folders, _look_at_campaign, lambda words: None)


def _visit(
    folders: Iterable[Path], visit: Callable[[Path], CampaignPassResult], say: Callable[[str], None]
) -> dict[Path, CampaignPassResult]:
    looks: dict[Path, CampaignPassResult] = {}
    for folder in folders:
        try:
            looks[folder] = visit(folder)
            for words in looks[folder].begun:
                say(words)
        except _UNREADABLE as error:
            looks[folder] = CampaignPassResult(stuck={} if isinstance(error, _FOR_NOW) else {"": _error_line(error)})
            say(f"the next run of {folder} is left for later: {_error_line(error)}")
    return looks


def start_due_in_campaign(
    folder: Path, *, from_terminal: bool = False, leaving: Run | None = None, patience: float = PATIENCE
) -> CampaignPassResult:
    """Start every due member of a campaign; return the result. Raises RunDirError, SchedulerError and OSError.

    `from_terminal`: this process runs the local queue; no other process would start local members. `leaving`: the run
    whose last job this is: a member that Slurm refused is tried at once, since no later look is certain.
    """
    whole, waiting = _waiting_members(folder)
    if not waiting:
        return CampaignPassResult()
    if whole.owner != os.geteuid() or (batch_system(whole.scheduler).one_machine and not from_terminal):
        return CampaignPassResult(stuck=_stuck(_judged(folder, whole, waiting)))
    whole = Campaign.load_trusted(folder)
    with folder_lock(folder, patience=patience) as mine:
        judged = _judged(folder, whole, waiting)
        if not mine or campaign.campaign_stop_reason(folder) is not None:
            return CampaignPassResult(stuck=_stuck(judged))
        return _begin_due(folder, whole, judged, leaving, patience)


def _look_at_campaign(folder: Path) -> CampaignPassResult:
    whole, waiting = _waiting_members(folder)
    judged = _judged(folder, whole, waiting)
    able = [member.name for member, ready in judged if ready.base is not None and not ready.stuck]
    names = ", ".join(able[: max(0, _room(folder, whole, len(able), None, PATIENCE))])
    due = f"{names}: a job of it, the sentinel, or `relayrun {whole.kind} resume {folder}` begins it"
    return CampaignPassResult(stuck=_stuck(judged), due=due if names else "")


def _waiting_members(folder: Path) -> tuple[Campaign, list[CampaignMember]]:
    """Return a campaign, and its members that have not started and may. Raises RunDirError."""
    if not campaign.is_campaign(folder):  # its submit was killed or still runs
        raise RunDirError("there is no campaign.json: its submit was killed, or it was moved or removed")
    whole = Campaign.load(folder)
    if campaign.campaign_stop_reason(folder) is not None:
        return whole, []
    return whole, [each for each in whole.members if not campaign.member_started_path(folder, each.name).exists()]


_JudgedMembers = list[tuple[CampaignMember, Readiness]]


def _judged(folder: Path, whole: Campaign, members: Sequence[CampaignMember]) -> _JudgedMembers:
    judged = [(member, ready) for member in members if (ready := member_readiness(folder, whole, member)) is not None]
    able = (member for member, ready in judged if ready.base is not None)
    if over := next(map(_budget_over, able), ""):
        return [(m, ready if ready.base is None else Readiness(why=over, stuck=True)) for m, ready in judged]
    return judged


def _budget_over(member: CampaignMember) -> str:
    """Return why the budget of the campaign lets no further member begin; empty if it does."""
    with contextlib.suppress(*_UNREADABLE):  # its start says what is wrong
        plan = Plan.load(member.run)
        end = budget.budget_end(member.run, plan, nodes=plan.nodes_of_job, start=time.time())
        return budget.why_over(member.run, plan, end, plan.min_grace_period)
    return ""


def _stuck(judged: _JudgedMembers) -> dict[str, str]:
    return {member.name: ready.why for member, ready in judged if ready.stuck}


def _begin_due(
    folder: Path, whole: Campaign, judged: _JudgedMembers, leaving: Run | None, patience: float
) -> CampaignPassResult:
    begun: list[str] = []
    stuck = _stuck(judged)
    now = time.time()
    able = [(member, ready) for member, ready in judged if ready.base is not None]
    due = [entry for entry in able if not entry[1].stuck]  # members that Slurm refused come last
    due += [entry for entry in able if entry[1].stuck and (leaving is not None or not now < entry[1].again)]
    room = _room(folder, whole, len(due), leaving, patience)
    for member, ready in due:
        if len(begun) >= room:
            break
        try:
            begun.append(_start_member(folder, member, ready.base or BEGINNING, patience))
            stuck.pop(member.name, None)
        except MemberStartError as error:
            stuck[member.name] = error.message
    return CampaignPassResult(begun=begun, stuck=stuck)


def _start_member(folder: Path, member: CampaignMember, base: ResumePoint, patience: float) -> str:
    """Queue the first job of a member unless it exists. Raises MemberStartError, SchedulerError and OSError."""
    run = member.run
    try:
        plan = Plan.load_trusted(run)
        newest = run.newest_begun()
        begun = None if newest is None else newest.read_begin()
    except _UNREADABLE as error:
        raise MemberStartError(f"{member.name} cannot begin: {_error_line(error)}") from None
    record = campaign.member_started_path(folder, member.name)
    record.parent.mkdir(parents=True, exist_ok=True)
    scheduler = scheduler_for_plan(plan, run, patience=patience)
    if begun is not None:  # the process that queued it died before the record, or a person submitted it
        job_id, how = begun.job_id, "had begun"
    elif found := scheduler.jobs(plan):
        job_id, how = found[0].id, "was queued"
    else:
        job_id, how = _queue(folder, member, plan, base, scheduler), "is queued"
    MemberStarted(job_id=job_id, time=time.time()).write(record)
    return f"{plan.run} {how}, job {job_id}" + (f", from {base.path}" if base.path else "")


def _queue(folder: Path, member: CampaignMember, plan: Plan, base: ResumePoint, scheduler: Scheduler) -> str:
    run = member.run
    if base.path is not None:
        plan = replace(plan, load_path=base.path, load_iteration=0 if member.counts_from_zero else base.iteration)
        try:
            plan.write(run.plan)
        except OSError as error:
            raise MemberStartError(f"the plan of {member.name} cannot be written: {_error_line(error)}") from None
    try:
        return jobs.queue_first_job(run, plan, scheduler)
    except _FOR_NOW:
        raise
    except (SchedulerError, OSError) as error:
        if found := scheduler.jobs(plan):
            return found[0].id
        if not isinstance(error, SchedulerError):
            raise MemberStartError(f"{member.name} cannot begin: {_error_line(error)}") from None
        path = campaign.member_refused_path(folder, member.name)
        before = MemberRefused.read(path)
        tries = 1 if before is None else before.tries + 1
        MemberRefused(reason=error.message, time=time.time(), tries=tries).write(path)
        raise MemberStartError(f"{_REFUSED}: {error.message}") from None


def member_readiness(folder: Path, whole: Campaign, member: CampaignMember) -> Readiness | None:
    """Return whether a member may start; None if it has started or was stopped. After a refusal it is stuck."""
    try:
        if campaign.member_started_path(folder, member.name).exists():
            return None
        if read_stop(member.run) is not None and member.run.newest_begun() is None:
            return None
        refused = MemberRefused.read(campaign.member_refused_path(folder, member.name))
    except _UNREADABLE as error:
        return Readiness(why=f"the records of {member.name} cannot be read: {_error_line(error)}", stuck=True)
    ready = condition_readiness(whole, member)
    if ready.base is None or refused is None:
        return ready
    again = refused.time + min(REFUSED_RETRY_CEILING, REFUSED_RETRY_SECONDS * 2 ** min(refused.tries - 1, 10))
    return replace(ready, why=f"{_REFUSED}: {refused.reason}", stuck=True, again=again)


def condition_readiness(whole: Campaign, member: CampaignMember) -> Readiness:
    """Return whether the condition of a member holds, and the checkpoint to start from."""
    before = member.source or member.after
    if before is None:
        return Readiness(base=BEGINNING)
    try:
        return _readiness_after_run(before, whole.member(before).run, member)
    except _UNREADABLE as error:
        return Readiness(why=f"waits for {before}, whose records cannot be read: {_error_line(error)}", stuck=True)


def _readiness_after_run(before: str, run: Run, member: CampaignMember) -> Readiness:
    """`condition_readiness` of a member that waits for the run `before`. Raises the errors of unreadable records."""
    if not run.plan.exists():
        return Readiness(why=f"waits for {before}, which is not at {run.path} any more", stuck=True)
    ended = read_stop(run)
    how = "" if ended is None else f", which ended: {ended.reason}"
    if member.iteration is None:
        if ended is None:
            return Readiness(why=f"waits for the end of {before}")
        if ended.state != "done":
            return Readiness(why=f"waits for {before}{how}", stuck=True)
        base = checkpoint_records.resume_point(run) if member.source else BEGINNING
        if member.source and base.path is None:
            return Readiness(why=f"waits for a checkpoint of {before}, which has none", stuck=True)
    else:
        commits = checkpoint_records.Lineage(run).beyond(member.iteration - 1)
        commit = next((each for each in commits if each.iteration == member.iteration), None)
        fault = None if commit is None else checkpoint_records.checkpoint_fault(commit)
        if commit is None or fault is not None:
            why = f"waits for iteration {member.iteration} of {before}" + (f" ({fault})" if fault else "") + how
            return Readiness(why=why, stuck=ended is not None)
        base = ResumePoint.of(commit)
    return Readiness(base=base)


def _room(folder: Path, whole: Campaign, due: int, leaving: Run | None, patience: float) -> int:
    """Return how many of `due` members may start now beside the chains that live."""
    limit = 1 if batch_system(whole.scheduler).one_machine else whole.at_once
    return due if limit is None or not due else limit - _living(folder, whole, leaving, patience)


def _living(folder: Path, whole: Campaign, leaving: Run | None, patience: float) -> int:
    """Return how many chains live, without the one that is `leaving`; all started ones if the scheduler is silent."""
    unknown = 0
    runs: list[tuple[CampaignMember, Run]] = []
    for member in whole.members:
        try:
            run = member.run
            if run != leaving and _has_started(folder, member) and run.plan.exists() and read_stop(run) is None:
                runs.append((member, run))
        except _UNREADABLE:
            unknown += 1
    try:
        names = [(run, _job_names(whole, member, run)) for member, run in runs]
        return unknown + sum(map(bool, scheduler_class(whole.scheduler).queued_jobs(names, patience=patience)))
    except SchedulerError:
        return unknown + len(runs)


def _has_started(folder: Path, member: CampaignMember) -> bool:
    try:
        return campaign.has_member_started(folder, member)
    except RunDirError:
        return True


def record_queued_members(folder: Path, whole: Campaign, *, patience: float) -> None:
    """Record first jobs whose queueing process was killed, under the lock. Raises SchedulerError and OSError."""
    waiting = [member for member in whole.members if not _has_started(folder, member) and member.run.plan.exists()]
    names = [(member.run, _job_names(whole, member, member.run)[:1]) for member in waiting]
    queued = scheduler_class(whole.scheduler).queued_jobs(names, patience=patience)
    for member, first in zip(waiting, queued, strict=True):
        if first:
            path = campaign.member_started_path(folder, member.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            MemberStarted(job_id=first[0].id, time=time.time()).write(path)


def _job_names(whole: Campaign, member: CampaignMember, run: Run) -> tuple[str, str]:
    """Return Slurm's names of a chain's jobs and fallback job, even if its plan cannot be read."""
    try:
        plan = Plan.load(run)
        return plan.job_name, plan.fallback_job_name
    except _UNREADABLE:
        project, _, name = whole.name.partition("/")
        own = chain_job_name(project, f"{name}-{member.name}", run.path)
        return own, fallback_job_name(own)


def campaign_lines(folder: Path, look: CampaignPassResult) -> list[str]:
    """Return a line per reason that keeps members from starting, and one for members that no process has started."""
    name = f"{folder.parent.name}/{folder.name}"
    lines = [f"stuck: {name}: {words}" for words in stuck_lines(look.stuck)]
    return [*lines, f"due: {name}: {look.due}"] if look.due else lines


def stuck_lines(stuck: Mapping[str, str]) -> list[str]:
    """Return one line per reason, with the members that share it."""
    groups: dict[str, list[str]] = {}
    for name, why in stuck.items():
        groups.setdefault(why, []).append(name or "nothing more of it begins")
    return [f"{', '.join(names)}: {why}" for why, names in groups.items()]


def _error_line(error: BaseException) -> str:
    if isinstance(error, RelayrunError):
        return str(RelayrunError(error.message, where=error.where))
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
