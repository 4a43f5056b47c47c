"""The files of clusters: where they lie, and what they say before a schema has judged it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from relayrun import ROOT
from relayrun.config import yamlfile
from relayrun.config.yamlfile import LocatedSettings
from relayrun.errors import ConfigError

CLUSTER = "CLUSTER"
"""The variable that names the cluster where no config does."""


def folder_of(config: Path | None = None) -> Path:
    """The folder of the clusters' files: the nearest `clusters` above the config file, else relayrun's own."""
    above = () if config is None else config.resolve().parents
    return next((up / "clusters" for up in above if (up / "clusters").is_dir()), ROOT / "configs" / "clusters")


def names(folder: Path) -> list[str]:
    """Names of the clusters that have a file in `folder`."""
    return sorted(entry.stem for entry in folder.glob("*.yaml"))


def read(name: str, *, folder: Path, where: str | None) -> LocatedSettings:
    """What the file of cluster `name` says. Raises ConfigError, with `where` the name stands, if there is none.

    `name` may be the path of a file, too.
    """
    file = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not file.is_file():
        raise ConfigError(f"unknown cluster {name!r}; there are: {', '.join(names(folder))}", where=where)
    return yamlfile.read(file)


def insert(settings: LocatedSettings, *, folder: Path) -> None:
    """Replace a cluster's name in composed settings by what its file says. Raises ConfigError."""
    name = settings.values.get("cluster")
    if isinstance(name, str):
        cluster = read(name, folder=folder, where=settings.place(("cluster",)))
        settings.values["cluster"] = cluster.values
        settings.places.update({("cluster", *location): place for location, place in cluster.places.items()})


def insert_job_defaults(settings: LocatedSettings, *, only: Collection[str] | None = None) -> None:
    """Put the site's defaults of jobs under the config's own; of `sbatch`, option by option.

    `only`: names of the settings that count, for jobs that are no training.
    """
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
