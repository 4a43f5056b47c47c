"""Check what an existing run allows: its live jobs, its end, its owner, its data, its checkpoint to start from; and say
what a submit changes in effect, for a run that goes on from a checkpoint: steps left, learning rate, W&B.

A run has one owner, who owns its directory. Another user goes on with it in a directory of his own, see `own_run`.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from relayrun.config.compose import resolve
from relayrun.config.compose.campaign import last_iteration
from relayrun.config.compose.schema import CommandConfig, CommonConfig, RunConfig
from relayrun.control import chain_state
from relayrun.control.chain import budget
from relayrun.control.rundir.checkpoint_records import Lineage, ResumePoint, is_checkpoint_of, resume_point
from relayrun.control.rundir.plan import COPY, COPY_HINT, Plan
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.rundir.time_limit import GRACE_SAVES, start_seconds
from relayrun.control.scheduler.base import Scheduler
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.control.scheduler.slurm_states import is_blocked, mending_command
from relayrun.control.trainers.tools import wandb_mode
from relayrun.errors import ConfigError, FatalTrainingError, RelayrunError, RunDirError, describe_owner, user_name
from relayrun.errors import refuse_unwritable as refuse_unwritable_place
from relayrun.files import append_line
from relayrun.slurmtime import format_time
from relayrun.submit import initial_checkpoint, policies
from relayrun.submit.check.findings import Findings, count_noun
from relayrun.submit.check.rehearsal import tell_rate_changes
from relayrun.submit.dry_load import common_values
from relayrun.submit.run_plan import stop_after
from relayrun.tokens.mixture.data_change import AcceptedData, apply_data_change
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.tokens.shards.manifest import Manifest
from relayrun.train.export.source_and_target import committed_config
from relayrun.train.mirror.destination import source_faults
from relayrun.trust import OTHER_OWNER_HINT

Config = TypeVar("Config", bound=CommonConfig)


@dataclass(frozen=True, kw_only=True)
class FormerRun:
    """A run of another user, from whose newest checkpoint a run of this user starts."""

    run: Run
    owner: int | None
    base: ResumePoint


def refuse_other_owner(run: Run) -> None:
    """Raise RunDirError if another user owns the run. Nothing that the run names is looked at."""
    plan = Plan.load(run) if run.plan.exists() else None
    if plan is not None and chain_state.is_owned_by_another_user(plan):
        if plan.owner is None:
            raise RunDirError(COPY, where=run.path, hint=COPY_HINT)
        name = user_name(plan.owner)
        words = f"this run is {name}'s, who submitted it last"
        raise RunDirError(words, where=run.path, hint=f"let {name} submit. {OTHER_OWNER_HINT.capitalize()}")


def own_run(config: Config, *, take_over: bool, now: float) -> tuple[Config, FormerRun | None]:
    """Return the config of a submit, and the run that it takes over: where the run directory is another user's, the
    config gets a directory of this user's beside it, NAME-USER, and starts from the newest checkpoint of that run.

    Raises RunDirError if that run may have a job, or if it has no checkpoint with the bytes that were saved.
    """
    run = Run(Path(config.run_dir or ""))
    plan = Plan.load(run) if take_over and run.plan.exists() else None
    if plan is None or not chain_state.is_owned_by_another_user(plan):
        return config, None
    refuse_while_live(run, plan, scheduler_for_plan(plan, run, patience=0))
    _refuse_live_attempt(run, plan, now=now)
    base = _verified_base(run)
    if base.path is None:
        hint = "submit your config without --take-over, with a name or a run_dir of its own"
        raise RunDirError("this run has no checkpoint to go on from", where=run.path, hint=hint)
    changes: dict[str, object] = {"run_dir": f"{run.path}-{user_name(os.geteuid())}"}
    if (saves := config.checkpoint_section) is not None:  # without it the plan alone names the checkpoint
        changes["checkpoint"] = saves.model_copy(update={"load": f"{run.path}:{base.iteration}"})
    return config.model_copy(update=changes), FormerRun(run=run, owner=plan.owner, base=base)


def _verified_base(run: Run) -> ResumePoint:
    """Return the newest checkpoint with the bytes that were saved. Raises RunDirError if it has others."""
    base = resume_point(run)
    for commit in (counted.commit for counted in Lineage(run).backwards() if counted.commit.path == base.path):
        if faults := source_faults(commit):
            hint = f"submit without --take-over, with a name of its own and --load {run.path}:ITERATION of an older one"
            raise RunDirError(f"this checkpoint is damaged: {faults[0]}", where=commit.path, hint=hint)
    return base


def claim_run(run: Run, plan: Plan, former: FormerRun | None, *, now: float) -> None:
    """Write the plan, and the first time a line that says whose the run is, and whose it goes on with."""
    if not run.owners.exists():
        line = {"owner": plan.owner, "name": user_name(os.geteuid()), "former": former and former.owner, "time": now}
        append_line(run.owners, line | ({} if former is None else {"run": str(former.run.path)}))
    plan.write(run.plan)


def _refuse_live_attempt(run: Run, plan: Plan, *, now: float) -> None:
    """Raise RunDirError if an attempt of the plan's owner may live."""
    sign = chain_state.newest_life_sign(run, plan, now=now)
    if sign is not None:
        job, age = f"attempt {sign.attempt}, in a job of {user_name(plan.owner)}", max(sign.age, 0.0)
        hint = f"end it after a checkpoint with `relayrun stop {run.path}`; "
        hint += f"without a sign for {sign.patience:.0f} s it counts as gone"
        raise RunDirError(f"{job}, gave a sign of life {age:.0f} s ago", where=run.path, hint=hint)


def refuse_unwritable_run(run: Run) -> None:
    """Raise RunDirError if this user may not write what a chain writes: its jobs would die of it one by one."""
    if not run.path.exists():
        refuse_unwritable_place(run.path)
    closed = next(_unwritable_paths(run), None)
    if closed is None:
        return
    found = closed.stat()
    name = user_name(found.st_uid)
    words = f"you may not write here: only the user {name} may; {describe_owner(closed)}"
    raise RunDirError(words, where=closed, hint=OTHER_OWNER_HINT)


def _unwritable_paths(run: Run) -> Iterator[Path]:
    """Paths closed to this user: folders in which a chain makes or moves files, and files to which it appends."""
    checkpoints = _subfolders(run.checkpoints)
    newest = [run.attempt(number).path for number in run.attempt_numbers()[-1:]]
    local = run.path / "local"
    folders = [run.path, run.config, run.attempts, *newest, run.checkpoints, *checkpoints]
    folders += [path for folder in checkpoints if folder.name.startswith(".") for path in _subfolders(folder)]
    folders += [run.evaluations, *_subfolders(run.evaluations), run.triggers, run.code, run.debug, run.tensorboard]
    folders += [run.path / "wandb", local]
    files = [run.metrics_view, run.attempts_view, run.progress, run.node_failures, run.owners]
    files += [run.path / ".submit.lock", local / "queue.lock", local / "runner.lock"]
    for path in [*folders, *files]:
        mode = os.W_OK | os.X_OK if path in folders else os.W_OK
        if path.exists() and not os.access(path, mode, effective_ids=True):
            yield path


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, PermissionError):  # a closed one is named for itself
        return []


@dataclass(frozen=True, kw_only=True)
class SubmitIntent:
    """The options of a submit besides its config."""

    resume: bool = False
    """Continue even if the chain has ended."""
    accept_data_change: bool = False
    take_over: bool = False
    """Go on with a run of another user's, whose jobs have ended, in a directory of one's own, and with copies of a run
    whose directory is lost."""


def check_existing_run(
    config: CommonConfig, plan: Plan, run: Run, manifest: Manifest | None, intent: SubmitIntent, findings: Findings
) -> None:
    """Look at what the run's records, and its jobs, would make a submit refuse. `plan`: the config's."""
    with findings.catching("run.time_limit"):
        if check_time_limit(config, plan, run):
            findings.ok("run.time_limit", "the time limit leaves time to train in, by the starts and saves so far")
        else:
            words = f"no start of this run was measured: whether job.time ({plan.time_limit} s) leaves time to train "
            words += f"in is not known; leaving is given {plan.min_grace_period:.0f} s or more of it"
            findings.skip("run.time_limit", words, setting="job.time")
    with findings.catching("run.trainer"):
        refuse_other_trainer(config, run)
    with findings.catching("run.mirror"):
        policies.refuse_mirror_of_other_run(config, run, take_over=intent.take_over)
    with findings.catching("run.initial_checkpoint"):
        tell = partial(findings.warn, "run.initial_checkpoint")
        base = initial_checkpoint.find_initial_checkpoint(config, run, manifest, tell=tell)
        if isinstance(config, RunConfig):
            own = resume_point(run)
            check_consequences(config, run, base if own.path is None else own, findings)
    if not run.plan.exists():
        findings.ok("run.state", "this run has not been submitted yet")
        return
    with findings.catching("run.jobs", ok="the run has no job"):
        former = Plan.load(run)
        scheduler = scheduler_for_plan(former, run, patience=0)  # a person waits: once is enough
        refuse_while_live(run, former, scheduler, without=scheduler.history.abandoned_jobs())
    with findings.catching("run.state", ok="the chain has not ended, or goes on with --resume"):
        refuse_after_end(run, resume=intent.resume)
    with findings.catching("run.stop_after"):
        check_stop_after(config, run)
    with findings.catching("run.owner"):
        refuse_other_owner(run)
    if isinstance(config, RunConfig) and manifest is not None:
        with findings.catching("run.data", ok="the data are those that the run began with, or changes that it takes"):
            evolved_data(config, run, manifest, accept=intent.accept_data_change)


def check_time_limit(config: CommonConfig, plan: Plan, run: Run) -> bool:
    """Return whether earlier starts say that job.time leaves time to train in; False if none was measured.

    Raises ConfigError if leaving, or what start and save took in earlier attempts, needs the whole job.time, or more
    than the rest of the budget.
    """
    end = budget.budget_end(run, plan, nodes=plan.nodes_of_job, start=time.time())
    if over := budget.why_over(run, plan, end, plan.min_grace_period):
        raise ConfigError(over)
    limit = f"job.time ({plan.time_limit} s)"
    for name, seconds in (("grace_period", plan.grace_period), ("signal_seconds", float(plan.signal_seconds))):
        if getattr(config.chain, name) != "auto" and seconds >= plan.time_limit:
            words = f"chain.{name} {seconds:.0f} leaves nothing of {limit}"
            raise ConfigError(words, hint=f"raise job.time, or leave chain.{name} to be measured (auto)")
    starts, saves = start_seconds(run), Lineage(run).newest_saves(GRACE_SAVES)
    if not starts:
        return False
    start, save = min(starts), min(saves, default=0.0)
    leaving = max(save, plan.min_grace_period)
    if start + leaving >= plan.time_limit:
        words = f"in earlier attempts the start took {start:.0f} s at best and a save {save:.0f} s "
        words += f"(leaving is given {leaving:.0f} s): nothing of {limit} is left to train in"
        raise ConfigError(words, hint=f"raise job.time, to {format_time(math.ceil(2 * (start + leaving)))} or more")
    return True


def refuse_while_live(run: Run, plan: Plan, scheduler: Scheduler, *, without: Collection[str] = ()) -> None:
    """Raise RunDirError if jobs of the run are queued or run, whoever's; those of `without` do not count."""
    live = [job for job in scheduler.jobs(plan, anyone=True) if job.id not in without]
    if live:
        jobs = ", ".join(f"{job.id} ({job.state.lower()})" for job in live)
        reasons = scheduler.history.pending_reasons(plan)
        hint = f"let them run, or touch {run.triggers / 'exit'} and submit again"
        if all(is_blocked(job.state, reasons.get(job.id)) for job in live):
            mend = (mending_command(job.id, job.state, reasons.get(job.id), run=str(run.path)) for job in live)
            hint = f"they never start: {'; '.join(dict.fromkeys(mend))}"
        raise RunDirError(f"this run has jobs already: {jobs}", where=run.path, hint=hint)


def refuse_after_end(run: Run, *, resume: bool) -> None:
    """Raise RunDirError if the chain has ended and nobody asked to go on."""
    reason = stop_reason(run)
    if reason is not None and not resume:
        words = f"the chain of this run has ended: {reason}"
        raise RunDirError(words, where=run.stop, hint="submit with --resume to go on all the same")


def refuse_other_trainer(config: CommonConfig, run: Run) -> None:
    """Raise ConfigError if the run has checkpoints of another trainer, which this one cannot go on from."""
    revisions = run.revisions()
    if not revisions:
        return
    before = resolve.read_resolved_config(run.config_revision(revisions[-1])).trainer
    if before != config.trainer and resume_point(run).path is not None:
        words = f"this run has checkpoints of trainer {before}, and trainer {config.trainer} reads others"
        raise ConfigError(words, where="trainer", hint="give the run another name")


def check_stop_after(config: CommonConfig, run: Run) -> None:
    """Raise a ConfigError if the run has made the iteration durable at which it is to stop or to end."""
    stop, reached, end = stop_after(config), resume_point(run).iteration, last_iteration(config)
    if reached and stop is None and end is not None and reached >= end:
        words = f"iteration {reached} is done already, and the run ends at {end}: nothing is left to train"
        setting = "command.steps" if isinstance(config, CommandConfig) else "training.steps"
        raise ConfigError(words, where=setting, hint=f"raise {setting} to train on")
    if stop is not None and reached >= stop:
        words = f"the run stands at iteration {reached} already, and would stop after iteration {stop}"
        hint = "raise it, or set training.stop_after=null to go on to the last step"
        raise ConfigError(words, where="training.stop_after", hint=hint)


def evolved_data(config: RunConfig, run: Run, found: Manifest, *, accept: bool) -> AcceptedData | None:
    """The run's data with what the config changes of them; None if the run has no data yet. Raises InputError."""
    revisions = run.revisions()
    if not run.manifest.exists() or not revisions:
        return None
    frozen = Manifest.read(run.manifest)
    every = (resolve.read_resolved_config(run.config_revision(number)) for number in reversed(revisions))
    past = [each for each in every if isinstance(each, RunConfig)]  # before its first checkpoint a run may change it
    trained = resume_point(run).path is not None
    return apply_data_change(frozen=frozen, history=past, found=found, config=config, accept=accept, trained=trained)


_SCHEDULE = ("steps", "global_batch_size", "rampup_batch_size", "seq_length")
"""Settings of `training` on which the learning rate depends, besides those of `optimizer`."""


def check_consequences(config: RunConfig, run: Run, begins: ResumePoint, findings: Findings) -> None:
    """Say what a run that goes on from `begins` has left, and what its next step has another way."""
    if begins.path is None:
        return
    if begins.iteration:
        with contextlib.suppress(KeyError, FatalTrainingError):  # ranks say better what is damaged
            state = (common_values(Path(begins.path)) or {})["progress"]
            progress = TrainingProgress.resume(state, config.training.batch_sizes)
            _tell_what_is_left(config, progress, findings)
            _tell_rate(config, run, begins, progress, findings)
    mode = wandb_mode({**os.environ, **config.cluster.environment})
    if is_checkpoint_of(run, begins) and mode is None and (run.path / "wandb").is_dir():
        words = "earlier attempts of this run wrote to W&B, and the next one will not: its curve ends here"
        findings.warn("run.wandb", words, remedy="export WANDB_API_KEY, or WANDB_MODE=offline, as before")


def _tell_what_is_left(config: RunConfig, progress: TrainingProgress, findings: Findings) -> None:
    done, end, length = progress.iteration, config.training.end_iteration, config.training.length_in_samples
    if length is not None and (steps := progress.legs[-1].steps_within(length)) != config.training.steps:
        words = f"with the batch sizes so far, {length:,} samples are {steps:,} steps, not {config.training.steps:,}"
        remedy = f"set training.samples and tokens to null, and training.steps={steps}"
        return findings.refuse("run.steps", words, setting="training.steps", remedy=remedy)
    samples = progress.legs[-1].consumed(max(end, done)) - progress.consumed_samples
    words = f"{done:,} of {count_noun(end, 'step')} are done: {count_noun(end - done, 'step')} with "
    findings.ok("run.steps", words + f"{count_noun(samples, 'sample')} are left")
    return None


def _tell_rate(config: RunConfig, run: Run, begins: ResumePoint, at: TrainingProgress, findings: Findings) -> None:
    name, former = "run.learning_rate", _former_config(run, begins)
    if former is None:
        findings.skip(name, "the config of the checkpoint is not known: nor whether the rate jumps at the next step")
    elif _schedule(former) != _schedule(config):
        tell_rate_changes(name, [(former, config, at, findings)])


def _former_config(run: Run, begins: ResumePoint) -> RunConfig | None:
    """Return the native config with which the checkpoint was made; None if it is not known."""
    owner = run if is_checkpoint_of(run, begins) else Run(Path(begins.path or "").parent.parent)
    try:
        found = committed_config(owner, begins.iteration)
    except (RelayrunError, OSError):
        return None
    return found if isinstance(found, RunConfig) else None


def _schedule(config: RunConfig) -> dict[str, Any]:
    names = ("lr", "min_lr", *(name for name in type(config.optimizer).model_fields if name.startswith("lr_")))
    training = {name: getattr(config.training, name) for name in _SCHEDULE}
    return training | {name: getattr(config.optimizer, name) for name in names}
