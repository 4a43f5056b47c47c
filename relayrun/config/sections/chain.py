"""`chain`: the sequence of a run's jobs. A submit validates it; every job reads it from plan.json."""

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Literal

from relayrun.config.sections.dataclass_section import (
    Checked,
    DataclassSection,
    Limits,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    SingleLine,
)


@dataclass(frozen=True, kw_only=True)
class NodeHealthLimits(DataclassSection):
    """Limits of `chain.node_health`. A violation is recorded with both figures."""

    shm_gb: NonNegativeFloat = 0.05
    """Minimum free room in /dev/shm, in 10^9 bytes."""
    tmp_gb: NonNegativeFloat = 0.5
    """Minimum free room in the folder for temporary files (TMPDIR), in 10^9 bytes."""
    clock_seconds: PositiveFloat = 1.0
    """Maximum difference of a node's clock from the median of all, in seconds."""
    open_files: NonNegative = 1024
    """Minimum number of files that a process may open: the hard limit."""
    command_seconds: Annotated[float, Limits(gt=0, le=40)] = 20.0
    """Time limit of node_health_command, in seconds."""


FailureOwner = Literal["node", "program", "configuration", "network", "file system", "person", "Slurm", "unknown"]


def _expression(pattern: str) -> str:
    try:
        if re.compile(pattern).search(""):
            raise ValueError("it matches every line")
    except re.error as error:
        raise ValueError(f"this is no regular expression: {error}") from None
    return pattern


@dataclass(frozen=True, kw_only=True)
class FailureSignature(DataclassSection):
    """An entry of the table of failures: a line that matches `pattern` names this cause."""

    name: SingleLine
    """Name of the cause, a word or two."""
    pattern: Annotated[SingleLine, Checked(_expression)]
    """Regular expression that is searched in a line of a log."""
    cause: FailureOwner
    """Whose cause it is. `node`: counted against the node. `network` and `file system`: the next job waits longer."""
    again: bool = False
    """Every attempt would fail in the same way: the chain stops at once, unless an attempt has trained before."""
    meaning: SingleLine
    """The cause in one line."""
    advice: SingleLine = ""
    """What to do next: a command, or a setting."""


def _date(text: str) -> str:
    if re.fullmatch(r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d)?)?", text) is None:  # others need Python 3.11
        raise ValueError("write 2027-01-31, or 2027-01-31T18:00")
    datetime.fromisoformat(text)
    return text


@dataclass(frozen=True, kw_only=True)
class ChainSection(DataclassSection):
    """Sequence of the run's jobs."""

    auto_requeue: bool = False
    """Queue a successor behind every job until the run is done. Costs node hours unattended: off by default."""
    mode: Literal["singleton", "requeue"] = "singleton"
    """`singleton`: a successor is queued behind every job. `requeue`: a job queues itself again, under the same id."""
    fallback_job: bool = True
    """On Slurm, with auto_requeue: keep one small job queued (`...-fallback` in squeue), which starts only after a job
    of the chain fails, and then queues the next one or records why not. It needs one CPU for seconds."""
    max_node_hours: PositiveFloat | None = None
    """Maximum node hours of all jobs of the run (of all runs of a sweep or of stages), spare nodes included. The ranks
    save and leave before it is exceeded, and the chain stops. Evaluations in jobs of their own are not counted."""
    max_gpu_hours: PositiveFloat | None = None
    """Maximum GPU hours, which end the chain as max_node_hours do: node hours times job.gpus_per_node."""
    deadline: Annotated[str, Checked(_date)] | None = None
    """Date, or date and time (2027-01-31T18:00, local time of the cluster), after which no job of the chain runs."""
    ask_above_node_hours: NonNegativeFloat | None = None
    """A submit asks for confirmation if its jobs can use more node hours than this, or any number (`--yes` answers).
    None: the value of the cluster."""
    max_failed_attempts: Positive = 3
    """Consecutive attempts without a new checkpoint, after which the chain stops."""
    recovery: Literal["job", "node"] = "job"
    """Restart after the death of a rank. `job`: the next job of the chain. `node`: the ranks, inside the same job, by
    an agent on each node. A failure that agents cannot repair ends the attempt as with `job`."""
    max_failed_restarts: Positive = 5
    """With `recovery: node`, consecutive restarts of the ranks without a later state to resume from, after which the
    attempt ends."""
    node_health: Literal["off", "warn", "exclude"] = "warn"
    """Check each node before its ranks start and, with `recovery: node`, between restarts. `warn`: exclude a node on
    which ranks cannot train, report lesser defects. `exclude`: also exclude a node that is short of a resource, if
    another node can replace it."""
    node_health_limits: NodeHealthLimits = field(default_factory=NodeHealthLimits)
    node_health_command: list[SingleLine] = field(default_factory=list)
    """A site's own check of a node (program and arguments, no shell), before the first ranks on each node. Exit status
    0: the node is healthy."""
    grace_period: Literal["auto"] | Positive = "auto"
    """Grace period: seconds before the job's end at which all ranks save and exit. `auto`: min(600, a quarter
    of the limit) for the first attempt, later the measured time of steps and saves."""
    min_grace_period: Positive = 30
    """Minimum of the measured grace period in seconds (at most half the time limit)."""
    signal_seconds: Literal["auto"] | Positive = "auto"
    """Seconds before the end at which Slurm sends SIGUSR2, the backstop. `auto`: 60 less than the grace period, at
    least half of it."""
    hang_timeout: Positive = 300
    """Seconds without progress after which the ranks are ended; ten usual steps if that is longer. With `recovery:
    node` steps, saves and reads have limits of their own, never shorter than 60 s or this (`relayrun help hangs`)."""
    start_timeout: Positive = 1800
    """Seconds without progress before the first step (imports, set-up, loading) after which the ranks are ended."""
    triggers_group: str | None = None
    """Name or number of the group that may touch triggers; default: the group of the run directory."""
    failure_signatures: list[FailureSignature] = field(default_factory=list)
    """Further entries of the table of failures (`relayrun help why`), before those of the site and relayrun's own."""
