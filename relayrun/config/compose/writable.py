"""Checks that a path may be written: `read_only_paths` of a cluster are protected from every job and tool.

A run config names its cluster. A tool without a config uses the cluster of the variable CLUSTER, or without it every
file of configs/clusters/: the paths of other sites do not exist on this machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from relayrun.config.compose import sites
from relayrun.errors import URL_WRITE_HINT, ConfigError, run_main, why_url_is_refused

AnyPath = str | os.PathLike[str]


def read_only_path_of(path: AnyPath, read_only_paths: Sequence[str]) -> str | None:
    """Return the first of `read_only_paths` that contains `path`, links followed; None if it may be written. A URL may
    always be written."""
    if "://" in os.fspath(path):
        return None
    real = os.path.realpath(path)
    for place in read_only_paths:
        top = os.path.realpath(place)
        if os.path.commonpath([real, top]) == top:
            return place
    return None


def check_writable(outputs: Mapping[str, AnyPath | None], *, cluster: str, read_only_paths: Sequence[str]) -> None:
    """Raise ConfigError for outputs, by name, that are URLs or lie in a read-only path of `cluster`."""
    refusals = {name: why_url_is_refused(path) for name, path in outputs.items() if path is not None}
    if urls := [f"{name}: {refusal}" for name, refusal in refusals.items() if refusal is not None]:
        raise ConfigError("; ".join(urls), hint=URL_WRITE_HINT)
    found = [
        f"{name}: {os.fspath(path)} lies below {place}"
        for name, path in outputs.items()
        if path is not None and (place := read_only_path_of(path, read_only_paths)) is not None
    ]
    if found:
        raise ConfigError(
            "; ".join(found) + f", where cluster {cluster!r} allows no writing (cluster.read_only_paths)",
            hint="choose a folder on another file system",
        )


def check_outputs(outputs: Mapping[str, AnyPath | None], environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError like `check_writable`, for a tool without a config."""
    folders = sites.site_folders()
    name = environment.get(sites.CLUSTER_VARIABLE, "")
    if name:
        found = {name: sites.read_site(name, folders=folders, where=f"{sites.CLUSTER_VARIABLE}={name}").values}
    else:
        found = {each: sites.read_site(each, folders=folders, where=None).values for each in sites.site_names(folders)}
    for each, values in found.items():
        check_writable(outputs, cluster=each, read_only_paths=_texts(values.get("read_only_paths")))


def _texts(value: Any) -> list[str]:
    return [str(entry) for entry in value] if isinstance(value, list) else []


def check_arguments(paths: Sequence[str]) -> int:
    """Check the paths in a Bash script's arguments before it submits a job. Raises ConfigError."""
    check_outputs({f"argument {number}": path for number, path in enumerate(paths, start=1)})
    return 0


if __name__ == "__main__":
    sys.exit(run_main(lambda: check_arguments(sys.argv[1:])))
