"""What a run that is there already allows: its jobs, its end, its owner, its data, its checkpoint to begin with."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass

from relayrun.config.compose import compose
from relayrun.config.compose.schema import CommonConfig, RunConfig
from relayrun.control.rundir.lead import GRACE_SAVES
from relayrun.control.rundir.lineage import Lineage, resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.start_time import start_seconds
from relayrun.control.rundir.stop import stop_reason
from relayrun.control.scheduler import history
from relayrun.control.scheduler.base import RESERVATION_GONE, Scheduler
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import ConfigError, RunDirError
from relayrun.slurmtime import format_time
from relayrun.submit import initial_checkpoint, mirror_policy
from relayrun.submit.check import owner
from relayrun.submit.check.findings import Findings
from relayrun.submit.trainer_settings import stop_after
from relayrun.tokens.mixture.data_change import AcceptedData, apply_data_change
from relayrun.tokens.shards.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class SubmitIntent:
    """What a submit is told beside its config."""

    resume: bool = False
    """Go on where the chain has ended, too."""
    accept_data_change: bool = False
    take_over: bool = False
    """Go on with a run of another user's, whose jobs have ended, and with copies of a run whose directory is lost."""


def check_existing_run(
    config: CommonConfig, plan: Plan, run: Run, manifest: Manifest | None, intent: SubmitIntent, findings: Findings
) -> None:
    """Look at what the run's records, and its jobs, would make a submit refuse. `plan`: the config's."""
    with findings.catching("run.time_limit", ok="the time limit leaves time to train in"):
        check_time_limit(config, plan, run)
    with findings.catching("run.trainer"):
        refuse_other_trainer(config, run)
    with findings.catching("run.mirror"):
        mirror_policy.refuse_mirror_of_other_run(config, run, take_over=intent.take_over)
    with findings.catching("run.initial_checkpoint"):
        initial_checkpoint.find_initial_checkpoint(
            config, run, manifest, tell=lambda words: findings.warn("run.initial_checkpoint", words)
        )
    if not run.plan.exists():
        findings.ok("run.state", "this run has not been submitted yet")
        return
    with findings.catching("run.jobs", ok="the run has no job"):
        former = Plan.load(run)
        scheduler = scheduler_for_plan(former, run, patience=0)  # a person waits: once is enough
        refuse_while_live(run, former, scheduler, without=history.abandoned_local_jobs(former, run))
    with findings.catching("run.state", ok="the chain has not ended, or goes on with --resume"):
        refuse_after_end(run, resume=intent.resume)
    with findings.catching("run.stop_after"):
        check_stop_after(config, run)
    with findings.catching("run.owner"):
        owner.refuse_other_owner(run, take_over=intent.take_over, now=time.time())
    if isinstance(config, RunConfig) and manifest is not None:
        with findings.catching("run.data", ok="the data are those that the run began with, or changes that it takes"):
            evolved_data(config, run, manifest, accept=intent.accept_data_change)


def check_time_limit(config: CommonConfig, plan: Plan, run: Run) -> None:
    """Raise a ConfigError where leaving, or what start and save took in earlier attempts, needs the whole job.time."""
    limit = f"job.time ({plan.time_limit} s)"
    for name, seconds in (("lead", plan.lead), ("signal_lead", float(plan.signal_lead))):
        if getattr(config.chain, name) != "auto" and seconds >= plan.time_limit:
            raise ConfigError(
                f"chain.{name} {seconds:.0f} leaves nothing of {limit}",
                hint=f"raise job.time, or leave chain.{name} to be measured (auto)",
            )
    starts, saves = start_seconds(run), Lineage(run).newest_saves(GRACE_SAVES)
    if not starts:
        return
    start, save = min(starts), min(saves, default=0.0)
    leaving = max(save, plan.lead_floor)
    if start + leaving >= plan.time_limit:
        raise ConfigError(
            f"in earlier attempts the start took {start:.0f} s at best and a save {save:.0f} s (leaving is given "
            f"{leaving:.0f} s): nothing of {limit} is left to train in",
            hint=f"raise job.time, to {format_time(math.ceil(2 * (start + leaving)))} or more",
        )


def refuse_while_live(run: Run, plan: Plan, scheduler: Scheduler, *, without: Collection[str] = ()) -> None:
    """Raise RunDirError where jobs of the run are queued or run, whoever's; those of `without` do not count."""
    live = [job for job in scheduler.jobs(plan, anyone=True) if job.id not in without]
    if live:
        jobs = ", ".join(f"{job.id} ({job.state.lower()})" for job in live)
        raise RunDirError(
            f"this run has jobs already: {jobs}",
            where=run.path,
            hint="they never start: `relayrun cancel` takes them away"
            if all(job.state == RESERVATION_GONE for job in live)
            else f"let them run, or touch {run.triggers / 'exit'} and submit again",
        )


def refuse_after_end(run: Run, *, resume: bool) -> None:
    """Raise RunDirError where the chain has ended and nobody asked to go on."""
    reason = stop_reason(run)
    if reason is not None and not resume:
        raise RunDirError(
            f"the chain of this run has ended: {reason}",
            where=run.stop,
            hint="submit with --resume to go on all the same",
        )


def refuse_other_trainer(config: CommonConfig, run: Run) -> None:
    """Raise ConfigError where the run has checkpoints of another trainer, which this one cannot go on from."""
    revisions = run.revisions()
    if not revisions:
        return
    before = compose.read_resolved_config(run.config_revision(revisions[-1])).trainer
    if before != config.trainer and resume_point(run).path is not None:
        raise ConfigError(
            f"this run has checkpoints of trainer {before}, and trainer {config.trainer} reads others",
            where="trainer",
            hint="give the run another name",
        )


def check_stop_after(config: CommonConfig, run: Run) -> None:
    """Raise a ConfigError where the run has made the iteration durable at which it is to stop."""
    stop, reached = stop_after(config), resume_point(run).iteration
    if stop is not None and reached >= stop:
        raise ConfigError(
            f"the run stands at iteration {reached} already, and would stop after iteration {stop}",
            where="training.stop_after",
            hint="raise it, or set training.stop_after=null to go on to the last step",
        )


def evolved_data(config: RunConfig, run: Run, found: Manifest, *, accept: bool) -> AcceptedData | None:
    """The run's data with what the config changes of them; None where the run has no data yet. Raises InputError."""
    revisions = run.revisions()
    if not run.manifest.exists() or not revisions:
        return None
    frozen = Manifest.read(run.manifest)
    every = (compose.read_resolved_config(run.config_revision(number)) for number in reversed(revisions))
    past = [each for each in every if isinstance(each, RunConfig)]  # before its first checkpoint a run may change it
    trained = resume_point(run).path is not None
    return apply_data_change(frozen=frozen, history=past, found=found, config=config, accept=accept, trained=trained)
