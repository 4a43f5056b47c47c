"""Options of sbatch that a config hands on: `sbatch: {gres: "gpu:4", mail-type: END, contiguous: true}`.

Whether Slurm knows a name is asked where a job is about to be queued (`relayrun.control.scheduler.sbatch_options`); what can be
judged without Slurm is judged here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator

from relayrun.config.sections.base import one_line

SbatchValue = bool | int | str
"""`true`: the option without a value; `false`: not this option, although the site's file gives it."""

SETTINGS_INSTEAD = {
    "job-name": "it follows from project and name",
    "time": "set job.time",
    "nodes": "set job.nodes",
    "ntasks": "set job.nodes and job.ntasks_per_node",
    "ntasks-per-node": "set job.ntasks_per_node",
    "cpus-per-task": "set job.cpus_per_task",
    "gpus-per-node": "set job.gpus_per_node",
    "account": "set job.account",
    "partition": "set job.partition",
    "qos": "set job.qos",
    "reservation": "set job.reservation",
    "constraint": "set job.constraint",
    "exclude": "set job.exclude",
    "mem": "set job.mem",
    "exclusive": "set job.exclusive",
    "signal": "set chain.signal_lead",
    "requeue": "set chain.auto_requeue",
    "no-kill": "set job.spare_nodes: without them nobody would notice the loss of a node",
    "no-requeue": "set chain.auto_requeue",
    "dependency": "jobs of a chain wait for each other by it",
    "array": "a chain is one job after the other",
    "output": "the job's script opens its logs, below logs/slurm",
    "error": "the job's script opens its logs, below logs/slurm",
    "open-mode": "the job's script opens its logs, below logs/slurm",
    "export": "set cluster.environment",
    "export-file": "set cluster.environment",
    "get-user-env": "set job.setup or cluster.environment",
    "comment": "the chain notes there what it must find again: the job's log, and starts that failed; set wckey",
    "clusters": "a chain asks one cluster for its jobs; submit from a login node of the other one",
    "hold": "every job of the chain would be held; use `scontrol hold`",
    "wait": "the submit would not return",
    "wrap": "the job runs relayrun's own script",
    "parsable": "relayrun reads sbatch's answer",
    "test-only": "use --dry-run",
    "quiet": "relayrun reads sbatch's answer",
    "uid": "jobs run as who submits them",
    "gid": "jobs run as who submits them",
    "help": "it is no option of a job",
    "usage": "it is no option of a job",
    "version": "it is no option of a job",
}
"""Options that relayrun sets itself, or cannot hand on, and what to do instead."""


def _checked_sbatch_options(options: dict[str, SbatchValue]) -> dict[str, SbatchValue]:
    for name, value in options.items():
        if not _SBATCH_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no long name of an option of sbatch, as in mail-type")
        if name in SETTINGS_INSTEAD:
            raise ValueError(f"{name} is relayrun's own: {SETTINGS_INSTEAD[name]}")
        if value == "":
            raise ValueError(f"{name} has no value; write `true` for an option without one")
        if isinstance(value, str):
            one_line(value)
    return options


_SBATCH_NAME = re.compile(r"[a-z][a-z0-9-]*")

SbatchOptions = Annotated[dict[str, SbatchValue], AfterValidator(_checked_sbatch_options)]


def sbatch_script_options(given: Mapping[str, SbatchValue]) -> dict[str, str | None]:
    """What stands in the job's script: each option with its value, None where it has none."""
    return {name: None if value is True else str(value) for name, value in given.items() if value is not False}
