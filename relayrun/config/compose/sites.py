"""Cluster files, and settings from the site and the shell before the schema checks them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from relayrun import places
from relayrun.config.compose import yaml_file
from relayrun.config.compose.yaml_file import LocatedSettings
from relayrun.config.sections.batch_systems import BATCH_SYSTEMS
from relayrun.control.scheduler.slurm_commands import own_cluster_name
from relayrun.errors import ConfigError, did_you_mean

log = logging.getLogger(__name__)

CLUSTER_VARIABLE = "CLUSTER"
"""The variable that names the cluster if no config does."""


OPTIONS_FROM_ENVIRONMENT = ("account", "partition", "qos", "reservation", "constraint")
"""Options that sbatch takes from variables, SBATCH_ACCOUNT and so on."""
OTHER_CLUSTER_VARIABLES = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
"""Variables that send Slurm's commands to other clusters."""
IGNORED_VARIABLES = {
    "SBATCH_TIMELIMIT": "job.time",
    "SBATCH_MEM_PER_NODE": "job.mem",
    "SBATCH_GPUS_PER_NODE": "job.gpus_per_node",
    "SBATCH_EXCLUSIVE": "job.exclusive",
    "SBATCH_WCKEY": "job.sbatch.wckey",
    "SBATCH_GRES": "job.sbatch.gres",
    "SBATCH_NETWORK": "job.sbatch.network",
}
"""Settings to use instead of variables of sbatch; relayrun's jobs ignore all but those that are taken."""


def site_folders(config: Path | None = None) -> list[Path]:
    """Return the folders of cluster files: the nearest above a config file, or the project's, then relayrun's own."""
    above = (
        config.resolve().parents
        if config is not None
        else (places.project_folder() / "configs", places.project_folder())
    )
    nearest_folder = next((up / "clusters" for up in above if (up / "clusters").is_dir()), None)
    own = places.shared_file("configs/clusters")
    return [own] if nearest_folder in (None, own) else [nearest_folder, own]


def site_names(folders: Sequence[Path]) -> list[str]:
    return sorted({entry.stem for folder in folders for entry in folder.glob("*.yaml")})


def read_site(name: str, *, folders: Sequence[Path], where: str | None) -> LocatedSettings:
    """Read the file of cluster `name`. Raises ConfigError, with the location `where` of the name, if it does not exist.
    `name` may be the path of a file, too."""
    places_of_it = [folder / f"{name}.yaml" for folder in folders]
    if name.endswith((".yaml", ".yml")):
        places_of_it = [Path(name)]
    file = next((path for path in places_of_it if path.is_file()), None)
    if file is None:
        known = site_names(folders)
        hint = did_you_mean(name, known) or f"name one of them, or write {places_of_it[0]}"
        raise ConfigError(f"unknown cluster {name!r}; there are: {', '.join(known)}", where=where, hint=hint)
    return yaml_file.read_yaml(file)


def insert_site(settings: LocatedSettings, *, folders: Sequence[Path]) -> None:
    """Replace a cluster's name in composed settings by the content of its file. Raises ConfigError."""
    name = settings.values.get("cluster")
    if isinstance(name, str):
        cluster = read_site(name, folders=folders, where=settings.place(("cluster",)))
        settings.values["cluster"] = cluster.values
        settings.places.update({("cluster", *location): place for location, place in cluster.places.items()})


def sbatch_options_from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the options of sbatch from variables of the user's shell."""
    found = {name: environment.get(f"SBATCH_{name.upper()}", "").strip() for name in OPTIONS_FROM_ENVIRONMENT}
    return {name: value for name, value in found.items() if value}


def refuse_other_cluster(settings: LocatedSettings, environment: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable that sends jobs to another cluster, since relayrun asks this cluster's Slurm.
    Other ignored variables are logged."""
    cluster, executor = settings.values.get("cluster"), settings.values.get("executor")
    system = BATCH_SYSTEMS.get(str(cluster.get("scheduler"))) if isinstance(cluster, dict) else None
    if executor == "local" or (system is not None and not system.slurm):
        return
    for name in OTHER_CLUSTER_VARIABLES:
        if environment.get(name) and environment[name] != own_cluster_name():
            words = f"{name}={environment[name]} is not heeded: jobs are queued by this machine's own Slurm"
            hint = f"unset {name}; for another cluster, submit from its login node"
            raise ConfigError(words, where="environment", hint=hint)
    taken = {*OTHER_CLUSTER_VARIABLES, *(f"SBATCH_{option.upper()}" for option in OPTIONS_FROM_ENVIRONMENT)}
    for name in sorted(name for name, value in environment.items() if name.startswith("SBATCH_") and value):
        if name not in taken:
            setting = IGNORED_VARIABLES.get(name, "the option in job or job.sbatch")
            log.warning("%s=%s is not heeded: set %s", name, environment[name], setting)


def insert_environment(settings: LocatedSettings, environment: Mapping[str, str]) -> None:
    """Put sbatch options from variables into the config's jobs: relayrun starts sbatch without these variables.

    They take precedence over the site's defaults, and `--set` over them. Raises ConfigError if the config has another
    value.
    """
    for option, value in sbatch_options_from_environment(environment).items():
        variable, own = f"SBATCH_{option.upper()}", settings.values.setdefault("job", {})
        if not isinstance(own, dict):
            return
        place = (settings.place(("job", option)) or "") if option in own else ""
        if place.startswith("--set"):
            continue
        if own.get(option) is not None and str(own[option]) != value:
            hint = f"unset {variable}, or say which one counts: --set job.{option}=..."
            raise ConfigError(f"{variable}={value}, and job.{option} is {own[option]}", where=place, hint=hint)
        own[option], settings.places["job", option] = value, variable


def insert_job_defaults(settings: LocatedSettings, *, only: Collection[str] | None = None) -> None:
    """Put the site's defaults of jobs under the config's own; `sbatch` is merged option by option. `only`: names of the
    settings that apply to jobs other than training."""
    cluster = settings.values.get("cluster")
    if not isinstance(cluster, dict) or not isinstance(defaults := cluster.get("job"), dict):
        return
    defaults = {name: value for name, value in defaults.items() if only is None or name in only}
    own = settings.values.setdefault("job", {})
    if not isinstance(own, dict):
        return
    _insert_missing(settings, own, defaults, ("job",))
    if isinstance(options := defaults.get("sbatch"), dict) and isinstance(own.get("sbatch"), dict):
        _insert_missing(settings, own["sbatch"], options, ("job", "sbatch"))


def _insert_missing(
    settings: LocatedSettings, own: dict[str, object], defaults: dict[str, object], at: tuple[str, ...]
) -> None:
    for name in defaults.keys() - own.keys():
        own[name] = defaults[name]
        settings.places[(*at, name)] = settings.place(("cluster", *at, name)) or ""
