"""The cluster of a check: its file in configs/clusters/, and the part of it that applies inside a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relayrun import places
from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import ClusterSection
from relayrun.errors import ConfigError

CLUSTER_FOLDER = places.shared_file("configs/clusters")


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
