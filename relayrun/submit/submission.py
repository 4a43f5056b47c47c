"""From a run config to a queued job: the run directory is made or brought up to date, then one job is queued.

A submit is refused while the chain lives, and after it ended (exit trigger, last step, too many failed
attempts) unless `resume` is given. Submitting a changed config adds a revision; every attempt records the
one it used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from relayrun import places
from relayrun.config.compose import resolve
from relayrun.config.compose.schema import CommandConfig, CommonConfig, MegatronConfig, RunConfig
from relayrun.config.compose.yaml_file import LocatedSettings
from relayrun.control.chain import job_script, jobs
from relayrun.control.chain.budget import SHARED_SETTINGS
from relayrun.control.chain.campaign import condition_readiness
from relayrun.control.rundir import campaign, triggers
from relayrun.control.rundir.campaign import Campaign, CampaignMembership
from relayrun.control.rundir.checkpoint_records import BEGINNING, Lineage, ResumePoint, resume_point
from relayrun.control.rundir.plan import ACTED_ON_NAMES, Plan
from relayrun.control.rundir.run import Run, is_stopped, submit_lock
from relayrun.control.scheduler.base import Scheduler
from relayrun.control.scheduler.factory import scheduler_for_plan, slurm_scheduler
from relayrun.errors import ConfigError, RunDirError
from relayrun.files import writable_by_owner_alone, write_atomic
from relayrun.submit import code_snapshot, initial_checkpoint, policies
from relayrun.submit.check import existing_run
from relayrun.submit.check.existing_run import FormerRun, SubmitIntent
from relayrun.submit.check.findings import Findings
from relayrun.submit.check.report import CheckReport, check_run, with_editions
from relayrun.submit.cost import ChainCost
from relayrun.submit.run_plan import log_folder, make_plan
from relayrun.submit.wrap import link_checkpoints
from relayrun.tokens.mixture.data_change import integer_mixture_weights
from relayrun.tokens.shards.manifest import Manifest
from relayrun.train.export.original import ORIGINAL_NAME, keep_original_of
from relayrun.trust import refuse_untrusted

log = logging.getLogger(__name__)

INTERACTIVE_SECONDS = 20.0
"""For how long a controller that does not answer is asked again while a person waits."""


@dataclass(frozen=True, kw_only=True)
class SubmittedRun:
    """The run directory and the job that a submit made."""

    run: Run
    plan: Plan
    job_id: str


def submit_run(
    config: CommonConfig,
    *,
    given: LocatedSettings | None = None,
    confirm: Callable[[ChainCost], None] = lambda _: None,
    **intents: bool,
) -> SubmittedRun:
    """Check, prepare the run directory, queue one job. Raises RelayrunError; then nothing was queued.

    `given`: the locations of the settings, for errors. `confirm`: raises an error if the cost is refused. `intents`:
    those of `SubmitIntent`.
    """
    intent = SubmitIntent(**intents)
    config, former = existing_run.own_run(config, take_over=intent.take_over, now=time.time())
    with prepared_run(config, intent, given, former=former, confirm=confirm) as (run, plan):
        return SubmittedRun(run=run, plan=plan, job_id=jobs.queue_first_job(run, plan, _scheduler(plan, run)))


def adopt_job(config: CommonConfig, intent: SubmitIntent, *, host_python: str | None = None) -> Run:
    """Make the job that this process runs in the first of a chain: what a Bash launcher's job does.

    The options that the job was submitted with win over the config's, and so does `host_python`. Raises RelayrunError.
    """
    scheduler = slurm_scheduler()
    job = scheduler.query(scheduler.current_job_id())
    if job is None:
        raise RunDirError("Slurm does not know the job that this runs in")
    run = Run(Path(config.run_dir or ""))
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and run.plan.exists() and Plan.load(run).job_name == job.name:
        return run  # Slurm starts a requeued job with the launcher again; it was adopted the first time
    if config.job.spare_nodes:
        words = "job.spare_nodes: the job of a launcher has not asked Slurm to outlive the loss of a node (--no-kill)"
        hint = "start the run with `relayrun submit`, or leave job.spare_nodes out"
        raise ConfigError(words, where="settings block", hint=hint)
    nodes = config.job.model_copy(update={"nodes": job.num_nodes})
    cluster = config.cluster.model_copy(update={"host_python": host_python or config.cluster.host_python})
    config = type(config).model_validate(config.model_copy(update={"job": nodes, "cluster": cluster}).model_dump())
    config, former = existing_run.own_run(config, take_over=intent.take_over, now=time.time())
    with prepared_run(config, intent, adopted=job.options, former=former) as (run, plan):
        scheduler.adopt(job, plan)  # under the lock: a second first job sees this one
        jobs.queue_fallback_job(run, plan, job.id, options=job.options)
        return run


def change_budget(run: Run, config: CommonConfig) -> bool:
    """Give a run that has jobs the budget of a config, and a revision. Return False if no job of the chain goes on."""
    plan = Plan.load_trusted(run)
    scheduler = _scheduler(plan, run)
    if {job.id for job in scheduler.jobs(plan)} <= {*scheduler.history.abandoned_jobs()}:
        return False
    with submit_lock(run), writable_by_owner_alone():
        chain = replace(plan.chain, **{name: getattr(config.chain, name) for name in SHARED_SETTINGS})
        replace(plan, chain=chain, config_revision=_add_revision(run, config)).write(run.plan)
    return not is_stopped(run)


def check_submission(
    config: CommonConfig, *, given: LocatedSettings | None = None, intent: SubmitIntent, launcher: Path | None = None
) -> CheckReport:
    """Look at all that a submit would look at, and at what Slurm says; nothing is written or queued.

    `launcher`: the Bash script that is to be given to sbatch, instead of a job of relayrun's own.
    """
    config, _ = existing_run.own_run(config, take_over=intent.take_over, now=time.time())
    run = Run(Path(config.run_dir or ""))
    plan = make_plan(config, run, places.CODE_ROOT, revision=max(run.revisions(), default=0) + 1)
    script = launcher or job_script.job_script(plan, run)
    return check_run(config, plan, run, log_folder=log_folder(run), given=given, intent=intent, script=script)


@contextmanager
def prepared_run(
    config: CommonConfig,
    intent: SubmitIntent,
    given: LocatedSettings | None = None,
    *,
    membership: CampaignMembership | None = None,
    awaited: bool = False,
    adopted: Mapping[str, str] | None = None,
    former: FormerRun | None = None,
    confirm: Callable[[ChainCost], None] = lambda _: None,
) -> Iterator[tuple[Run, Plan]]:
    """The run directory made or brought up to date, and locked. After an error it is as before, STOP too.

    `membership`: of the campaign that the run is made for. `awaited`: what it begins with is not there yet.
    `adopted`: options of the job that becomes the first. `former`: the run of another user that it goes on with.
    """
    run = Run(Path(config.run_dir or ""))
    existing_run.refuse_other_owner(run)
    # the run's state is looked at under the lock, and Slurm by the scheduler
    plan = make_plan(config, run, places.CODE_ROOT, revision=0)
    found = check_run(config, plan, run, log_folder=log_folder(run), given=given, adopted=adopted)
    found.findings.raise_errors()
    for finding in found.findings.warnings:
        log.warning("%s", finding.line)
    confirm(found.cost)
    log_folder(run).mkdir(parents=True, exist_ok=True)
    with submit_lock(run) as made, writable_by_owner_alone(), _undone_on_error(run, made):
        _refuse_while_live(run)
        _refuse_untrusted(run)
        policies.refuse_mirror_of_other_run(config, run, take_over=intent.take_over)
        existing_run.refuse_after_end(run, resume=intent.resume)
        existing_run.check_stop_after(config, run)
        existing_run.check_time_limit(config, make_plan(config, run, places.CODE_ROOT, revision=0), run)
        existing_run.refuse_other_trainer(config, run)
        if isinstance(config, RunConfig):
            assert found.manifest is not None  # without data there is an error
            config = _freeze_data(run, _with_loss_mean(run, config), found.manifest, accept=intent.accept_data_change)
            overlaps = [f"{each.words}\n" for each in found.findings.all if each.name == "data.overlap"]
            write_atomic(run.overlap, "".join(overlaps))
        if membership is not None:  # before the plan, which makes it a run
            membership.write(campaign.membership_path(run))
        if isinstance(config, CommandConfig) and (folder := config.command.checkpoint.folder) is not None:
            link_checkpoints(run, folder)
        base = BEGINNING if awaited else _initial_checkpoint(config, run, found.manifest, new=membership is not None)
        base = former.base if former is not None and base == BEGINNING and not run.revisions() else base
        if isinstance(config, RunConfig) and not awaited:
            _tell_consequences(config, run, resume_point(run) if base.path is None else base)
        keep_original_of(base.path, run)
        root = code_snapshot.snapshot_code(run, places.CODE_ROOT) if _takes_snapshot(config) else places.CODE_ROOT
        revision = _add_revision(run, config)
        plan = make_plan(_with_checkout_snapshot(run, config), run, root, revision=revision, base=base)
        triggers.create_trigger_folder(run, config.chain.triggers_group)
        if config.chain.triggers_group is not None and (barrier := triggers.first_closed_folder(run)) is not None:
            log.warning(
                "members of chain.triggers_group %s cannot reach the triggers: "
                "%s is closed to them; open it with chmod g+x",
                config.chain.triggers_group,
                barrier,
            )
        _acknowledge_stale(run)
        existing_run.claim_run(run, plan, former, now=time.time())
        write_atomic(run.job_script, job_script.job_script(plan, run), mode=0o777)
        if plan.fallback_job:
            write_atomic(run.fallback_script, job_script.fallback_script(plan, run), mode=0o777)
        policies.write_evaluation_policy(config, plan, run)
        policies.write_mirror_policy(config, run, take_over=intent.take_over)
        run.stop.unlink(missing_ok=True)
        run.requests.unlink(missing_ok=True)  # an explicit submit revokes what a person changed
        policies.write_notice_policy(config, run)  # behind STOP, which would be told once more
        yield run, plan


def _tell_consequences(config: RunConfig, run: Run, begins: ResumePoint) -> None:
    findings = Findings(config)
    existing_run.check_consequences(config, run, begins, findings)
    for finding in findings.all:
        log.log(logging.WARNING if finding.level == "warning" else logging.INFO, "%s", finding.line)


def _refuse_untrusted(run: Run) -> None:
    """Raise UntrustedError if another user can have written what the jobs of this run will execute."""
    refuse_untrusted(run.path, [*ACTED_ON_NAMES, "config"], trees=[run.code.name])
    if run.plan.exists():
        Plan.load_trusted(run)


def _initial_checkpoint(config: CommonConfig, run: Run, manifest: Manifest | None, *, new: bool) -> ResumePoint:
    """The first checkpoint of a run without checkpoints of its own. Raises RelayrunError if it is missing.

    `new`: its campaign is being made.
    """
    membership = None if new else campaign.read_membership(run)
    if not isinstance(config, CommandConfig) or membership is None or resume_point(run).path is not None:
        return initial_checkpoint.find_initial_checkpoint(config, run, manifest, tell=log.warning)
    whole = Campaign.load(Path(membership.folder))  # its config has no setting for a checkpoint to begin with
    member = whole.member(membership.member)
    ready = condition_readiness(whole, member)
    if ready.base is None:
        raise RunDirError(f"this stage {ready.why}", where=run.path, hint="it begins by itself")
    return replace(ready.base, iteration=0) if member.counts_from_zero else ready.base


@contextmanager
def _undone_on_error(run: Run, made: Sequence[Path]) -> Iterator[None]:
    """Put the run directory back as it was if the block fails: a refused submit leaves no plan, revision or run.

    An existing directory keeps its content, STOP too; a new directory is removed. `made`: the run directory and its
    parents, as far as this submit made them. Called under the lock.
    """
    scripts = (run.job_script, run.fallback_script, run.evaluation_script)
    mirrored, told = run.mirror, run.notices
    policies = run.evaluation_policy, run.notice_policy, run.mirror_policy, mirrored / "id", run.overlap
    paths = (run.plan, *scripts, run.manifest, *policies, run.stop, run.owners, campaign.membership_path(run))
    before = {path: path.read_bytes() if path.exists() else None for path in paths}
    folders = (run.config, run.code, run.path / ORIGINAL_NAME, run.evaluations, run.triggers, told, mirrored)
    kept = {*run.config.glob("*"), *run.code.glob("*"), *(folder for folder in folders if folder.exists())}
    try:
        yield
    except BaseException:
        if run.path in made:  # another submit may have made it, in a parent that this one made
            shutil.rmtree(run.path, ignore_errors=True)
            for folder in made[1:]:
                with contextlib.suppress(OSError):  # somebody has put something there meanwhile
                    folder.rmdir()
            raise
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif not path.exists() or path.read_bytes() != content:
                write_atomic(path, content, mode=0o777 if path.suffix == ".sbatch" else 0o666)
        for path in {*run.config.glob("*"), *run.code.glob("*"), *folders} - kept:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise


def _acknowledge_stale(run: Run) -> None:
    """Acknowledge triggers that are older than this submit, which they were not meant for."""
    for name in triggers.TRIGGER_NAMES:
        if (old := triggers.read_trigger(run, name)) is not None:
            stale, iteration = "stale: touched before this submit", resume_point(run).iteration
            triggers.acknowledge_trigger(run, old, iteration=iteration, result=stale)


def _with_checkout_snapshot(run: Run, config: CommonConfig) -> CommonConfig:
    """The config with a copy of its checkout of Megatron-LM if `debug.backup_codebase` asks for a copy."""
    if not isinstance(config, MegatronConfig) or not config.debug.backup_codebase:
        return config
    copy = code_snapshot.snapshot_of_checkout(run, Path(config.megatron_lm.dir))
    return config.model_copy(update={"megatron_lm": config.megatron_lm.model_copy(update={"dir": str(copy)})})


def _takes_snapshot(config: CommonConfig) -> bool:
    """Return True if the jobs run a copy of the code: on request, or if an upgrade could change it under them."""
    return config.debug.backup_codebase or not places.is_checkout()


def dry_run(config: CommonConfig) -> str:
    """Return the job script that a submit would write; nothing is written or queued. Raises RelayrunError."""
    run = Run(Path(config.run_dir or ""))
    root = run.code / "0001" if _takes_snapshot(config) else places.CODE_ROOT
    return job_script.job_script(make_plan(config, run, root, revision=max(run.revisions(), default=0) + 1), run)


def _scheduler(plan: Plan, run: Run) -> Scheduler:
    """The plan's scheduler, asked for long only inside a job: elsewhere a person waits for the answer."""
    if "SLURM_JOB_ID" in os.environ:
        return scheduler_for_plan(plan, run)
    return scheduler_for_plan(plan, run, patience=INTERACTIVE_SECONDS, ordered=True)


def _refuse_while_live(run: Run) -> None:
    if not run.plan.exists():
        return
    plan = Plan.load(run)
    scheduler = _scheduler(plan, run)
    for job_id in scheduler.history.abandoned_jobs():
        scheduler.cancel(job_id)
        log.info("job %s of this run is cancelled: the terminal that would have started it has gone", job_id)
    existing_run.refuse_while_live(run, plan, scheduler)


def _freeze_data(run: Run, config: RunConfig, found: Manifest, *, accept: bool) -> RunConfig:
    """The first submit freezes the data; a later one may add to them. Returns the config with its editions.

    Data sets that stand in the manifest are never changed, so attempts of older revisions keep theirs.
    """
    evolved = existing_run.evolved_data(config, run, found, accept=accept)
    if evolved is None:
        found.write(run.manifest)
        return config
    for note in evolved.notes:
        log.info("accepted: %s", note)
    if evolved.manifest != Manifest.read(run.manifest):
        evolved.manifest.write(run.manifest)
    before = resolve.read_resolved_config(run.config_revision(run.revisions()[-1]))
    if not isinstance(before, RunConfig):  # it was another trainer's, before the first checkpoint
        return evolved.config
    changed = integer_mixture_weights(evolved.config) != integer_mixture_weights(before)
    if changed and resume_point(run).path is not None:
        consumed = Lineage(run).line()[-1].consumed_samples
        log.info("the mixture changes: its phase begins where the next attempt resumes, now sample %s", consumed)
    return evolved.config


def with_kept_settings(run: Run, config: CommonConfig, manifest: Manifest | None) -> CommonConfig:
    """The config as a submit would write it for a run that goes on: with the mean of its loss, and its editions."""
    if not isinstance(config, RunConfig):
        return config
    config = _with_loss_mean(run, config)
    return config if manifest is None else with_editions(config, run, manifest)


def _with_loss_mean(run: Run, config: RunConfig) -> RunConfig:
    """The config with a mean of the loss: a run that goes on keeps its own, unless the config names another."""
    training, revisions = config.training, run.revisions()
    mean = training.resolved_loss_mean
    if revisions:
        former = resolve.read_resolved_config(run.config_revision(revisions[-1]))
        before = former.training.resolved_loss_mean if isinstance(former, RunConfig) else mean
        mean = training.loss_mean or before
        if mean != before and config.data.masks_loss:
            log.warning("training.loss_mean was %s and is %s from the next attempt on", before, mean)
    return config.model_copy(update={"training": training.model_copy(update={"loss_mean": mean})})


def _add_revision(run: Run, config: CommonConfig) -> int:
    """Write the config as a new revision, unless it is the newest one already."""
    run.config.mkdir(exist_ok=True)
    revisions = run.revisions()
    if revisions and resolve.read_resolved_config(run.config_revision(revisions[-1])) == config:
        return revisions[-1]
    number = max(revisions, default=0) + 1
    write_atomic(run.config_revision(number), resolve.dump_run_config(config))
    return number
