"""From a run config to a queued job: the run directory is made or brought up to date, then one job is queued.

A submit is refused while the chain lives, and after it ended (exit trigger, last step, too many failed
attempts) unless `resume` is given. Submitting a changed config adds a revision; every attempt records the
one it used.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from relayrun import places
from relayrun.chain import decide, fallback, render, successor
from relayrun.chain.campaign import readiness
from relayrun.config import compose, determinism
from relayrun.config.elastic import elastic_nodes
from relayrun.config.sbatch import script_options
from relayrun.config.schema import CommandConfig, CommonConfig, Job, MegatronConfig, RunConfig
from relayrun.config.yamlfile import LocatedSettings
from relayrun.data.evolution import weights_of
from relayrun.errors import ConfigError, RunDirError
from relayrun.files import write_atomic
from relayrun.rundir import campaign, mirror, notices, triggers
from relayrun.rundir.campaign import Campaign, Membership
from relayrun.rundir.evaluations import Policy
from relayrun.rundir.lead import first_lead
from relayrun.rundir.lineage import BEGINNING, Durable, durable, line
from relayrun.rundir.plan import Plan, job_name
from relayrun.rundir.run import Run
from relayrun.scheduler import gres, history
from relayrun.scheduler.base import PATIENCE, Scheduler
from relayrun.scheduler.choose import for_plan
from relayrun.scheduler.slurm import Slurm
from relayrun.shards.manifest import Manifest
from relayrun.slurmtime import format_time, parse_time
from relayrun.submit import code_snapshot, initial_checkpoint, mirror_policy, node_health, notice_policy, owner
from relayrun.submit.check import state
from relayrun.submit.check.report import Report, report
from relayrun.submit.check.state import Intent
from relayrun.submit.trainer_settings import checkpoints_kept, save_interval, stop_after, total_steps, trainer_settings

log = logging.getLogger(__name__)

SECONDS_OF_A_PERSON = 20.0
"""For how long a controller that does not answer is asked again while a person waits."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The run directory and the job that a submit made."""

    run: Run
    plan: Plan
    job_id: str


def submit(
    config: CommonConfig,
    *,
    resume: bool = False,
    accept_data_change: bool = False,
    take_over: bool = False,
    given: LocatedSettings | None = None,
) -> Submitted:
    """Check, prepare the run directory, queue one job. Raises RelayrunError; then nothing was queued.

    `resume`: also where the chain has ended. `take_over`: also where the run is another user's, whose jobs have ended.
    `given`: where the settings were written, for errors.
    """
    intent = Intent(resume=resume, accept_data_change=accept_data_change, take_over=take_over)
    with prepared(config, intent, given) as (run, plan):
        return Submitted(run=run, plan=plan, job_id=queue_first(run, plan))


def queue_first(run: Run, plan: Plan) -> str:
    """Queue the first job of a prepared run, and a fallback job behind it; return its id. Raises SchedulerError."""
    return successor.queue_first(run, plan, _scheduler(plan, run))


def adopt_job(
    config: CommonConfig,
    *,
    host_python: str | None = None,
    resume: bool = False,
    accept_data_change: bool = False,
    take_over: bool = False,
) -> Run:
    """Make the job that this process runs in the first of a chain: what a Bash launcher's job does.

    The options that the job was submitted with win over the config's, and so does `host_python`. Raises RelayrunError.
    """
    scheduler = Slurm()
    job = scheduler.query(scheduler.current_job_id())
    if job is None:
        raise RunDirError("Slurm does not know the job that this runs in")
    run = Run(Path(config.run_dir or ""))
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and run.plan.exists() and Plan.load(run).job_name == job.name:
        return run  # Slurm starts a requeued job with the launcher again; it was adopted the first time
    if (setting := config.outlives_nodes) is not None:
        raise ConfigError(
            f"{setting}: the job of a launcher has not asked Slurm to outlive the loss of a node (--no-kill)",
            where="settings block",
            hint=f"start the run with `relayrun submit`, or leave {setting} out",
        )
    nodes = config.job.model_copy(update={"nodes": job.num_nodes})
    cluster = config.cluster.model_copy(update={"host_python": host_python or config.cluster.host_python})
    config = type(config).model_validate(config.model_copy(update={"job": nodes, "cluster": cluster}).model_dump())
    intent = Intent(resume=resume, accept_data_change=accept_data_change, take_over=take_over)
    with prepared(config, intent) as (run, plan):
        scheduler.adopt(job, plan)  # under the lock: a second first job sees this one
        fallback.put_behind(run, plan, job.id, options=job.options)
        return run


def report_on(
    config: CommonConfig, *, given: LocatedSettings | None = None, intent: Intent, launcher: Path | None = None
) -> Report:
    """Look at all that a submit would look at, and at what Slurm says; nothing is written or queued.

    `launcher`: the Bash script that is to be given to sbatch, instead of a job of relayrun's own.
    """
    run = Run(Path(config.run_dir or ""))
    plan = make_plan(config, run, places.CODE, revision=max(run.revisions(), default=0) + 1)
    script = launcher or render.job_script(plan, run)
    return report(config, plan, run, log_folder=log_folder(run), given=given, intent=intent, script=script)


@contextmanager
def prepared(
    config: CommonConfig,
    intent: Intent,
    given: LocatedSettings | None = None,
    *,
    membership: Membership | None = None,
    awaited: bool = False,
) -> Iterator[tuple[Run, Plan]]:
    """The run directory made or brought up to date, and locked. After an error it is as before, STOP too.

    `membership`: of the campaign that the run is made for. `awaited`: what it begins with is not there yet.
    """
    run = Run(Path(config.run_dir or ""))
    # the run's state is looked at under the lock, and Slurm by the scheduler
    plan = make_plan(config, run, places.CODE, revision=0)
    found = report(config, plan, run, log_folder=log_folder(run), given=given)
    found.findings.raise_errors()
    for finding in found.findings.warnings:
        log.warning("%s", finding.line)
    log_folder(run).mkdir(parents=True, exist_ok=True)
    with _locked(run) as made, _undone_on_error(run, made):
        _refuse_while_live(run)
        owner.refuse_another(run, take_over=intent.take_over, now=time.time())
        state.refuse_after_end(run, resume=intent.resume)
        state.check_stop_after(config, run)
        state.check_time_limit(config, make_plan(config, run, places.CODE, revision=0), run)
        state.refuse_other_trainer(config, run)
        if isinstance(config, RunConfig):
            assert found.manifest is not None  # without data there is an error
            config = _freeze_data(run, _with_loss_mean(run, config), found.manifest, accept=intent.accept_data_change)
        if membership is not None:  # before the plan, which makes it a run
            membership.write(campaign.membership_path(run))
        base = BEGINNING if awaited else _initial_checkpoint(config, run, found.manifest, new=membership is not None)
        root = code_snapshot.snapshot(run, places.CODE) if _takes_snapshot(config) else places.CODE
        revision = _add_revision(run, config)
        plan = make_plan(_with_checkout_snapshot(run, config), run, root, revision=revision, base=base)
        triggers.create_folder(run, config.chain.triggers_group)
        if config.chain.triggers_group is not None and (barrier := triggers.barrier(run)) is not None:
            log.warning(
                "members of chain.triggers_group %s cannot reach the triggers: "
                "%s is closed to them; open it with chmod g+x",
                config.chain.triggers_group,
                barrier,
            )
        _acknowledge_stale(run)
        owner.claim(run, plan, take_over=intent.take_over, now=time.time())  # a queued job may have begun meanwhile
        write_atomic(run.job_script, render.job_script(plan, run), mode=0o777)
        if plan.fallback_job:
            write_atomic(run.fallback_script, render.fallback_script(plan, run), mode=0o777)
        _prepare_evaluations(config, plan, run)
        mirror_policy.prepare(config, run)
        run.stop.unlink(missing_ok=True)
        notice_policy.prepare(config, run)  # behind STOP, which would be told once more
        yield run, plan


def _initial_checkpoint(config: CommonConfig, run: Run, manifest: Manifest | None, *, new: bool) -> Durable:
    """What a run without checkpoints of its own begins with. Raises RelayrunError where that is not there.

    `new`: its campaign is being made.
    """
    membership = None if new else campaign.read_membership(run)
    if not isinstance(config, CommandConfig) or membership is None or durable(run).path is not None:
        return initial_checkpoint.find_initial_checkpoint(config, run, manifest, tell=log.warning)
    whole = Campaign.load(Path(membership.folder))  # its config has no setting for a checkpoint to begin with
    member = whole.member(membership.member)
    ready = readiness(whole, member)
    if ready.base is None:
        raise RunDirError(f"this stage {ready.why}", where=run.path, hint="it begins by itself")
    return replace(ready.base, iteration=0) if member.counts_from_zero else ready.base


@contextmanager
def _undone_on_error(run: Run, made: Sequence[Path]) -> Iterator[None]:
    """Put the run directory back as it was if the block fails: a refused submit leaves no plan, revision or run.

    What a directory held that was there before stays, STOP too; one that this submit made is removed. `made`: the
    run directory and its parents, as far as this submit made them. Called under the lock.
    """
    scripts = (run.job_script, run.fallback_script, run.evaluation_script)
    policies = (run.evaluation_policy, notices.policy_path(run), mirror.policy_path(run))
    paths = (run.plan, *scripts, run.manifest, *policies, run.stop, run.owners, campaign.membership_path(run))
    before = {path: path.read_bytes() if path.exists() else None for path in paths}
    revisions = set(run.revisions())
    folders = [run.config, run.code, run.evaluations, run.triggers, notices.folder(run), mirror.folder(run)]
    kept = {folder for folder in folders if folder.exists()} | set(run.code.glob("*"))
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
        for number in set(run.revisions()) - revisions:
            run.config_revision(number).unlink()
        for path in [*run.code.glob("*"), *folders]:
            if path not in kept and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path not in kept:
                path.unlink(missing_ok=True)
        raise


def _acknowledge_stale(run: Run) -> None:
    """A trigger that is older than an explicit submit was not meant for it."""
    for name in triggers.NAMES:
        if (old := triggers.look(run, name)) is not None:
            triggers.acknowledge(run, old, iteration=durable(run).iteration, result="stale: touched before this submit")


def make_plan(config: CommonConfig, run: Run, root: Path, *, revision: int, base: Durable = BEGINNING) -> Plan:
    """Return what the supervisor needs of a config.

    The jobs run the code in `root`; a run without checkpoints begins with `base`. Raises ConfigError where the
    settings of a foreign trainer cannot be made.
    """
    settings = trainer_settings(config, run)
    time_limit = parse_time(config.job.time)
    fixed = None if config.chain.lead == "auto" else float(config.chain.lead)
    lead = first_lead(time_limit) if fixed is None else fixed
    signal_lead = config.chain.signal_lead
    job, cluster = config.job, config.cluster
    container = cluster.container.with_mounts([str(root), str(run.path), *_mounts(config, run)])
    return Plan(
        run=f"{config.project}/{config.name}",
        job_name=job_name(config.project, config.name, run.path),
        scheduler=cluster.scheduler,
        total_steps=total_steps(config, settings),
        stop_after=stop_after(config),
        config_revision=revision,
        submitted_after_attempt=max(run.attempt_numbers(), default=0),
        owner=os.geteuid(),
        auto_requeue=config.chain.auto_requeue,
        mode=config.chain.mode,
        fallback_job=config.chain.fallback_job and config.chain.auto_requeue and cluster.scheduler == "slurm",
        max_failed_attempts=config.chain.max_failed_attempts,
        recovery=config.chain.recovery,
        max_failed_rounds=config.chain.max_failed_rounds,
        fork_server=_fork_server(config, run) if config.chain.recovery == "node" else [],
        node_health=node_health.of(config),
        time_limit=time_limit,
        lead=lead,
        lead_floor=min(config.chain.lead_floor, time_limit / 2) if fixed is None else fixed,
        lead_ceiling=time_limit / 2 if fixed is None else fixed,
        signal_lead=decide.default_signal_lead(lead) if signal_lead == "auto" else signal_lead,
        hang_timeout=config.chain.hang_timeout,
        start_timeout=config.chain.start_timeout,
        nodes=job.nodes,
        spare_nodes=job.spare_nodes,
        elastic_nodes=elastic_nodes(config) if isinstance(config, RunConfig) else [],
        ntasks_per_node=job.ntasks_per_node,
        cpus_per_task=job.cpus_per_task,
        sbatch_options=sbatch_options(job),
        srun_options=[*cluster.srun_options, *container.srun_options],
        command_prefix=[*container.command, *cluster.command_prefix],
        program=_native_program(config, run) if isinstance(config, RunConfig) else [],
        environment=(determinism.variables(config) if isinstance(config, RunConfig) else {}) | cluster.environment,
        modules=cluster.modules,
        setup=job.setup,
        trainer=config.trainer,
        trainer_settings=settings,
        host_python=sys.executable if cluster.scheduler == "local" else cluster.host_python,
        package_root=str(root),
        log_folder=str(log_folder(run)),
        load_path=base.path,
        load_iteration=base.iteration,
        purge_days=cluster.purge_days,
        quota_command=cluster.quota_command,
        checkpoints_kept=checkpoints_kept(config),
        save_interval=save_interval(config),
    )


def _native_program(config: RunConfig, run: Run) -> list[str]:
    return [config.cluster.python or sys.executable, "-m", "relayrun.training", f"--run-dir={run.path}"]


def _fork_server(config: CommonConfig, run: Run) -> list[str]:
    """The server of an agent: it forks the ranks of our own program, and starts those of another one."""
    python = config.cluster.python or sys.executable
    if isinstance(config, RunConfig):
        return [python, "-m", "relayrun.training.fork_server", f"--run-dir={run.path}"]
    return [python, "-P", "-m", "relayrun.agent.start_server", f"--run-dir={run.path}"]


def _mounts(config: CommonConfig, run: Run) -> list[str]:
    """Folders that a container must show besides relayrun's code and the run's directory."""
    found = [config.megatron_lm.dir] if isinstance(config, MegatronConfig) else []
    if config.chain.recovery == "node" and config.trainer != "native":
        found.append(str(log_folder(run)))  # the coordinator sees there that nothing of a round is on its way any more
    return found


def sbatch_options(job: Job) -> dict[str, str | None]:
    """Where a job runs and what else it asks for, by sbatch's long names; None: an option without a value."""
    further = script_options(job.sbatch)
    found: dict[str, str | None] = {**job.placement}
    if job.gpus_per_node and not gres.asks_for_gpus(further):
        found["gpus-per-node"] = str(job.gpus_per_node)
    if job.exclusive:
        found["exclusive"] = None
    return found | further


def log_folder(run: Run | None = None) -> Path:
    """Where the jobs of every run of a project write their logs: of the project that the run directory lies in, or
    else of the working directory's."""
    return places.project(run.path if run is not None else None) / "logs" / "slurm" / "training"


def _with_checkout_snapshot(run: Run, config: CommonConfig) -> CommonConfig:
    """The config with a copy of its checkout of Megatron-LM, where `debug.backup_codebase` asks for one."""
    if not isinstance(config, MegatronConfig) or not config.debug.backup_codebase:
        return config
    copy = code_snapshot.snapshot_of_checkout(run, Path(config.megatron_lm.dir))
    return config.model_copy(update={"megatron_lm": config.megatron_lm.model_copy(update={"dir": str(copy)})})


def _takes_snapshot(config: CommonConfig) -> bool:
    """Whether the jobs run a copy of the code: if they are to, and wherever the code is an installed package, which an
    upgrade would change under queued jobs."""
    return config.debug.backup_codebase or not places.is_checkout()


def _prepare_evaluations(config: CommonConfig, plan: Plan, run: Run) -> None:
    """Write the policy and the job of evaluations; none where the config has none any more."""
    if config.evaluation is None:
        run.evaluation_policy.unlink(missing_ok=True)
        return
    run.evaluations.mkdir(exist_ok=True)
    settings = config.evaluation
    policy = Policy(
        interval=settings.interval,
        total_steps=plan.total_steps or 0,
        hold=settings.hold,
        time_limit=parse_time(settings.job.time),
    )
    write_atomic(run.evaluation_script, evaluation_script(config, plan, run), mode=0o777)
    policy.write(run.evaluation_policy)


def evaluation_script(config: CommonConfig, plan: Plan, run: Run) -> str:
    """Return the script of the job that evaluates one checkpoint.

    What its section leaves out is as in the run's own jobs.
    """
    assert config.evaluation is not None
    own, job = config.evaluation.job, config.job
    cpus = str(own.cpus_per_task or job.cpus_per_task)
    options: dict[str, str | None] = {"time": format_time(parse_time(own.time)), "cpus-per-task": cpus}
    # without the run's memory, which is meant for all its ranks of a node
    options |= {name: value for name, value in job.placement.items() if name != "mem"} | own.placement
    gpus = min(1, job.gpus_per_node) if own.gpus_per_node is None else own.gpus_per_node
    further = script_options(job.sbatch | own.sbatch)
    if "gres" in job.sbatch and "gres" not in own.sbatch:  # meant for all ranks of a node
        further["gres"] = gres.with_gpus(str(job.sbatch["gres"]), str(gpus))
    if gpus and not gres.asks_for_gpus(further):
        options["gpus-per-node"] = str(gpus)
    options |= {name: value for name, value in further.items() if value != ""}
    program = [config.cluster.python or sys.executable, "-m", "relayrun.export.evaluate", f"--run-dir={run.path}"]
    starter = for_plan(plan, run).single_task_command(plan, cpus_per_task=cpus)
    environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": cpus, **plan.environment}
    environment.pop("PYTHONPATH", None)  # joined with the package's by `render`
    command = [*starter, *plan.command_prefix, *program]
    return render.program_script(
        plan, "evaluation", options, environment=environment, command=command, fallback=run.path
    )


def dry_run(config: CommonConfig) -> str:
    """Return the job script that a submit would write; nothing is written or queued. Raises RelayrunError."""
    run = Run(Path(config.run_dir or ""))
    root = run.code / "0001" if _takes_snapshot(config) else places.CODE
    return render.job_script(make_plan(config, run, root, revision=max(run.revisions(), default=0) + 1), run)


def _scheduler(plan: Plan, run: Run) -> Scheduler:
    """The plan's scheduler, asked for long only inside a job: elsewhere a person waits for the answer."""
    return for_plan(plan, run, patience=PATIENCE if "SLURM_JOB_ID" in os.environ else SECONDS_OF_A_PERSON)


def _refuse_while_live(run: Run) -> None:
    if not run.plan.exists():
        return
    plan = Plan.load(run)
    scheduler = _scheduler(plan, run)
    for job_id in history.abandoned(plan, run):
        scheduler.cancel(job_id)
        log.info("job %s of this run is cancelled: the terminal that would have started it has gone", job_id)
    state.refuse_while_live(run, plan, scheduler)


def _freeze_data(run: Run, config: RunConfig, found: Manifest, *, accept: bool) -> RunConfig:
    """The first submit freezes the data; a later one may add to them. Returns the config with its editions.

    Data sets that stand in the manifest are never changed, so attempts of older revisions keep theirs.
    """
    evolved = state.evolved(config, run, found, accept=accept)
    if evolved is None:
        found.write(run.manifest)
        return config
    for note in evolved.notes:
        log.info("accepted: %s", note)
    if evolved.manifest != Manifest.read(run.manifest):
        evolved.manifest.write(run.manifest)
    before = compose.read_resolved(run.config_revision(run.revisions()[-1]))
    if not isinstance(before, RunConfig):  # it was another trainer's, before the first checkpoint
        return evolved.config
    if durable(run).path is not None and weights_of(evolved.config) != weights_of(before):
        consumed = line(run)[-1].consumed_samples
        log.info("the mixture changes: its phase begins where the next attempt resumes, now sample %s", consumed)
    return evolved.config


def _with_loss_mean(run: Run, config: RunConfig) -> RunConfig:
    """The config with a mean of the loss: a run that goes on keeps its own, unless the config names another."""
    training, revisions = config.training, run.revisions()
    mean = training.resolved_loss_mean
    if revisions:
        former = compose.read_resolved(run.config_revision(revisions[-1]))
        before = former.training.resolved_loss_mean if isinstance(former, RunConfig) else mean
        mean = training.loss_mean or before
        if mean != before and config.data.masks_loss:
            log.warning("training.loss_mean was %s and is %s from the next attempt on", before, mean)
    return config.model_copy(update={"training": training.model_copy(update={"loss_mean": mean})})


def _add_revision(run: Run, config: CommonConfig) -> int:
    """Write the config as a new revision, unless it is the newest one already."""
    run.config.mkdir(exist_ok=True)
    revisions = run.revisions()
    if revisions and compose.read_resolved(run.config_revision(revisions[-1])) == config:
        return revisions[-1]
    number = max(revisions, default=0) + 1
    write_atomic(run.config_revision(number), compose.dump(config))
    return number


@contextmanager
def _locked(run: Run) -> Iterator[list[Path]]:
    """One submit at a time; gives the folders that this one made, the innermost first."""
    made = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
    for folder in reversed(made):
        try:
            folder.mkdir()
        except FileExistsError:  # another submit's
            made.remove(folder)
    with open(run.path / ".submit.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError("another submit of this run is under way", where=run.path) from None
        yield made
