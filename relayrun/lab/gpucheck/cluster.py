"""The cluster of a check: reading its file, and the check as one Slurm job.

The job measures the bandwidth between all nodes first, and then everything else on its first node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relayrun import places
from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import ClusterSection, RunConfig
from relayrun.control.chain import job_script as chain_job_script
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.factory import slurm_scheduler
from relayrun.errors import ConfigError
from relayrun.files import write_atomic
from relayrun.lab.gpucheck import performance, runs
from relayrun.lab.gpucheck.setup import CheckSetup, rank_command
from relayrun.slurmtime import format_time, parse_time
from relayrun.submit import run_plan
from relayrun.submit.check import slurm as job_check

SRUN_MINUTES = 3
"""Time limit of the all-reduce over all nodes."""
CLUSTER_FOLDER = places.shared_file("configs/clusters")


def submit_check_job(
    setup: CheckSetup, cluster: dict[str, Any], program: Sequence[str], *, time: str
) -> tuple[str, Path]:
    """Submit the job; return its id and script. Raises ConfigError or SchedulerError; then no job is queued. `cluster`:
    the site's file. `program`: arguments of Python inside the job."""
    config = job_config(setup, cluster)
    job_check.refuse_job_settings(config)
    path = setup.path / "job.sbatch"
    write_atomic(path, job_script(setup, config, program, time=time), mode=0o777)
    slurm = slurm_scheduler()
    plan = run_plan.make_plan(config, Run(setup.path), places.CODE_ROOT, revision=1)
    Path(plan.log_folder).mkdir(parents=True, exist_ok=True)  # without it a job dies without a log
    slurm.test(path)
    name = f"{plan.job_name}-check"
    return slurm.submit_auxiliary(plan, path, name=name, arguments=[], limit=parse_time(time)), path


def job_config(setup: CheckSetup, cluster: dict[str, Any]) -> RunConfig:
    """Return the config of the timed run as it would be on the site: one rank per GPU, on all nodes."""
    first = runs.check_run_values(setup, "job", performance.large_run_sections(setup, micro_batch=1, steps=1))
    gpus = 0 if setup.tiny else gpus_per_node(setup, cluster)
    ranks = gpus or setup.sizes.cpu_ranks
    first["job"] = dict(cluster.get("job", {})) | {
        "time": "01:00:00",
        "nodes": setup.nodes,
        "ntasks_per_node": ranks,
        "gpus_per_node": gpus,
    }
    first["training"]["global_batch_size"] = first["training"]["micro_batch_size"] * ranks * setup.nodes
    first["cluster"] = cluster
    return runs.compose_values(setup, first)


def gpus_per_node(setup: CheckSetup, cluster: dict[str, Any]) -> int:
    """Return the GPUs of a node from the overrides or the site's file. Raises ConfigError if neither gives them."""
    given = [text.partition("=")[2] for text in setup.overrides if text.startswith("job.gpus_per_node=")]
    found = str(given[-1] if given else cluster.get("job", {}).get("gpus_per_node", ""))
    if not found.isdecimal() or not int(found):
        hint = "--set job.gpus_per_node=4"
        raise ConfigError("nothing says how many GPUs a node has", where="job.gpus_per_node", hint=hint)
    return int(found)


def job_script(setup: CheckSetup, config: RunConfig, program: Sequence[str], *, time: str) -> str:
    """Return the sbatch script."""
    plan = run_plan.make_plan(config, Run(setup.path), places.CODE_ROOT, revision=1)
    job, slurm = config.job, slurm_scheduler()
    options: dict[str, str | None] = {
        "time": format_time(parse_time(time)),
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.ntasks_per_node),
        "cpus-per-task": str(job.cpus_per_task),
        **plan.sbatch_options,
    }
    given = replace(setup, gpus=job.gpus_per_node)
    entered = config.cluster.container.with_mounts([str(places.CODE_ROOT), str(setup.path)]).command
    before = []
    if job.nodes > 1:
        setup_file, output = setup.path / "nodes.setup.json", setup.path / performance.NODES_BANDWIDTH_FILE
        given.write(setup_file)
        output.unlink(missing_ok=True)
        srun = slurm.every_task_command(plan, nodes=job.nodes, cpus_per_task=str(job.cpus_per_task))
        measured = rank_command(
            given, performance.BANDWIDTH_PROGRAM, f"--setup={setup_file}", f"--output={output}", container=entered
        )
        before.append([*srun, f"--time={SRUN_MINUTES}", *measured])
    single = slurm.single_task_command(plan, cpus_per_task=str(job.cpus_per_task * job.ntasks_per_node))
    return chain_job_script.program_script(
        plan,
        "check",
        options,
        environment={"PYTHONUNBUFFERED": "1", "PYTHONPATH": given.environment()["PYTHONPATH"], **plan.environment},
        command=[*single, *entered, given.python, *program],
        fallback=setup.path,
        before=before,
    )


def read_cluster(name: str) -> dict[str, Any]:
    """Read a cluster's file by its name in configs/clusters/ or its path. Raises ConfigError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else CLUSTER_FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(entry.stem for entry in CLUSTER_FOLDER.glob("*.yaml")))
        words = f"unknown cluster {name!r}; there are: {known}; or give the path of a file"
        raise ConfigError(words, where="--cluster")
    values = yaml_file.read_yaml(path).values
    try:
        ClusterSection.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{place}: {first['msg'].removeprefix('Value error, ')}", where=path) from None
    return values


def cluster_inside_job(cluster: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """Return section `cluster` of the training runs: the job has loaded modules and entered the container already."""
    names = ("name", "python", "command_prefix", "transformer_engine")
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # many runs start at once, each with few kernels to compile
    environment = threads | cluster.get("environment", {}) | {"WANDB_MODE": "disabled"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if tiny else {}
    kept = {name: cluster[name] for name in names if name in cluster}
    return {**kept, "scheduler": "local", "environment": environment}


def check_arguments(setup: CheckSetup, *, slurm: bool) -> None:
    """Raise ConfigError for wrong arguments before anything is started."""
    if setup.nodes < 1 or (setup.nodes > 1 and not slurm):
        hint = "name its file: --cluster NAME"
        raise ConfigError(f"{setup.nodes} nodes need a cluster with Slurm", where="--nodes", hint=hint)
    if setup.tiny or not slurm:  # a job requests GPUs that were not counted yet
        runs.checked_config(setup, "check", performance.large_run_sections(setup, micro_batch=1, steps=1))
