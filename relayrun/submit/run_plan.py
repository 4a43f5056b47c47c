"""The plan of a run: from a config to plan.json, so that the supervisor and the jobs need no config.

`make_plan` returns the plan; `trainer_settings` the settings of the trainer in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from relayrun import places
from relayrun.config.compose import determinism
from relayrun.config.compose.schema import CommandConfig, CommonConfig, JobSection, MegatronConfig, RunConfig
from relayrun.config.sections.batch_systems import batch_system
from relayrun.config.sections.job_script import sbatch_script_options
from relayrun.control import decisions
from relayrun.control.rundir.checkpoint_records import BEGINNING, ResumePoint
from relayrun.control.rundir.plan import Plan, chain_job_name
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.time_limit import first_grace_period
from relayrun.control.scheduler import slurm_commands
from relayrun.slurmtime import parse_time
from relayrun.submit.megatron_lm.command_line import command_line


def trainer_settings(config: CommonConfig, run: Run) -> dict[str, Any]:
    """Return the settings for the trainer's class in `relayrun.control.trainers`; {} for trainer native.

    Raises ConfigError, and InputError if data that a command names are not there.
    """
    if isinstance(config, CommandConfig):
        command = config.command
        words, resume = (fill_in_python(config, each) for each in (command.run, command.resume))
        return asdict(replace(command, run=words, resume=resume))
    if isinstance(config, MegatronConfig):
        return asdict(command_line(config, run).settings)
    return {}


def total_steps(config: CommonConfig, settings: dict[str, Any]) -> int | None:
    """Return the run's last iteration; None if only its program knows it. `settings`: those of its trainer."""
    if isinstance(config, RunConfig):
        return config.training.steps
    if isinstance(config, CommandConfig):
        return config.command.steps
    return int(settings["total_steps"])


def stop_after(config: CommonConfig) -> int | None:
    """Return the iteration before the last one at which the run is to stop; None if it is to go on."""
    training = config.training if isinstance(config, RunConfig | MegatronConfig) else None
    return None if training is None else training.stop_after


def fill_in_python(config: CommandConfig, words: Sequence[str]) -> list[str]:
    """Return words of a command with `{python}` filled in; what an attempt decides is filled in by the trainer."""
    return [word.replace("{python}", config.cluster.rank_python) for word in words]


def make_plan(config: CommonConfig, run: Run, root: Path, *, revision: int, base: ResumePoint = BEGINNING) -> Plan:
    """Return what the supervisor needs of a config.

    The jobs run the code in `root`; a run without checkpoints begins with `base`. Raises ConfigError if the
    settings of a foreign trainer cannot be made.
    """
    settings = trainer_settings(config, run)
    time_limit = parse_time(config.job.time)
    fixed = None if config.chain.grace_period == "auto" else float(config.chain.grace_period)
    grace_period = first_grace_period(time_limit) if fixed is None else fixed
    signal_seconds = config.chain.signal_seconds
    job, cluster, saves = config.job, config.cluster, config.checkpoint_section
    python, safe_python = [cluster.rank_python, "-m"], [cluster.rank_python, "-P", "-m"]
    container = cluster.container.with_mounts([str(root), str(run.path), *_mounts(config, run)])
    return Plan(
        run=f"{config.project}/{config.name}",
        job_name=chain_job_name(config.project, config.name, run.path),
        scheduler=cluster.scheduler,
        total_steps=total_steps(config, settings),
        stop_after=stop_after(config),
        config_revision=revision,
        submitted_after_attempt=max(run.attempt_numbers(), default=0),
        owner=os.geteuid(),
        chain=replace(config.chain, failure_signatures=config.chain.failure_signatures + cluster.failure_signatures),
        fork_server=_fork_server(config, run) if config.chain.recovery == "node" else [],
        gpus_per_node=job.gpus_per_node,
        gpu_program=[*safe_python, "relayrun.train.gpu_health"] if job.gpus_per_node else [],
        time_limit=time_limit,
        grace_period=grace_period,
        min_grace_period=min(config.chain.min_grace_period, time_limit / 2) if fixed is None else fixed,
        max_grace_period=time_limit / 2 if fixed is None else fixed,
        signal_seconds=decisions.default_signal_seconds(grace_period) if signal_seconds == "auto" else signal_seconds,
        nodes=job.nodes,
        spare_nodes=job.spare_nodes,
        ntasks_per_node=job.ntasks_per_node,
        cpus_per_task=job.cpus_per_task,
        sbatch_options=sbatch_options(job),
        srun_options=[*cluster.srun_options, *container.srun_options],
        command_prefix=[*container.command, *cluster.command_prefix],
        program=[*python, "relayrun.train", f"--run-dir={run.path}"] if isinstance(config, RunConfig) else [],
        environment=(determinism.deterministic_variables(config) if isinstance(config, RunConfig) else {})
        | cluster.environment,
        modules=cluster.modules,
        setup=job.setup,
        trainer=config.trainer,
        trainer_settings=settings,
        host_python=sys.executable if batch_system(cluster.scheduler).one_machine else cluster.host_python,
        package_root=str(root),
        log_folder=str(log_folder(run)),
        load_path=base.path,
        load_iteration=base.iteration,
        cost_per_node_hour=cluster.cost_per_node_hour,
        currency=cluster.currency,
        quota_command=cluster.quota_command,
        checkpoints_kept=None if saves is None else saves.keep_last,
        save_interval=None if saves is None else saves.interval,
    )


def _fork_server(config: CommonConfig, run: Run) -> list[str]:
    """The server of an agent: it forks the ranks of our own program, and starts those of another one."""
    python = config.cluster.rank_python
    if isinstance(config, RunConfig):
        return [python, "-m", "relayrun.train.fork_server", f"--run-dir={run.path}"]
    return [python, "-P", "-m", "relayrun.control.agent.spawn_server", f"--run-dir={run.path}"]


def _mounts(config: CommonConfig, run: Run) -> list[str]:
    """Folders that a container must show besides relayrun's code and the run's directory."""
    found = [config.megatron_lm.dir] if isinstance(config, MegatronConfig) else []
    if config.chain.recovery == "node" and config.trainer != "native":
        found.append(str(log_folder(run)))  # the coordinator sees there that a restart has written all
    return found


def sbatch_options(job: JobSection) -> dict[str, str | None]:
    """Return the options of a job by sbatch's long names; None: an option without a value."""
    further = sbatch_script_options(job.sbatch)
    found: dict[str, str | None] = {**job.placement}
    if job.gpus_per_node and not slurm_commands.asks_for_gpus(further):
        found["gpus-per-node"] = str(job.gpus_per_node)
    if job.exclusive:
        found["exclusive"] = None
    return found | further


def log_folder(run: Run) -> Path:
    """Return the folder for the logs of all jobs of the project that the run directory lies in."""
    return places.project_folder(run.path) / "logs" / "slurm" / "training"
