"""When a site would remove files of a run that nobody uses: `cluster.purge_days` says after how many days, and where.

A file counts as used when it was last read or written, whichever is later, as its file system tells it. A folder of
many files is as old as its oldest one: a checkpoint without one file is none. Standard library only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relayrun.control.rundir.run import Run
from relayrun.files import read_json

DAY_SECONDS = 86400.0
PURGE_SOON_DAYS = 7.0
"""Somebody is told so many days before."""
MAX_FILES_CHECKED = 1000
"""So many files are looked at; of more every n-th, so that a data set of many shards costs no more."""


@dataclass(frozen=True, kw_only=True)
class PurgeForecast:
    """A file that a site would remove, and when."""

    what: str
    """`checkpoint` or `data`."""
    name: str
    """For people: `the checkpoint of iteration 500`."""
    path: str
    """The file that is the first to go."""
    folder: str
    """The setting's folder in which it lies."""
    days: float
    """After so many days without use."""
    time: float
    """When, in seconds since 1970; in the past: at any moment."""

    def words(self, now: float) -> str:
        """One line for people."""
        left = (self.time - now) / DAY_SECONDS
        day = time.strftime("%Y-%m-%d", time.localtime(self.time))
        when = f"in {left:.1f} days, on {day}" if left > 0 else f"at any moment, since {day}"
        rule = f"{self.folder}: {self.days:g} days without use"
        return f"{self.name} may be purged {when} ({rule}; first {self.path})"

    def is_soon(self, now: float) -> bool:
        """Whether a person should do something now."""
        return self.time - now < PURGE_SOON_DAYS * DAY_SECONDS


def first_purge(name: str, what: str, paths: Sequence[str], purge_days: Mapping[str, float]) -> PurgeForecast | None:
    """Return which of these files would be purged first; None where none would, or none is there.

    `name` and `what`: as in `Purge`. `purge_days`: days by folder; of several that hold a file the innermost counts.
    """
    step = -(-len(paths) // MAX_FILES_CHECKED) or 1
    found = []
    for path in paths[::step]:
        rule = _purge_rule(os.path.realpath(path), purge_days)
        if rule is None:
            continue
        try:
            used = os.stat(path)
        except OSError:  # what is missing is told elsewhere
            continue
        folder, days = rule
        when = max(used.st_atime, used.st_mtime) + days * DAY_SECONDS
        found.append(PurgeForecast(what=what, name=name, path=path, folder=folder, days=days, time=when))
    return min(found, key=lambda purge: purge.time, default=None)


def _purge_rule(path: str, purge_days: Mapping[str, float]) -> tuple[str, float] | None:
    """The innermost folder that holds a path, and its days."""
    holding = [
        (folder, days)
        for folder, days in purge_days.items()
        if Path(path).is_relative_to(folder) or Path(path).is_relative_to(os.path.realpath(folder))
    ]
    return max(holding, key=lambda rule: len(rule[0]), default=None)


def checkpoint_purge(iteration: int, folder: str | None, purge_days: Mapping[str, float]) -> PurgeForecast | None:
    """Return when a checkpoint would be purged."""
    if not purge_days or folder is None:
        return None
    paths = sorted(str(path) for path in Path(folder).rglob("*") if path.is_file())
    return first_purge(f"the checkpoint of iteration {iteration}", "checkpoint", paths, purge_days)


def data_purge(run: Run, purge_days: Mapping[str, float]) -> PurgeForecast | None:
    """Return when data of a run would be purged, as far as its manifest names them; a damaged one names none."""
    if not purge_days:
        return None
    try:
        value = read_json(run.manifest)
        sets = [*value["datasets"].values(), *value.get("validation", {}).values()]
        paths = [path for each in sets for path in _data_set_paths(each)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return first_purge("training data", "data", paths, purge_days)


def _data_set_paths(dataset: Mapping[str, Iterable[Mapping[str, str]]]) -> list[str]:
    """The files of a data set; those behind URLs are no site's scratch."""
    shards = [f"{shard['prefix']}.bin" for shard in dataset.get("shards", ())]
    return shards + [file["path"] for file in dataset.get("files", ()) if "://" not in file["path"]]
