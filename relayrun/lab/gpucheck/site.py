"""The site that a check runs on: its cluster file, and what of it holds for training runs inside one job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relayrun import places
from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import ClusterSection
from relayrun.errors import ConfigError
from relayrun.lab.gpucheck import runs, speed
from relayrun.lab.gpucheck.setup import CheckSetup

CLUSTER_FOLDER = places.shared_file("configs/clusters")


def read_cluster(name: str) -> dict[str, Any]:
    """Read a cluster's file, by its name in configs/clusters/ or its path. Raises ConfigError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else CLUSTER_FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(entry.stem for entry in CLUSTER_FOLDER.glob("*.yaml")))
        raise ConfigError(
            f"unknown cluster {name!r}; there are: {known}; or give the path of a file", where="--cluster"
        )
    values = yaml_file.read_yaml(path).values
    try:
        ClusterSection.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{place}: {first['msg'].removeprefix('Value error, ')}", where=path) from None
    return values


def cluster_inside_job(cluster: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """Return section `cluster` of the training runs: the job has loaded the modules and entered the container."""
    kept: dict[str, Any] = {
        name: cluster[name] for name in ("name", "python", "command_prefix", "transformer_engine") if name in cluster
    }
    environment: dict[str, str] = {
        # many runs start at the same time, and none has more than a few kernels to compile
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **cluster.get("environment", {}),
        "WANDB_MODE": "disabled",
    }
    if tiny:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return {**kept, "scheduler": "local", "environment": environment}


def check_arguments(setup: CheckSetup, *, slurm: bool) -> None:
    """Raise ConfigError for what is wrong in the arguments, before anything is begun."""
    if setup.nodes < 1 or (setup.nodes > 1 and not slurm):
        raise ConfigError(
            f"{setup.nodes} nodes need a cluster with Slurm", where="--nodes", hint="name its file: --cluster NAME"
        )
    if setup.tiny or not slurm:  # else a job asks for GPUs, which nobody has counted yet
        runs.compose_values(
            setup, runs.run_config_values(setup, "check", speed.large_run_sections(setup, micro_batch=1, steps=1))
        )
