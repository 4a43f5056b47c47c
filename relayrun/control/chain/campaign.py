"""Begins the runs of a campaign, each exactly once: by the end of another run's chain, by its watch, by any command.

Nobody is needed who lives as long as the campaign. What may begin follows from the records alone, and whoever looks
begins it, under the campaign's lock. Who is killed between an order to Slurm and its record leaves a job with the name
of the run, which the next look finds; and should there be two all the same, they are a singleton in one run directory.

Members are judged alone. One that cannot be read, that Slurm refuses, or that waits for what never comes is stuck. It
is told of, and holds up no other.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from relayrun.control import chain_decide
from relayrun.control.chain import successor
from relayrun.control.chain.evaluations import attend_awaited
from relayrun.control.chain.evaluations import job_name as evaluation_job_name
from relayrun.control.log import log
from relayrun.control.rundir import campaign, evaluations, lineage
from relayrun.control.rundir.campaign import Begun, Campaign, Member, Refused
from relayrun.control.rundir.evaluations import EvaluationDir, Result
from relayrun.control.rundir.lineage import BEGINNING, Durable
from relayrun.control.rundir.plan import Plan, fallback_name, job_name
from relayrun.control.rundir.run import Run, is_own
from relayrun.control.rundir.stop import is_stopped, stop_reason
from relayrun.control.scheduler import history, together
from relayrun.control.scheduler.base import Job, Scheduler
from relayrun.control.scheduler.choose import for_plan
from relayrun.control.scheduler.slurm_command import NoAnswerError, NotInstalledError, TooManyJobsError
from relayrun.errors import RelayrunError, RunDirError, SchedulerError

PATIENCE = 5.0
"""Seconds for which a controller that does not answer is asked again."""
REFUSED_SECONDS = 30.0
"""So long after Slurm has refused a member it is tried again, and twice as long each time: a refusal may pass by, as
where nodes are not back yet behind a restart of the controller."""
REFUSED_CEILING = 600.0

_REFUSED = "its first job is refused"
_FOR_NOW = (NoAnswerError, NotInstalledError, TooManyJobsError)
"""No other member could be queued either; later each can."""
_UNREADABLE = (RelayrunError, OSError, KeyError, TypeError, ValueError, AttributeError)
"""What records raise that are missing, torn, or were edited."""


class CannotBeginError(RelayrunError):
    """One member cannot begin; others may."""


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """Whether a member that has not begun may begin."""

    base: Durable | None
    """The checkpoint to begin with; None: it waits, or never begins."""
    why: str = ""
    """What it waits for."""
    stuck: bool = False
    """It begins only if a person changes something, as far as one knows."""
    again: float = 0.0
    """When one that Slurm has refused is tried again, in seconds since 1970."""
    awaited: tuple[Run, EvaluationDir] | None = None
    """The evaluation that it waits for, and whose it is."""
    what: str = ""
    """The same in words."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What one look at a campaign has begun, and who is stuck."""

    begun: list[str] = field(default_factory=list)
    """What was begun, in words."""
    stuck: dict[str, str] = field(default_factory=dict)
    """By member, why it does not begin unless a person changes something; by `""` what holds up all of them."""


def attend(run: Run, *, leaves: bool = False, patience: float = PATIENCE) -> None:
    """Begin what may begin now of the campaign that a run belongs to, if to any. What fails is left for later.

    `leaves`: this is the last job of the run's chain, also where no STOP says it. `patience`: seconds for which a
    controller that does not answer is asked again, and for which another one who begins runs is waited for.
    """
    with contextlib.suppress(OSError):
        leaves = leaves or is_stopped(run)
    leaving = run if leaves else None
    mend(campaign.folders_of([run]), leaving=leaving, patience=patience)


def mend(
    folders: Iterable[Path],
    *,
    leaving: Run | None = None,
    patience: float = PATIENCE,
    say: Callable[[str], None] = log,
) -> dict[Path, Look]:
    """The same for campaigns, by their folders; return what each look saw."""
    looks: dict[Path, Look] = {}
    for folder in folders:
        try:
            looks[folder] = begin_due(folder, leaving=leaving, patience=patience)
            for words in looks[folder].begun:
                say(words)
        except _UNREADABLE as error:
            looks[folder] = Look(stuck={} if isinstance(error, _FOR_NOW) else {"": _words(error)})
            say(f"the next run of {folder} is left for later: {_words(error)}")
    return looks


def begin_due(
    folder: Path, *, from_terminal: bool = False, leaving: Run | None = None, patience: float = PATIENCE
) -> Look:
    """Begin every member that may begin; return what was done, and who is stuck.

    `from_terminal`: this process runs the jobs of this machine, without whom nobody would. `leaving`: the run whose
    last job this is: perhaps nobody looks after it, and what Slurm has refused is tried at once. Raises RunDirError,
    SchedulerError and OSError; what was begun before is on record.
    """
    if not campaign.is_campaign(folder):  # its submit was killed, or is under way
        return Look(stuck={"": "there is no campaign.json: its submit was killed, or it was moved or removed"})
    whole = Campaign.load(folder)
    waiting = [member for member in whole.members if not campaign.begun_path(folder, member.name).exists()]
    if not waiting or campaign.stop_reason(folder) is not None:
        return Look()
    if whole.owner != os.geteuid() or (whole.scheduler == "local" and not from_terminal):
        return Look(stuck=_stuck(_judged(folder, whole, waiting)))
    with campaign.alone(folder, patience=patience) as mine:
        judged = _judged(folder, whole, waiting)
        if not mine or campaign.stop_reason(folder) is not None:
            return Look(stuck=_stuck(judged))
        return _begin_due(folder, whole, judged, leaving, patience)


_Judged = list[tuple[Member, Readiness]]


def _judged(folder: Path, whole: Campaign, members: Sequence[Member]) -> _Judged:
    return [(member, ready) for member in members if (ready := judge(folder, whole, member)) is not None]


def _stuck(judged: _Judged) -> dict[str, str]:
    return {member.name: ready.why for member, ready in judged if ready.stuck}


def _begin_due(folder: Path, whole: Campaign, judged: _Judged, leaving: Run | None, patience: float) -> Look:
    begun: list[str] = []
    stuck = _stuck(judged)
    for run, evaluation in {ready.awaited[1].path: ready.awaited for _, ready in judged if ready.awaited}.values():
        attend_awaited(run, evaluation)
    stuck |= _never_evaluated(whole, judged)
    now = time.time()
    able = [(member, ready) for member, ready in judged if ready.base is not None]
    due = [entry for entry in able if not entry[1].stuck]  # whom Slurm has refused stands behind all others
    due += [entry for entry in able if entry[1].stuck and (leaving is not None or not now < entry[1].again)]
    limit = 1 if whole.scheduler == "local" else whole.at_once
    room = len(due) if limit is None or not due else limit - _living(folder, whole, leaving, patience)
    for member, ready in due:
        if len(begun) >= room:
            break
        try:
            begun.append(_begin(folder, member, ready.base or BEGINNING, patience))
            stuck.pop(member.name, None)
        except CannotBeginError as error:
            stuck[member.name] = error.message
    return Look(begun=begun, stuck=stuck)


def _never_evaluated(whole: Campaign, judged: _Judged) -> dict[str, str]:
    """By member, that the job of the evaluation it waits for never starts unless a person changes something."""
    awaited = {member.name: ready.awaited for member, ready in judged if ready.awaited is not None}
    if whole.scheduler == "local":
        return {}
    try:
        names = {name: evaluation_job_name(Plan.load(run), folder) for name, (run, folder) in awaited.items()}
        jobs = together.jobs_of(list(names.values()), patience=0)
    except _UNREADABLE:  # it is seen with the next look
        return {}
    return {
        member.name: f"{ready.what}, whose job {each.job.id} never starts: {each.reason}"
        for member, ready in judged
        if member.name in names
        for each in jobs[names[member.name]]
        if history.for_ever(each.reason)
    }


def _begin(folder: Path, member: Member, base: Durable, patience: float) -> str:
    """Queue the first job of a member, unless one is there. Raises CannotBeginError, SchedulerError and OSError."""
    run = member.run
    try:
        plan, own = Plan.load(run), is_own(run)
        newest = run.newest_begun()
        begun = None if newest is None else newest.read_begin()
    except _UNREADABLE as error:
        raise CannotBeginError(f"the plan of {member.name} cannot be read: {_words(error)}") from None
    if not own:
        words = f"{member.name} cannot begin: its directory or its plan belongs to another user ({run.path})"
        raise CannotBeginError(words)
    record = campaign.begun_path(folder, member.name)
    record.parent.mkdir(parents=True, exist_ok=True)
    scheduler = for_plan(plan, run, patience=patience)
    if begun is not None:  # its record was lost with who queued it, or a person submitted it
        job_id, how = begun.job_id, "had begun"
    elif found := scheduler.jobs(plan):
        job_id, how = found[0].id, "was queued"
    else:
        job_id, how = _queue(folder, member, plan, base, scheduler), "is queued"
    Begun(job_id=job_id, time=time.time()).write(record)
    return f"{plan.run} {how}, job {job_id}" + (f", from {base.path}" if base.path else "")


def _queue(folder: Path, member: Member, plan: Plan, base: Durable, scheduler: Scheduler) -> str:
    """Queue the first job; return its id. Raises CannotBeginError and SchedulerError."""
    run = member.run
    if base.path is not None:
        plan = replace(plan, load_path=base.path, load_iteration=0 if member.counts_from_zero else base.iteration)
        try:
            plan.write(run.plan)
        except OSError as error:
            raise CannotBeginError(f"the plan of {member.name} cannot be written: {_words(error)}") from None
    try:
        return successor.queue_first(run, plan, scheduler)
    except _FOR_NOW:
        raise
    except (SchedulerError, OSError) as error:
        if found := scheduler.jobs(plan):
            return found[0].id
        if not isinstance(error, SchedulerError):
            raise CannotBeginError(f"{member.name} cannot begin: {_words(error)}") from None
        path = campaign.refused_path(folder, member.name)
        before = Refused.read(path)
        tries = 1 if before is None else before.tries + 1
        Refused(reason=error.message, time=time.time(), tries=tries).write(path)
        raise CannotBeginError(f"{_REFUSED}: {error.message}") from None


def judge(folder: Path, whole: Campaign, member: Member) -> Readiness | None:
    """Whether a member may begin; None where it has begun, or a person stopped it before it could.

    One that Slurm has refused is stuck, and has the checkpoint to begin with all the same.
    """
    try:
        if campaign.begun_path(folder, member.name).exists():
            return None
        if stop_reason(member.run) is not None and member.run.newest_begun() is None:
            return None
        refused = Refused.read(campaign.refused_path(folder, member.name))
    except _UNREADABLE as error:
        return Readiness(base=None, why=f"the records of {member.name} cannot be read: {_words(error)}", stuck=True)
    ready = readiness(whole, member)
    if ready.base is None or refused is None:
        return ready
    again = refused.time + min(REFUSED_CEILING, REFUSED_SECONDS * 2 ** min(refused.tries - 1, 10))
    return replace(ready, why=f"{_REFUSED}: {refused.reason}", stuck=True, again=again)


def readiness(whole: Campaign, member: Member) -> Readiness:
    """Whether the condition of a member holds, and with which checkpoint it begins."""
    before = member.source or member.after
    if before is None:
        return Readiness(base=BEGINNING)
    try:
        return _behind(before, whole.member(before).run, member)
    except _UNREADABLE as error:
        words = f"waits for {before}, whose records cannot be read: {_words(error)}"
        return Readiness(base=None, why=words, stuck=True)


def _behind(before: str, run: Run, member: Member) -> Readiness:
    """The same of a member that waits for another one. Raises what records raise that cannot be read."""
    if not run.plan.exists():
        return Readiness(base=None, why=f"waits for {before}, which is not at {run.path} any more", stuck=True)
    ended = stop_reason(run)
    how = "" if ended is None else f", which ended: {ended}"
    if member.iteration is None:
        if ended is None:
            return Readiness(base=None, why=f"waits for the end of {before}")
        if not chain_decide.is_done(ended):
            return Readiness(base=None, why=f"waits for {before}{how}", stuck=True)
        base = lineage.durable(run) if member.source else BEGINNING
        if member.source and base.path is None:
            return Readiness(base=None, why=f"waits for a checkpoint of {before}, which has none", stuck=True)
    else:
        commits = (each.commit for each in lineage.Lineage(run).backwards())
        commit = next((each for each in commits if each.iteration == member.iteration), None)
        fault = None if commit is None else lineage.fault(commit)
        if commit is None or fault is not None:
            why = f"waits for iteration {member.iteration} of {before}" + (f" ({fault})" if fault else "") + how
            return Readiness(base=None, why=why, stuck=ended is not None)
        base = Durable(iteration=commit.iteration, path=commit.path)
    return _evaluated(before, run, base) if member.evaluated else Readiness(base=base)


def _evaluated(before: str, run: Run, base: Durable) -> Readiness:
    """The same of a member that waits for the evaluation of its checkpoint besides."""
    what = f"waits for the evaluation of {before}:{base.iteration}"
    folder = None if base.path is None else evaluations.of_checkpoint(run, base.path)
    if folder is None:
        return Readiness(base=None, why=f"{what}, which is another run's checkpoint", stuck=True)
    result = Result.read(folder.result)
    if result is not None and result.status == "done":
        return Readiness(base=base)
    if result is not None and not evaluations.may_try_again(folder, result):
        error = f": {result.error.partition(chr(10))[0]}" if result.error else ""
        why = f"{what}, which failed{error}; to have it tried again, remove {folder.path}"
        return Readiness(base=None, why=why, stuck=True)
    if not run.evaluation_policy.exists():
        return Readiness(base=None, why=f"{what}, which has no section `evaluation` any more", stuck=True)
    return Readiness(base=None, why=f"{what}, which has no result yet", awaited=(run, folder), what=what)


def _living(folder: Path, whole: Campaign, leaving: Run | None, patience: float) -> int:
    """How many chains live, but for the one that is `leaving`: one that is broken holds up no other.

    Where the scheduler does not answer, or STOP cannot be read, any that has begun may live.
    """
    unknown = 0
    runs: list[tuple[Member, Run]] = []
    for member in whole.members:
        try:
            run = member.run
            if run != leaving and _has_begun(folder, member) and run.plan.exists() and stop_reason(run) is None:
                runs.append((member, run))
        except _UNREADABLE:
            unknown += 1
    try:
        if whole.scheduler == "local":
            return unknown + sum(bool(_jobs_here(run)) for _, run in runs)
        names = [_job_names(whole, member, run) for member, run in runs]
        jobs = together.jobs_of([name for pair in names for name in pair], patience=patience)
        return unknown + sum(any(jobs[name] for name in pair) for pair in names)
    except SchedulerError:
        return unknown + len(runs)


def _has_begun(folder: Path, member: Member) -> bool:
    """Whether a member has begun, or has records of it that cannot be read. Raises OSError."""
    try:
        return campaign.has_begun(folder, member)
    except RunDirError:
        return True


def write_down(folder: Path, whole: Campaign, *, patience: float) -> None:
    """Write down the first jobs that were queued by who was killed before that. Raises SchedulerError and OSError.

    Called under the campaign's lock: nobody is about to write them.
    """
    waiting = [member for member in whole.members if not _has_begun(folder, member) and member.run.plan.exists()]
    if whole.scheduler == "local":
        found = {member.name: _jobs_here(member.run) for member in waiting}
    else:
        names = {member.name: _job_names(whole, member, member.run)[0] for member in waiting}
        jobs = together.jobs_of(list(names.values()), patience=patience)
        found = {name: [each.job for each in jobs[own]] for name, own in names.items()}
    for name, queued in found.items():
        if queued:
            campaign.begun_path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Begun(job_id=queued[0].id, time=time.time()).write(campaign.begun_path(folder, name))


def _jobs_here(run: Run) -> list[Job]:
    """The jobs of a run on this machine that wait or run; their queue tells it, whatever the plan says."""
    from relayrun.control.scheduler.local import LocalScheduler  # not paid for on a cluster

    scheduler = LocalScheduler(run)
    return scheduler.live(scheduler.every_job())


def _job_names(whole: Campaign, member: Member, run: Run) -> tuple[str, str]:
    """Slurm's names for the jobs of a chain; also where its plan cannot be read."""
    try:
        plan = Plan.load(run)
        return plan.job_name, plan.fallback_job_name
    except _UNREADABLE:
        project, _, name = whole.name.partition("/")
        own = job_name(project, f"{name}-{member.name}", run.path)
        return own, fallback_name(own)


def in_words(stuck: Mapping[str, str]) -> list[str]:
    """What is stuck, a line for each trouble: members with the same one are named together."""
    groups: dict[str, list[str]] = {}
    for name, why in stuck.items():
        groups.setdefault(why, []).append(name)
    return [
        f"{', '.join(names)}: {why}" if any(names) else f"nothing more of it begins: {why}"
        for why, names in groups.items()
    ]


def _words(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, RelayrunError):
        return str(RelayrunError(error.message, where=error.where))
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
