"""Begins the runs of a campaign, each exactly once: by the end of another run's chain, by its watch, by any command.

Nobody is needed who lives as long as the campaign. What may begin follows from the records alone, and whoever looks
begins it, under the campaign's lock. Who is killed between an order to Slurm and its record leaves a job with the name
of the run, which the next look finds; and should there be two all the same, they are a singleton in one run directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from relayrun.chain import decide, successor
from relayrun.chain.log import log
from relayrun.errors import RelayrunError, SchedulerError
from relayrun.rundir import campaign, evaluations, lineage
from relayrun.rundir.campaign import Begun, Campaign, Member
from relayrun.rundir.lineage import BEGINNING, Durable
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.rundir.stop import stop_reason
from relayrun.scheduler import together
from relayrun.scheduler.choose import for_plan

PATIENCE = 5.0
"""Seconds for which a controller that does not answer is asked again."""


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """Whether a member that has not begun may begin."""

    base: Durable | None
    """The checkpoint to begin with; None: it waits, or never begins."""
    why: str = ""
    """What it waits for."""


def attend(run: Run, *, leaves: bool = False, patience: float = PATIENCE) -> None:
    """Begin what may begin now of the campaign that a run belongs to, if to any. What fails is left for later.

    `leaves`: this is the last job of the run's chain, also where no STOP says it. `patience`: seconds for which a
    controller that does not answer is asked again, and for which another one who begins runs is waited for.
    """
    mend(campaign.folders_of([run]), leaving=run if leaves else None, patience=patience)


def mend(
    folders: Iterable[Path],
    *,
    leaving: Run | None = None,
    patience: float = PATIENCE,
    say: Callable[[str], None] = log,
) -> None:
    """The same for campaigns, by their folders."""
    for folder in folders:
        try:
            for words in begin_due(folder, leaving=leaving, patience=patience):
                say(words)
        except (RelayrunError, OSError) as error:
            say(f"the next run of {folder} is left for later: {getattr(error, 'message', error)}")


def begin_due(
    folder: Path, *, from_terminal: bool = False, leaving: Run | None = None, patience: float = PATIENCE
) -> list[str]:
    """Begin every member that may begin; return what was done, in words.

    `from_terminal`: this process runs the jobs of this machine, without whom nobody would. `leaving`: the run whose
    last job this is. Raises RunDirError, SchedulerError and OSError; what was begun before is on record.
    """
    if not campaign.is_campaign(folder):  # its submit was killed, or is under way
        return []
    whole = Campaign.load(folder)
    if whole.owner != os.geteuid() or (whole.scheduler == "local" and not from_terminal):
        return []
    if all(campaign.begun_path(folder, member.name).exists() for member in whole.members):
        return []
    with campaign.alone(folder, patience=patience) as mine:
        if not mine:
            return []
        return _begin_due(folder, whole, leaving, patience)


def _begin_due(folder: Path, whole: Campaign, leaving: Run | None, patience: float) -> list[str]:
    said: list[str] = []
    if campaign.stop_reason(folder) is not None:
        return said
    due = list(_due(folder, whole))
    limit = 1 if whole.scheduler == "local" else whole.at_once
    if limit is not None and due:
        due = due[: max(0, limit - _living(folder, whole, leaving, patience))]
    for member, base in due:
        said.append(_begin(folder, member, base, patience))
    return said


def _due(folder: Path, whole: Campaign) -> Iterator[tuple[Member, Durable]]:
    """The members that have not begun and may, in order, each with the checkpoint to begin with."""
    for member in whole.members:
        if campaign.begun_path(folder, member.name).exists():
            continue
        if stop_reason(member.run) is not None and member.run.newest_begun() is None:
            continue  # a person stopped it before it began
        if (base := readiness(whole, member).base) is not None:
            yield member, base


def _begin(folder: Path, member: Member, base: Durable, patience: float) -> str:
    """Queue the first job of a member, unless one is there. Raises SchedulerError, RunDirError and OSError."""
    run = member.run
    plan = Plan.load(run)
    record = campaign.begun_path(folder, member.name)
    record.parent.mkdir(parents=True, exist_ok=True)
    scheduler = for_plan(plan, run, patience=patience)
    newest = run.newest_begun()
    begun = None if newest is None else newest.read_begin()
    if begun is not None:  # its record was lost with who queued it, or a person submitted it
        job_id, how = begun.job_id, "had begun"
    elif found := scheduler.jobs(plan):
        job_id, how = found[0].id, "was queued"
    else:
        if base.path is not None:
            plan = replace(plan, load_path=base.path, load_iteration=0 if member.counts_from_zero else base.iteration)
            plan.write(run.plan)
        job_id, how = successor.queue_first(run, plan, scheduler), "is queued"
    Begun(job_id=job_id, time=time.time()).write(record)
    return f"{plan.run} {how}, job {job_id}" + (f", from {base.path}" if base.path else "")


def readiness(whole: Campaign, member: Member) -> Readiness:
    """Whether the condition of a member holds, and with which checkpoint it begins. Raises RunDirError."""
    before = member.source or member.after
    if before is None:
        return Readiness(base=BEGINNING)
    run = whole.member(before).run
    if member.iteration is None:
        ended = stop_reason(run)
        if ended is None:
            return Readiness(base=None, why=f"waits for the end of {before}")
        if not decide.is_done(ended):
            return Readiness(base=None, why=f"waits for {before}, which ended: {ended}")
        base = lineage.durable(run) if member.source else BEGINNING
        if member.source and base.path is None:
            return Readiness(base=None, why=f"waits for a checkpoint of {before}, which has none")
    else:
        commits = (each.commit for each in lineage.Lineage(run).backwards())
        commit = next((each for each in commits if each.iteration == member.iteration), None)
        fault = None if commit is None else lineage.fault(commit)
        if commit is None or fault is not None:
            return Readiness(
                base=None, why=f"waits for iteration {member.iteration} of {before}" + (f" ({fault})" if fault else "")
            )
        base = Durable(iteration=commit.iteration, path=commit.path)
    if member.evaluated:
        status = _evaluation(run, base.iteration)
        if status != "done":
            how = "which failed" if status == "failed" else "which has no result yet"
            return Readiness(base=None, why=f"waits for the evaluation of {before}:{base.iteration}, {how}")
    return Readiness(base=base)


def _evaluation(run: Run, iteration: int) -> Literal["done", "failed"] | None:
    """How the evaluation of an iteration ended; the newest counts."""
    found = [result.status for result in evaluations.results(run) if result.iteration == iteration]
    return found[-1] if found else None


def _living(folder: Path, whole: Campaign, leaving: Run | None, patience: float) -> int:
    """How many chains live, but for the one that is `leaving`: one that is broken holds up no other.

    Where the scheduler does not answer, any that has begun and not ended may live.
    """
    begun = [member.run for member in whole.members if campaign.has_begun(folder, member)]
    runs = [run for run in begun if run != leaving and stop_reason(run) is None]
    try:
        if whole.scheduler == "local":
            return sum(bool(for_plan(plan, run).jobs(plan)) for run in runs for plan in (Plan.load(run),))
        names = [(plan.job_name, plan.fallback_job_name) for plan in map(Plan.load, runs)]
        jobs = together.jobs_of([name for pair in names for name in pair], patience=patience)
        return sum(any(jobs[name] for name in pair) for pair in names)
    except SchedulerError:
        return len(runs)
