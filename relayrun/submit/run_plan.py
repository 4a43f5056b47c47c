"""The plan of a run: what the supervisor and the jobs need of a config, so that they need no config."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from relayrun import places
from relayrun.config.compose import determinism
from relayrun.config.compose.elastic import elastic_nodes
from relayrun.config.compose.schema import CommonConfig, JobSection, MegatronConfig, RunConfig
from relayrun.config.sections.sbatch import sbatch_script_options
from relayrun.control import chain_decide
from relayrun.control.rundir.lead import first_grace_period
from relayrun.control.rundir.lineage import BEGINNING, ResumePoint
from relayrun.control.rundir.plan import Plan, chain_job_name
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import gres
from relayrun.slurmtime import parse_time
from relayrun.submit import node_health
from relayrun.submit.trainer_settings import checkpoints_kept, save_interval, stop_after, total_steps, trainer_settings


def make_plan(config: CommonConfig, run: Run, root: Path, *, revision: int, base: ResumePoint = BEGINNING) -> Plan:
    """Return what the supervisor needs of a config.

    The jobs run the code in `root`; a run without checkpoints begins with `base`. Raises ConfigError where the
    settings of a foreign trainer cannot be made.
    """
    settings = trainer_settings(config, run)
    time_limit = parse_time(config.job.time)
    fixed = None if config.chain.lead == "auto" else float(config.chain.lead)
    lead = first_grace_period(time_limit) if fixed is None else fixed
    signal_lead = config.chain.signal_lead
    job, cluster = config.job, config.cluster
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
        auto_requeue=config.chain.auto_requeue,
        mode=config.chain.mode,
        fallback_job=config.chain.fallback_job and config.chain.auto_requeue and cluster.scheduler == "slurm",
        max_failed_attempts=config.chain.max_failed_attempts,
        recovery=config.chain.recovery,
        max_failed_rounds=config.chain.max_failed_rounds,
        fork_server=_fork_server(config, run) if config.chain.recovery == "node" else [],
        node_health=node_health.node_health_plan(config),
        time_limit=time_limit,
        lead=lead,
        lead_floor=min(config.chain.lead_floor, time_limit / 2) if fixed is None else fixed,
        lead_ceiling=time_limit / 2 if fixed is None else fixed,
        signal_lead=chain_decide.default_signal_seconds(lead) if signal_lead == "auto" else signal_lead,
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
        environment=(determinism.deterministic_variables(config) if isinstance(config, RunConfig) else {})
        | cluster.environment,
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
    return [config.cluster.python or sys.executable, "-m", "relayrun.train", f"--run-dir={run.path}"]


def _fork_server(config: CommonConfig, run: Run) -> list[str]:
    """The server of an agent: it forks the ranks of our own program, and starts those of another one."""
    python = config.cluster.python or sys.executable
    if isinstance(config, RunConfig):
        return [python, "-m", "relayrun.train.fork_server", f"--run-dir={run.path}"]
    return [python, "-P", "-m", "relayrun.control.agent.spawn_server", f"--run-dir={run.path}"]


def _mounts(config: CommonConfig, run: Run) -> list[str]:
    """Folders that a container must show besides relayrun's code and the run's directory."""
    found = [config.megatron_lm.dir] if isinstance(config, MegatronConfig) else []
    if config.chain.recovery == "node" and config.trainer != "native":
        found.append(str(log_folder(run)))  # the coordinator sees there that nothing of a round is on its way any more
    return found


def sbatch_options(job: JobSection) -> dict[str, str | None]:
    """Where a job runs and what else it asks for, by sbatch's long names; None: an option without a value."""
    further = sbatch_script_options(job.sbatch)
    found: dict[str, str | None] = {**job.placement}
    if job.gpus_per_node and not gres.asks_for_gpus(further):
        found["gpus-per-node"] = str(job.gpus_per_node)
    if job.exclusive:
        found["exclusive"] = None
    return found | further


def log_folder(run: Run | None = None) -> Path:
    """Where the jobs of every run of a project write their logs: of the project that the run directory lies in, or
    else of the working directory's."""
    return places.project_folder(run.path if run is not None else None) / "logs" / "slurm" / "training"
