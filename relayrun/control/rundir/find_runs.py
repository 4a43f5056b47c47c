"""Which runs there are, and how a person names one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from relayrun import places
from relayrun.control.rundir.campaign import is_campaign, read_membership
from relayrun.control.rundir.plan import Plan, read_plan_format
from relayrun.control.rundir.run import PLAN_NAME, Run
from relayrun.errors import RunDirError, did_you_mean
from relayrun.files import RealPathCache


def runs_folder() -> Path:
    """Where runs of the project lie that have no `run_dir` of their own."""
    return places.project_folder() / "logs" / "runs"


def split_iteration(name: str) -> tuple[str, int | None]:
    """Return what stands before `:ITERATION` at the end of a name, and the iteration; None where it names none."""
    match = re.fullmatch(r"(?P<name>.+):(?P<iteration>\d+)", name)
    return (match["name"], int(match["iteration"])) if match else (name, None)


def find_run(name: str) -> Run:
    """The run in this directory, or with this `project/name` below logs/runs of the project.

    Raises RunDirError where there is none, with the nearest names, and where its format is a newer one.
    """
    candidates = [Run(Path(name).expanduser().absolute()), Run(runs_folder() / name)]
    for run in candidates:
        if read_plan_format(run) is not None or run.manifest.exists():
            return run
    for run in candidates:
        if run.path.is_dir() and _run_that_contains(run.path) is None and not is_campaign(run.path):
            Plan.load(run)  # says what is missing
    for run in candidates:
        if is_campaign(run.path):
            hint = "`relayrun sweep status` and `relayrun stages status` show its runs"
            raise RunDirError("these are several runs", where=run.path, hint=hint)
    around = _run_that_contains(candidates[0].path)
    if around is not None:
        raise RunDirError("there is no such run", where=name, hint=f"this path lies in the run {around}")
    usual = f"give a run directory, or project/name below {runs_folder()}; see `relayrun status`"
    raise RunDirError(
        "there is no such run",
        where=name,
        hint="; ".join(filter(None, [_nearest_run(name, candidates[0].path), usual])),
    )


def _run_that_contains(path: Path) -> Path | None:
    """The run in whose directory a path lies."""
    return next((folder for folder in path.parents if (folder / "plan.json").is_file()), None)


def _nearest_run(name: str, path: Path) -> str:
    """Which run could be meant: one beside `path`, or one below logs/runs, by its whole name or the last part of it."""
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
    """All directories project/name below logs/runs of the project, whole or not; campaigns are none."""
    return [Run(path) for path in _project_run_folders() if not is_campaign(path)]


def _project_run_folders() -> list[Path]:
    """Every folder project/name below logs/runs, by its names."""
    projects = _folders(str(runs_folder()))
    return [Path(path) for project in projects for path in _folders(project)]


def _folders(folder: str) -> list[str]:
    """The folders in a folder, by name; none where it may not be looked into."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.path for entry in entries if _is_dir(entry))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def find_campaign(name: str) -> Path:
    """The campaign in this directory, or with this `project/name` below logs/runs of the project.

    Raises RunDirError where there is none.
    """
    candidates = [Path(name).expanduser().absolute(), runs_folder() / name]
    for folder in candidates:
        if is_campaign(folder):
            return folder
    for folder in candidates:
        membership = read_membership(Run(folder))
        if membership is not None:
            return Path(membership.folder)
    known = [f"{path.parent.name}/{path.name}" for path in _project_run_folders() if is_campaign(path)]
    usual = f"give its directory, or project/name below {runs_folder()}"
    hint = "; ".join(filter(None, [did_you_mean(name, known), usual]))
    raise RunDirError("there is no such sweep and no such stages", where=name, hint=hint)


def find_runs_below(folder: Path, *, depth: int) -> Iterator[Run]:
    """Yield the runs in a folder and at most `depth` folders below it, by their paths; none lies inside another one.

    Links are followed; a run that two paths lead to is found once. Hidden folders, and what may not be looked into, are
    left out. Raises OSError where the folder itself cannot be read.
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


def _is_dir(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a link to one; a link in a circle is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False
