"""All runs of the project, and the run that a person names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from relayrun import places
from relayrun.control.rundir.campaign import is_campaign, read_membership
from relayrun.control.rundir.plan import Plan, read_plan_format
from relayrun.control.rundir.run import PLAN_NAME, STOP_NAME, Run
from relayrun.errors import RunDirError, did_you_mean
from relayrun.files import RealPathCache

OLD_SECONDS = 30 * 86400.0
"""Age of the end of a chain at which looks at all runs leave it out: there may be thousands."""


def runs_folder() -> Path:
    """Return the folder of the project's runs that set no `run_dir`."""
    return places.project_folder() / "logs" / "runs"


def split_run_and_iteration(name: str) -> tuple[str, int | None]:
    """Split `NAME:ITERATION`; the iteration is None if the name has none."""
    match = re.fullmatch(r"(?P<name>.+):(?P<iteration>\d+)", name)
    return (match["name"], int(match["iteration"])) if match else (name, None)


def find_run(name: str) -> Run:
    """Return the run in this directory, or with this `project/name` below logs/runs of the project. Raises RunDirError
    if there is none, with the nearest names, or if its format is newer."""
    candidates = [Run(Path(name).expanduser().absolute()), Run(runs_folder() / name)]
    for run in candidates:
        if read_plan_format(run) is not None or run.manifest.exists():
            return run
    for run in candidates:
        if run.path.is_dir() and _run_that_contains(run.path) is None and not is_campaign(run.path):
            Plan.load(run)  # its error says what is missing
    for run in candidates:
        if is_campaign(run.path):
            hint = "`relayrun sweep status` and `relayrun stages status` show its runs"
            raise RunDirError("these are several runs", where=run.path, hint=hint)
    around = _run_that_contains(candidates[0].path)
    if around is not None:
        raise RunDirError("there is no such run", where=name, hint=f"this path lies in the run {around}")
    usual = f"give a run directory, or project/name below {runs_folder()}; see `relayrun status`"
    hint = "; ".join(filter(None, [_nearest_run(name, candidates[0].path), usual]))
    raise RunDirError("there is no such run", where=name, hint=hint)


def _run_that_contains(path: Path) -> Path | None:
    return next((folder for folder in path.parents if (folder / "plan.json").is_file()), None)


def _nearest_run(name: str, path: Path) -> str:
    """Return a hint: a run beside `path`, or a run below logs/runs, by its whole name or the last part of it."""
    try:
        beside = [str(each) for each in path.parent.iterdir() if (each / "plan.json").is_file()]
    except OSError:
        beside = []
    if found := did_you_mean(str(path), beside):
        return found
    known = {f"{run.path.parent.name}/{run.path.name}": run.path.name for run in all_run_folders()}
    if found := did_you_mean(name, known):
        return found
    last = name.rstrip("/").rpartition("/")[2]
    if same := [whole for whole, part in known.items() if did_you_mean(last, [part])]:
        return did_you_mean(last, same, most=3, cutoff=0.0)
    return ""


def all_run_folders() -> list[Run]:
    """Return all directories project/name below logs/runs of the project, complete or not, except campaigns."""
    return [Run(Path(path)) for path in _project_run_folders() if not is_campaign(path)]


def newer_run_folders(*, now: float) -> list[Run]:
    """Return `all_run_folders` without the runs whose chains ended long ago (OLD_SECONDS)."""
    return [Run(Path(path)) for path in _project_run_folders() if not _is_old(path, now) and not is_campaign(path)]


def without_old_runs(runs: Iterable[Run], *, now: float) -> list[Run]:
    """Leave out the runs whose chains ended long ago (OLD_SECONDS)."""
    return [run for run in runs if not _is_old(str(run.path), now)]


def _is_old(folder: str, now: float) -> bool:
    try:  # cheaper than a context
        return now - os.stat(f"{folder}/{STOP_NAME}").st_mtime > OLD_SECONDS
    except OSError:  # the chain has not ended
        return False


def _project_run_folders() -> list[str]:
    return [path for project in _folders(str(runs_folder())) for path in _folders(project)]


def _folders(folder: str) -> list[str]:
    """Return the folders in a folder, by name; empty if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.path for entry in entries if _is_dir(entry))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def find_campaign(name: str) -> Path:
    """Return the campaign in this directory, or named `project/name` below logs/runs. Raises RunDirError."""
    candidates = [Path(name).expanduser().absolute(), runs_folder() / name]
    for folder in candidates:
        if is_campaign(folder):
            return folder
    for folder in candidates:
        membership = read_membership(Run(folder))
        if membership is not None:
            return Path(membership.folder)
    known = ["/".join(path.split("/")[-2:]) for path in _project_run_folders() if is_campaign(path)]
    usual = f"give its directory, or project/name below {runs_folder()}"
    hint = "; ".join(filter(None, [did_you_mean(name, known), usual]))
    raise RunDirError("there is no such sweep and no such stages", where=name, hint=hint)


def find_runs_below(folder: Path, *, depth: int) -> Iterator[Run]:
    """Yield the runs in a folder and at most `depth` folders below it, by path; no run lies inside another run.

    Links are followed, and a run with two paths is found once. Hidden and unreadable folders are left out. Raises
    OSError if the folder itself cannot be read.
    """
    seen: set[str] = set()
    real_path = RealPathCache()
    level = [folder]
    for left in range(depth, -1, -1):
        below: list[Path] = []
        for path in level:
            real = real_path(str(path))
            if real in seen:
                continue
            seen.add(real)
            try:
                if os.path.isfile(f"{path}/{PLAN_NAME}"):
                    yield Run(path)
                    continue
                with os.scandir(path) as entries:
                    names = [entry for entry in entries if not entry.name.startswith(".")]
                    below += [Path(entry.path) for entry in names if _is_dir(entry)]
            except OSError:
                if path == folder:
                    raise
        level = sorted(below) if left else []


def find_runs_of(names: Sequence[str], *, now: float) -> list[Run]:
    """Return the runs with these names and, without those whose chains ended long ago, the runs of these project
    folders or below these folders; without names, of this project. Raises RunDirError if a name has none."""
    found = [] if names else newer_run_folders(now=now)
    for name in names:
        try:
            found.append(find_run(name))
        except RunDirError:
            folder = below if (below := Path(name, "logs/runs")).is_dir() else Path(name)
            if not folder.is_dir() or not (runs := list(find_runs_below(folder, depth=2))):
                raise
            found += without_old_runs(runs, now=now)
    return found


def _is_dir(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to a folder; a circular link is neither."""
    try:
        return entry.is_dir()
    except OSError:
        return False
