"""Which runs there are, and how a person names one."""

from __future__ import annotations

from pathlib import Path

from relayrun import places
from relayrun.errors import RunDirError
from relayrun.rundir.plan import Plan, read_format
from relayrun.rundir.run import Run


def runs() -> Path:
    """Where runs of the project lie that have no `run_dir` of their own."""
    return places.project() / "logs" / "runs"


def find_run(name: str) -> Run:
    """The run in this directory, or with this `project/name` below logs/runs of the project.

    Raises RunDirError where there is none, and where its format is a newer one.
    """
    candidates = [Run(Path(name).expanduser().absolute()), Run(runs() / name)]
    for run in candidates:
        if read_format(run) is not None or run.manifest.exists():
            return run
    for run in candidates:
        if run.path.is_dir():
            Plan.load(run)  # says what is missing
    raise RunDirError(
        "there is no such run",
        where=name,
        hint=f"give a run directory, or project/name below {runs()}; see `relayrun status`",
    )


def every_run() -> list[Run]:
    """All directories project/name below logs/runs of the project, whole or not."""
    return [Run(path) for path in sorted(runs().glob("*/*")) if path.is_dir()]
