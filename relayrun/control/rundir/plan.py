"""`plan.json`: all that the supervisor needs to know of a run, in plain JSON, without the schema."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from relayrun import __version__, places
from relayrun.control.rundir.records import Record, foreign_owner
from relayrun.control.rundir.run import PLAN_NAME, Run
from relayrun.errors import RunDirError
from relayrun.files import read_json

PLAN_FORMAT = 2
"""Number of the format in which this version writes a run directory.

1   the versions before formats were counted; plan.json does not say
2   views.json says how far the merged views are; what follows is appended
"""


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Written by an explicit submit; read by every job of the chain."""

    format: int = PLAN_FORMAT
    """Number of the run directory's format; see `PLAN_FORMAT`."""
    run: str
    """Project and name, `project/name`, for people."""
    job_name: str
    """Slurm's job name; unique to the run directory, for `--dependency=singleton`."""
    scheduler: Literal["slurm", "local"]
    total_steps: int | None
    """The last iteration; None: the program itself ends when it is done."""
    stop_after: int | None = None
    """An iteration before the last one at which the chain ends."""
    config_revision: int
    submitted_after_attempt: int
    """Highest attempt at the last explicit submit; older attempts no longer count as failed ones."""
    owner: int | None = None
    """Number of the user who submitted it, whose jobs alone go on with the run; None where an earlier version did.
    In a plan.json that is another user's file it is that user, whatever the file says."""

    auto_requeue: bool
    mode: Literal["singleton", "requeue"]
    """How one job follows the other: a successor queued behind it, or the same job queued again."""
    fallback_job: bool = False
    """Whether a small job waits behind the chain's newest one, in case that one fails without a word."""
    max_failed_attempts: int
    recovery: Literal["job", "node"] = "job"
    """What starts again when a rank dies: the next job, or the ranks inside the same one; see
    `relayrun.control.agent`."""
    max_failed_rounds: int = 5
    fork_server: list[str] = field(default_factory=list)
    """What an agent executes to fork ranks from; empty without agents."""
    node_health: dict[str, Any] = field(default_factory=dict)
    """What is looked for on each node; see `rundir.node_health.HealthPlan`. Empty: nothing."""
    time_limit: int
    """Seconds."""
    lead: float
    """Seconds before the end of the job at which rank 0 of a first attempt saves and leaves."""
    lead_floor: float
    lead_ceiling: float
    """Bounds of what is measured later; equal where the lead is fixed."""
    signal_lead: int
    """Seconds before the end of the job at which the scheduler sends SIGUSR2 to the batch script."""

    hang_timeout: float
    """Seconds without a sign of progress, at least; ten usual steps if that is longer."""
    start_timeout: float
    """The same for an attempt that has not begun its first step: imports, set-up, loading."""

    nodes: int
    """Nodes whose ranks train."""
    spare_nodes: int = 0
    """Further nodes of each job, of which one takes the place of a node that is lost."""
    elastic_nodes: list[int] = field(default_factory=list)
    """Smaller numbers of nodes with which the ranks of one job may go on, where nodes are lost and no spare one is
    left; largest first."""
    ntasks_per_node: int
    cpus_per_task: int
    sbatch_options: dict[str, str | None]
    """Further options of sbatch by their long names without dashes; None: an option without a value."""
    srun_options: list[str]
    command_prefix: list[str]
    program: list[str]
    """What a rank of the native trainer executes; `--attempt N` is put behind it."""
    environment: dict[str, str]
    modules: list[str]
    setup: list[str] = field(default_factory=list)
    """Lines of Bash before the ranks, a person's own."""
    trainer: str = "native"
    """What the ranks execute: native, megatron-lm or command; see `relayrun.control.trainers`."""
    trainer_settings: dict[str, Any] = field(default_factory=dict)
    """The settings of a foreign trainer."""

    host_python: str
    package_root: str
    """Folder that holds `relayrun/` and `launchers/`."""
    log_folder: str
    load_path: str | None = None
    """The checkpoint that the run goes on from as long as it has none of its own."""
    load_iteration: int = 0
    purge_days: dict[str, float] = field(default_factory=dict)
    """After how many days without use the site removes files, by folder."""
    quota_command: list[str] = field(default_factory=list)
    """What says the quota of the run directory's file system; empty: `lfs quota` and `quota` are asked."""
    checkpoints_kept: int | None = None
    """How many of the newest checkpoints a rule keeps; None where the program alone knows it."""
    save_interval: int | None = None
    """Iterations between saves; None where the program alone knows it."""

    @classmethod
    def load(cls, run: Run) -> Plan:
        """Read the plan of a run. Raises RunDirError where there is none, and where its format is a newer one."""
        found = read_plan_format(run)
        if found is None:
            raise RunDirError(
                "this is no run directory: it has no plan.json",
                where=run.path,
                hint="give the directory that `relayrun submit` printed; where it was moved, submit with run_dir set "
                "to its new place",
            )
        entry, number = found
        if (owner := foreign_owner(run.plan)) is not None:
            entry["owner"] = owner
        try:
            return cls.of(entry | {"format": number})
        except (ValueError, TypeError) as error:
            raise RunDirError(f"unreadable record: {error}", where=run.plan) from None

    def migrate(self, run: Run) -> Plan:
        """Bring the run directory of a chain that goes on to this version's format; return its plan.

        From 1 to 2 no record changes: the views are made once more when they are next brought up to date, since
        views.json is not there.
        """
        if self.format == PLAN_FORMAT:
            return self
        plan = replace(self, format=PLAN_FORMAT)
        plan.write(run.plan)
        return plan

    @property
    def fallback_job_name(self) -> str:
        """Slurm's name for the fallback job; another one than the chain's, whose singletons it must not hold up."""
        return fallback_job_name(self.job_name)

    @property
    def end_iteration(self) -> int | None:
        """The iteration at which the chain ends; None: the program itself ends when it is done."""
        return self.total_steps if self.stop_after is None else self.stop_after

    @property
    def ntasks(self) -> int:
        return self.nodes * self.ntasks_per_node

    @property
    def nodes_of_job(self) -> int:
        """Nodes that a job asks for."""
        return self.nodes + self.spare_nodes

    @property
    def outlives_nodes(self) -> bool:
        """Whether a job goes on where it loses a node."""
        return self.spare_nodes > 0 or bool(self.elastic_nodes)

    @property
    def node_counts(self) -> list[int]:
        """With how many nodes a job can start, all of them first."""
        return [*range(self.nodes_of_job, self.nodes - 1, -1), *self.elastic_nodes]

    def training_nodes(self, num_nodes: int) -> int:
        """How many nodes of a job that has `num_nodes` train; where it outlives some, those that have places."""
        if not self.outlives_nodes:
            return num_nodes
        return max((nodes for nodes in (self.nodes, *self.elastic_nodes) if nodes <= num_nodes), default=num_nodes)


def chain_job_name(project: str, name: str, run: Path) -> str:
    """A job name that no other run has: another project, name or directory gives another one."""
    return f"{project}-{name}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"


def fallback_job_name(name: str) -> str:
    """The name of the fallback job of a chain whose jobs have this name."""
    return f"{name}-fallback"


def read_plan_format(run: Run) -> tuple[dict[str, Any], int] | None:
    """What plan.json holds, and the format of the run directory; None where there is no plan.

    Raises RunDirError if the record is damaged, or of a format that a newer relayrun wrote.
    """
    try:
        entry = read_json(f"{run.path}/{PLAN_NAME}")
        number = int(entry.get("format", 1))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        raise RunDirError(f"unreadable record: {error}", where=run.plan) from None
    if number > PLAN_FORMAT:
        raise RunDirError(
            f"this run directory has format {number}; relayrun {__version__} in {places.CODE_ROOT} knows formats up to "
            f"{PLAN_FORMAT}",
            where=run.plan,
            hint="update that relayrun, or use the one that submitted the run last",
        )
    return entry, number
