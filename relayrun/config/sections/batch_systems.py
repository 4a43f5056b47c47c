"""The batch systems that `cluster.scheduler` names. A new one is an entry here and a module of its name beside `slurm`
and `local` in `control/scheduler`, which assigns its subclass of `Scheduler` to SCHEDULER."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSystem:
    """Facts about a batch system that hold for all its jobs."""

    slurm: bool = False
    """Slurm's commands queue its jobs and start its ranks: their options, variables and containers exist."""
    one_machine: bool = False
    """The terminal of the submit runs the jobs, one after the other."""
    fallback_jobs: bool = False
    """A queued job can wait for the failure of another job."""


BATCH_SYSTEMS = {
    "slurm": BatchSystem(slurm=True, fallback_jobs=True),
    "local": BatchSystem(one_machine=True),
}


def batch_system(name: str) -> BatchSystem:
    """Return the batch system with this name. Raises ValueError for another one."""
    if name not in BATCH_SYSTEMS:
        raise ValueError(f"scheduler {name!r} is none of {', '.join(BATCH_SYSTEMS)}")
    return BATCH_SYSTEMS[name]


_OWN_SETTINGS = (
    "time nodes ntasks-per-node cpus-per-task gpus-per-node account partition qos reservation constraint exclude"
)
SETTINGS_INSTEAD = {
    "job-name": "it follows from project and name",
    **{name: f"set job.{name.replace('-', '_')}" for name in f"{_OWN_SETTINGS} mem exclusive".split()},
    "ntasks": "set job.nodes and job.ntasks_per_node",
    "signal": "set chain.signal_seconds",
    "no-kill": "set job.spare_nodes: without them nobody would notice the loss of a node",
    **dict.fromkeys(("requeue", "no-requeue"), "set chain.auto_requeue"),
    "dependency": "jobs of a chain wait for each other by it",
    "array": "a chain is one job after the other",
    **dict.fromkeys(("output", "error", "open-mode"), "the job's script opens its logs, below logs/slurm"),
    **dict.fromkeys(("export", "export-file"), "set cluster.environment"),
    "get-user-env": "set job.setup or cluster.environment",
    "comment": "the chain notes there what it must find again: the job's log, and starts that failed; set wckey",
    "clusters": "a chain asks one cluster for its jobs; submit from a login node of the other one",
    "hold": "every job of the chain would be held; use `scontrol hold`",
    "wait": "the submit would not return",
    "wrap": "the job runs relayrun's own script",
    "test-only": "use --dry-run",
    **dict.fromkeys(("parsable", "quiet"), "relayrun reads sbatch's answer"),
    **dict.fromkeys(("uid", "gid"), "jobs run as who submits them"),
    **dict.fromkeys(("help", "usage", "version"), "it is no option of a job"),
}
"""Options that relayrun sets itself, or cannot pass on, and the alternative."""
