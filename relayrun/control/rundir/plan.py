"""`plan.json`: everything that the supervisor needs to know about a run, in plain JSON, without the schema."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from relayrun import __version__, places
from relayrun.config.sections.batch_systems import batch_system
from relayrun.config.sections.chain import ChainSection
from relayrun.config.sections.dataclass_section import read_section
from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import PLAN_NAME, Run
from relayrun.errors import RunDirError, user_name
from relayrun.trust import OTHER_OWNER_HINT, UntrustedError, read_owned, refuse_untrusted, write_owned

PLAN_FORMAT = 3
"""Format number of the run directory; a job of this version converts an older one, and a newer one is refused."""

ACTED_ON_NAMES = (
    *(PLAN_NAME, "job.sbatch", "fallback.sbatch", "evaluation.sbatch", "local", "attempts", "membership.json"),
    *("notices/policy.json", "mirror/policy.json", "evaluations/policy.json", "wandb/settings"),
)
"""Files that jobs execute or that name programs, addresses or runs, and folders of such files."""


COPY = "this is a copy of a run directory, in whose files anybody may have named programs"
COPY_HINT = f"remove its {PLAN_NAME} if you moved a run of your own, and submit its config; else {OTHER_OWNER_HINT}"


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Written by an explicit submit; read by every job of the chain."""

    format: int = PLAN_FORMAT
    """Format number of the run directory; see `PLAN_FORMAT`."""
    run: str
    """Project and name, `project/name`, for people."""
    job_name: str
    """Slurm's job name; unique to the run directory, for `--dependency=singleton`."""
    scheduler: str
    """A key of `BATCH_SYSTEMS`."""
    total_steps: int | None
    """The last iteration; None: the program itself ends when it is done."""
    stop_after: int | None = None
    """An iteration before the last one at which the chain ends."""
    config_revision: int
    submitted_after_attempt: int
    """Highest attempt at the last explicit submit; older attempts no longer count as failed."""
    owner: int | None = None
    """User id of the owner, see `relayrun.trust.read_owned`; None: this is a copy of a run."""

    chain: ChainSection
    """The config's own section. What its `auto` means for this run stands below."""
    fork_server: list[str] = field(default_factory=list)
    """The program that an agent executes to fork ranks; empty without agents."""
    gpus_per_node: int = 0
    gpu_program: list[str] = field(default_factory=list)
    """Prints the GPU state from NVIDIA's library; see `relayrun.train.gpu_health`."""
    time_limit: int
    """Seconds."""
    grace_period: float
    """Seconds before the end of the job at which rank 0 of a first attempt saves and leaves."""
    min_grace_period: float
    max_grace_period: float
    """Bounds of the measured grace period; equal if it is fixed."""
    signal_seconds: int
    """Seconds before the end of the job at which the scheduler sends SIGUSR2 to the batch script."""

    nodes: int
    """Nodes whose ranks train."""
    spare_nodes: int = 0
    """Further nodes of each job, which replace lost nodes."""
    ntasks_per_node: int
    cpus_per_task: int
    sbatch_options: dict[str, str | None]
    """Further options of sbatch by their long names without dashes; None: an option without a value."""
    srun_options: list[str]
    command_prefix: list[str]
    program: list[str]
    """The program of a rank of the native trainer; `--attempt N` is appended."""
    environment: dict[str, str]
    modules: list[str]
    setup: list[str] = field(default_factory=list)
    """The lines of Bash of `job.setup`, which run before the ranks."""
    trainer: str = "native"
    """The program of the ranks: native, megatron-lm or command; see `relayrun.control.trainers`."""
    trainer_settings: dict[str, Any] = field(default_factory=dict)
    """The settings of a foreign trainer."""

    host_python: str
    package_root: str
    """Folder that holds `relayrun/` and `launchers/`."""
    log_folder: str
    load_path: str | None = None
    """The checkpoint from which the run starts as long as it has none of its own."""
    load_iteration: int = 0
    cost_per_node_hour: float | None = None
    currency: str = ""
    quota_command: list[str] = field(default_factory=list)
    """Command that prints the quota of the run directory's file system; empty: `lfs quota` and `quota`."""
    checkpoints_kept: int | None = None
    """Number of newest checkpoints that a rule keeps; None if only the program knows it."""
    save_interval: int | None = None
    """Iterations between saves; None if only the program knows it."""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Plan:
        """Make the plan from a JSON object. Raises ValueError for a setting of another type or outside its limits."""
        batch_system(value["scheduler"])
        return super().of({**value, "chain": read_section(ChainSection, value["chain"], "chain")})

    @classmethod
    def load(cls, run: Run) -> Plan:
        """Read the plan of anybody's run. Raises RunDirError if there is none, or if its format is newer."""
        found = read_plan_format(run)
        if found is None:
            hint = (
                "give the directory that `relayrun submit` printed; where it was moved, submit with run_dir set to its "
                "new place"
            )
            raise RunDirError("this is no run directory: it has no plan.json", where=run.path, hint=hint)
        entry, number = found
        try:
            return cls.of(entry | {"format": number})
        except (ValueError, TypeError, KeyError) as error:
            words = f"it has no {error.args[0]}" if isinstance(error, KeyError) else error
            raise RunDirError(f"unreadable record: {words}", where=run.plan) from None

    @classmethod
    def load_in_job(cls, run: Run) -> Plan:
        """Read the plan in a process of a job, whose `begin` has judged all else. Raises UntrustedError if another user
        can write the plan by now."""
        refuse_untrusted(run.path, [PLAN_NAME])
        return cls.load(run)

    @classmethod
    def load_before_ranks(cls, run: Run) -> Plan:
        """Read the plan in one process of a node, before ranks start there. The code is judged, too."""
        plan = cls.load_in_job(run)
        refuse_untrusted(run.path, (), trees=plan.code_folders(run))
        return plan

    @classmethod
    def load_trusted(cls, run: Run) -> Plan:
        """Read the plan of a run that this process acts for. Raises UntrustedError unless the plan, and every other
        file that its jobs execute or that names a program or an address, is trusted."""
        plan = cls.load(run)
        names = [*ACTED_ON_NAMES, f"config/{plan.config_revision:04}.yaml"]
        refuse_untrusted(run.path, names, trees=plan.code_folders(run))
        if plan.owner is None:
            raise UntrustedError(COPY, where=run.plan, hint=COPY_HINT)
        if plan.owner not in (os.geteuid(), 0):
            words = f"{user_name(plan.owner)} submitted this run, whose settings nobody has looked at"
            raise UntrustedError(words, where=run.plan, hint=OTHER_OWNER_HINT)
        return plan

    def write(self, path: Path) -> None:
        write_owned(path, asdict(self))

    def code_folders(self, run: Run) -> list[str]:
        """Return the snapshots of code in the run directory that its jobs execute, relative to it."""
        top = os.path.realpath(run.path)
        roots = (os.path.realpath(root) for root in (self.package_root, self.trainer_settings.get("dir")) if root)
        return [os.path.relpath(root, top) for root in roots if root.startswith(f"{top}/")]

    @property
    def fallback_job(self) -> bool:
        """True if a small job waits behind the chain's newest job, in case that job fails without recording it."""
        return self.chain.fallback_job and self.chain.auto_requeue and batch_system(self.scheduler).fallback_jobs

    @property
    def fallback_job_name(self) -> str:
        """Slurm's name for the fallback job; a different name, so that it does not delay the chain's singletons."""
        return fallback_job_name(self.job_name)

    @property
    def end_iteration(self) -> int | None:
        """The iteration at which the chain ends; None: the program itself ends when it is done."""
        return self.total_steps if self.stop_after is None else self.stop_after

    def host_command(self, module: str) -> list[str]:
        """Return the command that runs a module of relayrun on the host's Python."""
        return [self.host_python, f"{self.package_root}/launchers/lib/run_module.py", module]

    @property
    def ntasks(self) -> int:
        return self.nodes * self.ntasks_per_node

    @property
    def nodes_of_job(self) -> int:
        """Nodes that a job asks for."""
        return self.nodes + self.spare_nodes

    @property
    def outlives_nodes(self) -> bool:
        """True if a job continues after the loss of a node."""
        return self.spare_nodes > 0

    @property
    def node_counts(self) -> list[int]:
        """Numbers of nodes with which a job can start, largest first."""
        return list(range(self.nodes_of_job, self.nodes - 1, -1))

    def training_nodes(self, num_nodes: int) -> int:
        """Return how many of a job's `num_nodes` nodes train: all but the spare ones."""
        return min(self.nodes, num_nodes) if self.outlives_nodes else num_nodes

    def rank_count(self, options: Mapping[str, str]) -> int:
        """Return how many ranks train in a job with these options of sbatch."""
        return self.training_nodes(int(options.get("nodes", self.nodes))) * self.ntasks_per_node


def chain_job_name(project: str, name: str, run: Path) -> str:
    """Return a job name that no other run has: it differs for another project, name or directory."""
    return f"{project}-{name}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"


def fallback_job_name(name: str) -> str:
    """Return the name of the fallback job of a chain with this job name."""
    return f"{name}-fallback"


def read_plan_format(run: Run) -> tuple[dict[str, Any], int] | None:
    """Return plan.json and its format; None without a plan. Raises RunDirError for a damaged plan or a newer format."""
    try:
        entry = read_owned(run.path, PLAN_NAME)
        number = int(entry["format"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        words = "it has no format" if isinstance(error, KeyError) else error
        raise RunDirError(f"unreadable record: {words}", where=run.plan) from None
    if number > PLAN_FORMAT:
        known = f"relayrun {__version__} in {places.CODE_ROOT} knows formats up to {PLAN_FORMAT}"
        hint = "update that relayrun, or use the one that submitted the run last"
        raise RunDirError(f"this run directory has format {number}; {known}", where=run.plan, hint=hint)
    return entry, number


def cost_words(node_hours: float, prices: Any) -> str:
    """Return the cost of node hours in brackets, behind a space; empty without a price. `prices`: a plan, a site, or
    another object with `cost_per_node_hour` and `currency`."""
    price = prices.cost_per_node_hour
    return f" ({node_hours * price:,.2f} {prices.currency}".rstrip() + ")" if price else ""
