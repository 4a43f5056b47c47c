"""The policies beside the plan, which the jobs read instead of the config: mirror of checkpoints, notices, evaluations.

Each `write_...` function writes the policy into the run directory, or removes it if the config has none any more.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from relayrun.config.compose.schema import CommonConfig
from relayrun.config.sections.checkpoint import MirrorSection
from relayrun.config.sections.job_script import sbatch_script_options
from relayrun.control.chain import job_script
from relayrun.control.notify import notices
from relayrun.control.notify.notices import NoticePolicy
from relayrun.control.rundir import mirror
from relayrun.control.rundir.evaluations import EvaluationPolicy
from relayrun.control.rundir.mirror import MirrorOwner, MirrorPolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import slurm_commands
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import ConfigError
from relayrun.files import write_atomic, write_error
from relayrun.slurmtime import format_time, parse_time
from relayrun.train.mirror import sync
from relayrun.train.mirror.destination import refuse_place_of_others


def write_evaluation_policy(config: CommonConfig, plan: Plan, run: Run) -> None:
    """Write the policy and the job of evaluations; none if the config has none any more."""
    if config.evaluation is None:
        run.evaluation_policy.unlink(missing_ok=True)
        return
    run.evaluations.mkdir(exist_ok=True)
    own, steps = config.evaluation, plan.total_steps or 0
    policy = EvaluationPolicy(
        interval=own.interval, total_steps=steps, hold=own.hold, time_limit=parse_time(own.job.time)
    )
    write_atomic(run.evaluation_script, evaluation_script(config, plan, run), mode=0o777)
    policy.write(run.evaluation_policy)


def evaluation_script(config: CommonConfig, plan: Plan, run: Run) -> str:
    """Return the script of the job that evaluates one checkpoint; what its section leaves out is as in the run."""
    assert config.evaluation is not None
    own, job = config.evaluation.job, config.job
    cpus = str(own.cpus_per_task or job.cpus_per_task)
    options: dict[str, str | None] = {"time": format_time(parse_time(own.time)), "cpus-per-task": cpus}
    # without the run's memory, which is meant for all its ranks of a node
    options |= {name: value for name, value in job.placement.items() if name != "mem"} | own.placement
    gpus = own.gpus(job.gpus_per_node)
    further = sbatch_script_options(job.sbatch | own.sbatch)
    if "gres" in job.sbatch and "gres" not in own.sbatch:  # meant for all ranks of a node
        further["gres"] = slurm_commands.gres_with_gpus(str(job.sbatch["gres"]), str(gpus))
    if gpus and not slurm_commands.asks_for_gpus(further):
        options["gpus-per-node"] = str(gpus)
    options |= {name: value for name, value in further.items() if value != ""}
    evaluate = ["-m", "relayrun.train.export.evaluate", f"--run-dir={run.path}", "--in-job"]
    starter = scheduler_for_plan(plan, run).single_task_command(plan, cpus_per_task=cpus)
    environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": cpus, **plan.environment}
    environment.pop("PYTHONPATH", None)  # joined with the package's by `job_script`
    command = [*starter, *plan.command_prefix, config.cluster.rank_python, *evaluate]
    return job_script.program_script(
        plan, "evaluation", options, environment=environment, command=command, fallback=run.path
    )


def mirror_settings(config: CommonConfig) -> MirrorSection | None:
    """Return what the config says of a second place; None if it has none."""
    return None if config.checkpoint_section is None else config.checkpoint_section.mirror


def mirror_location(config: CommonConfig, settings: MirrorSection) -> Path:
    """Return the folder of the run's copies."""
    return Path(settings.path, config.project, config.name)


def refuse_mirror_of_other_run(config: CommonConfig, run: Run, *, take_over: bool) -> None:
    """Raise ConfigError if another run's copies lie in the second place: nothing would be copied.

    `take_over`: those of a run whose directory is lost become this run's; see `write_mirror_policy`.
    """
    settings, owner = mirror_settings(config), _other_mirrored_run(config, run)
    if settings is not None:
        refuse_place_of_others(mirror_location(config, settings))
    if settings is None or owner is None:
        return
    place = mirror_location(config, settings)
    where = f"checkpoint.mirror.path: {place}"
    if _is_copied(owner, run):
        hint = "set checkpoint.mirror.path to another place"
        raise ConfigError(f"it holds the copies of another run, {owner.run}", where=where, hint=hint)
    if not take_over:
        raise ConfigError(
            f"it holds the copies of a run that is not there any more, {owner.run}; nothing would be copied",
            where=where,
            hint="submit with --take-over to go on with them, or set checkpoint.mirror.path to another place",
        )
    saves = config.checkpoint_section
    begins_anew = saves is not None and saves.load is None and run.newest_begun() is None
    if begins_anew and mirror.read_copies(place):
        raise ConfigError(
            f"the run would begin anew, and its checkpoints take the place of the copies of {owner.run}",
            where=where,
            hint=f"`relayrun checkpoint restore {place} --to FOLDER`, then submit with --load "
            "FOLDER/iter_... --take-over; or set checkpoint.mirror.path to another place",
        )


def _other_mirrored_run(config: CommonConfig, run: Run) -> MirrorOwner | None:
    """The other run whose copies lie in the second place, if any. Raises RelayrunError, OSError."""
    settings = mirror_settings(config)
    owner = None if settings is None else mirror.read_owner(mirror_location(config, settings))
    path = run.mirror / "id"
    if owner is None or (path.exists() and path.read_text(encoding="ascii") == owner.id and not _is_copied(owner, run)):
        return None
    return owner


def _is_copied(owner: MirrorOwner, run: Run) -> bool:
    """Return True if the run is a copy of another directory that still exists and copies under the same id."""
    return owner.run != str(run.path) and sync.is_still_mirrored(Run(Path(owner.run)), owner.id)


def write_mirror_policy(config: CommonConfig, run: Run, *, take_over: bool = False) -> None:
    """Write the policy; none if the config has no second place. The copies that there are stay.

    `take_over`: the run is known by the id of the lost run whose copies lie there, so that they count as its own.
    """
    settings = mirror_settings(config)
    if settings is None:
        run.mirror_policy.unlink(missing_ok=True)
        return
    run.mirror.mkdir(exist_ok=True)
    path = run.mirror / "id"
    if take_over and (owner := _other_mirrored_run(config, run)) is not None:
        write_atomic(path, owner.id)
    elif not path.exists():
        write_atomic(path, secrets.token_hex(8))
    MirrorPolicy(
        folder=str(mirror_location(config, settings)),
        id=path.read_text(encoding="ascii"),
        program=[config.cluster.rank_python, "-m", "relayrun.train.mirror.sync"],
        **settings.model_dump(exclude={"path"}),
    ).write(run.mirror_policy)


def refuse_mirror_location(settings: MirrorSection, run: Run) -> None:
    """Raise ConfigError if copies cannot lie in this place."""
    path = Path(settings.path)
    where = f"checkpoint.mirror.path: {path}"
    if not path.is_dir():
        raise ConfigError("there is no such folder", where=where, hint="make it, or mount it")
    if path.resolve().is_relative_to(run.path.resolve()):
        raise ConfigError("it lies in the run directory, and is lost with it", where=where)
    if error := write_error(path):
        raise ConfigError(f"it cannot be written: {error.strerror}", where=where)


def write_notice_policy(config: CommonConfig, run: Run) -> None:
    """Write the policy; none if the config names nobody."""
    if config.notify.targets:
        notices.write_notice_policy(run, make_notice_policy(config))
    else:
        run.notice_policy.unlink(missing_ok=True)


def make_notice_policy(config: CommonConfig) -> NoticePolicy:
    """The policy of a config, as of now. It holds the names of variables, never their values."""
    settings = config.notify
    targets = [
        {"name": name, **target.model_dump(), "events": settings.events if target.events is None else target.events}
        for name, target in settings.targets.items()
    ]
    return NoticePolicy(
        run=f"{config.project}/{config.name}",
        cluster=config.cluster.name,
        since=time.time(),
        targets=targets,
        program=[config.cluster.rank_python, "-m", "relayrun.watch.send_notices"],
        **settings.model_dump(exclude={"targets", "events"}),
    )
