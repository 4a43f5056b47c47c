"""A batch script that is nobody's launcher as the program of a chain, without a run config.

Its `#SBATCH` lines are the job, its folder of checkpoints is the run's. `launchers/lib/wrapped.sh` executes it as the
one task of each job, with the variables that sbatch would give it. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relayrun import places
from relayrun.config.sections.command import CommandSection
from relayrun.control.rundir.checkpoint_records import BEGINNING, ResumePoint, resume_point
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.command import checkpoint_rule
from relayrun.errors import ConfigError
from relayrun.submit.sbatch_header import Adopted, sbatch_options, section, take_header

SAVE_BATCH_VARIABLES = 'for name in "${!SLURM_@}"; do export "RELAYRUN_BATCH_${name}=${!name}"; done'
"""A line of `job.setup`: a step has other variables than the batch script."""

Header = Mapping[str, tuple[str | None, int]]


def wrap(path: Path, arguments: Sequence[str], *, checkpoints: str, site: str, one_machine: bool = False) -> Adopted:
    """Return the settings of a run that executes the script at `path`. Raises ConfigError.

    `checkpoints`: the path of its checkpoints with `{iteration}`, from its folder. `site`: the run's `cluster`.
    `one_machine`: the site starts every task by itself, without Slurm.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    header = sbatch_options(text)
    folder = path.parent.resolve() / (header.pop("chdir", (None, 0))[0] or "")
    found = Adopted({"project": "wrapped", "name": _name(header, path), "trainer": "command", "cluster": site})
    take_header(path, header, found)
    job: dict[str, Any] = found.settings["job"]
    if one_machine:
        job.pop("ntasks_per_node", None)
    job["setup"] = [SAVE_BATCH_VARIABLES]
    cpus = job.get("ntasks_per_node", 1) * job.get("cpus_per_task", 1)
    one_task = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    traps = sorted({name.removeprefix("SIG") for name in re.findall(r"^\s*trap\b.*?\b((?:SIG)?USR[12])\b", text, re.M)})
    own = section(found, "cluster_settings")
    own["srun_options"] = [*one_task, "--overlap", "--cpu-bind=none"]
    own["environment"] = {"RELAYRUN_WRAPPED_TRAPS": ",".join(traps)} if traps else {}
    starter = str(places.shared_file("launchers/lib/wrapped.sh"))
    found.settings["command"] = {
        "run": ["bash", starter, str(folder), str(path.resolve()), *arguments],
        "leave_signal": None,
        "checkpoint": _checkpoints(folder, checkpoints),
    }
    found.settings["chain"] = {"auto_requeue": True} | _take_signal(header, found)
    return found


def _name(header: Header, path: Path) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", header.get("job-name", (None, 0))[0] or path.stem).strip("-._")
    return plain if plain[:1].isalnum() else "script"


def _checkpoints(folder: Path, pattern: str) -> dict[str, str]:
    """Return the setting of checkpoints: the folder without a placeholder, and the pattern below it."""
    parts = pattern.split("/")
    first = next((n for n, part in enumerate(parts) if "*" in part or "{" in part), len(parts) - 1)
    return {"folder": str(folder / "/".join([*parts[:first], ""])), "pattern": "/".join(parts[first:])}


def _take_signal(header: Header, found: Adopted) -> dict[str, int]:
    """Take `#SBATCH --signal=[B:]NAME[@SECONDS]` as the signal on which the script saves and leaves."""
    value, line = header.get("signal", (None, 0))
    if value is None:
        return {}
    said = re.fullmatch(r"(?:[RB]+:)?(?:SIG)?([A-Z0-9]+)(?:@(\d+))?", value, re.I)
    if said is None or said[1].isdigit():
        raise ConfigError(f"--signal={value} names no signal", where=f"line {line}", hint="write B:USR1@300")
    found.settings["command"] = found.settings["command"] | {"leave_signal": f"SIG{said[1].upper()}"}
    return {"grace_period": int(said[2])} if said[2] else {}


def link_checkpoints(run: Run, folder: str) -> None:
    """Make the run's `checkpoints` a link to the folder that a program of its own names. Raises ConfigError."""
    os.makedirs(folder, exist_ok=True)
    if not os.path.lexists(run.checkpoints):
        run.checkpoints.symlink_to(folder, target_is_directory=True)
    elif os.path.realpath(run.checkpoints) != os.path.realpath(folder):
        hint = "leave the setting as it was, or start a run of another name"
        raise ConfigError(f"{run.checkpoints} is not this folder", where="command.checkpoint.folder", hint=hint)


def newest_in_folder(settings: CommandSection, run: Run) -> ResumePoint:
    """Return the newest complete checkpoint in `checkpoint.folder`, by its name in the run's directory, for a run
    without checkpoints of its own."""
    folder = settings.checkpoint.folder
    rule = None if folder is None or resume_point(run).path is not None else checkpoint_rule(settings, Path(folder))
    if folder is None or rule is None or not (whole := rule.whole()):
        return BEGINNING
    return ResumePoint(
        iteration=whole[-1].iteration, path=str(run.checkpoints / Path(whole[-1].path).relative_to(folder))
    )
