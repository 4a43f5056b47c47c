"""What a chain asks of a scheduler: the protocol, and a job as a scheduler knows it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from relayrun.control.rundir.plan import Plan

CONTROLLER_PATIENCE = 600.0
"""Seconds for which a controller that does not answer is asked again."""

MAX_FAILED_BEGINS = 6
"""Times in a row that a job's supervisor may fail before the chain ends."""

BEGIN_BACKOFF = 30
"""Seconds after which such a job is tried again first; each time doubles them."""

USER_PYTHONPATH = "RELAYRUN_USER_PYTHONPATH"
"""Where job.sh keeps the PYTHONPATH that its job was submitted with."""

_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
    | {"PREEMPTED", "REVOKED", "TIMEOUT"}
)
"""States of a job that has ended; in any other one it is queued or has nodes, also in one that is not known here."""

RESERVATION_GONE = "RESV_DEL_HOLD"
"""State of a queued job whose reservation was over before it started: it never starts."""

_WAITING = frozenset({"PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT", RESERVATION_GONE})
"""States of a queued job; in all but the first one Slurm or a person holds it."""


def is_live_state(state: str) -> bool:
    """Whether a job in this state, in Slurm's word, is queued or runs."""
    return state.partition(" ")[0] not in _ENDED  # behind it may stand who cancelled it


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job as the scheduler knows it. Times are seconds since 1970."""

    id: str
    name: str
    state: str
    nodes: str = ""
    """Slurm's list of the nodes, compressed."""
    num_nodes: int = 1
    batch_host: str = ""
    """The node of its batch script; it stays the same where Slurm takes that node out of `nodes`."""
    end_time: float | None = None
    """When its time limit is reached, None while it is pending or without a limit; of a job that has ended, when it
    did."""
    submit_time: float | None = None
    eligible_time: float | None = None
    """When nothing but a lack of nodes kept it from starting any more; None where the scheduler does not say."""
    start_time: float | None = None
    """When it was given its nodes; None while it is pending."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of sbatch by their long names, read back from the job, that hold for its successors."""
    requeue: bool = False
    """Whether `requeue` takes it."""

    at_limit: bool = False
    """It has run as long as its time limit allows."""
    preempted: bool = False
    failed_begins: int = 0
    """How often in a row its `begin` has failed, by its comment."""
    stopped_by: str = ""
    """Who has ended its chain, by its comment, where the run directory took no STOP."""
    begin_failed_on: str = ""
    """The nodes, separated by commas, that it leaves out because its `begin` failed there; the next jobs need not."""

    @property
    def begin_failed(self) -> bool:
        """It has been queued again because its `begin` failed."""
        return bool(self.begin_failed_on)

    @property
    def live(self) -> bool:
        """Queued or running."""
        return is_live_state(self.state)

    @property
    def waits(self) -> bool:
        """Queued, and perhaps held."""
        return self.state in _WAITING


@dataclass(frozen=True, kw_only=True)
class RankLaunch:
    """How the ranks of a job are started and reached."""

    command: Sequence[str]
    """What stands before a rank's program so that it is started once per rank."""
    nodes: Sequence[str] = ()
    """Where there are spare nodes: names of the job's nodes, on each of which `command` starts one step; see
    `relayrun.control.agent.step_per_node`."""
    signal_command: Sequence[str] = ()
    """Sends the signal asked for to all ranks; empty where the batch script signals the task starter itself."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """MASTER_ADDR and MASTER_PORT, where they are known before the ranks start."""


class MinimumNodes(NamedTuple):
    """With how little a job may start."""

    nodes: int
    of: int
    """How many nodes it has where they are there."""
    tasks: int


class NodeControl(Protocol):
    """The nodes of a cluster, and which of them a queued job may have. Every method may raise SchedulerError."""

    def expand(self, nodes: str) -> list[str]:
        """A compressed list of nodes, written out in the order of the ranks."""

    def known(self) -> set[str]:
        """Names of all nodes."""

    def suffice(self, plan: Plan, script: Path, options: Mapping[str, str]) -> bool:
        """Whether a job with these options, nodes to exclude among them, has enough nodes that are up."""

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """Keep a queued job off exactly these nodes."""

    def do_with(self, job_id: str, few: MinimumNodes) -> None:
        """Let a queued job start with fewer nodes than it asks for; it has all of them where they are there."""


@dataclass(frozen=True, kw_only=True)
class FallbackOrder:
    """What a fallback job waits for."""

    job_id: str
    """The job whose failure starts it."""
    failed_begins: int = 0
    """How often in a row the jobs before that one could not begin."""


class FallbackJobs(Protocol):
    """Jobs that start only if another one fails. Every method may raise SchedulerError."""

    def live(self, name: str, *, anyone: bool = False) -> list[Job]:
        """Those of this name that wait or run: this user's, or `anyone`'s."""

    def queue(
        self, script: Path, *, name: str, order: FallbackOrder, options: Mapping[str, str | None], limit: int
    ) -> str:
        """Queue `script` as one of them, where the job with these options may run; return its id.

        `limit`: seconds that it may take. It is small; but where a small one is refused it asks for all that is in
        `options`.
        """

    def move(self, job_id: str, order: FallbackOrder) -> None:
        """Let one that has not started wait for another job's failure."""

    def order(self, job_id: str) -> FallbackOrder:
        """What this one waited for."""

    def count_failed_begins(self, job_id: str, count: int, nodes: str) -> None:
        """Write down for a queued job of the chain that `begin` failed before it so often, and on which nodes."""


class Scheduler(Protocol):
    """Slurm, or the local scheduler. Every method may raise SchedulerError."""

    @property
    def nodes(self) -> NodeControl | None:
        """None where jobs cannot choose among nodes."""

    @property
    def fallback_jobs(self) -> FallbackJobs | None:
        """None where a job whose batch script is killed comes back anyway."""

    def current_job_id(self) -> str:
        """Id of the job that this process runs in."""

    def query(self, job_id: str) -> Job | None:
        """The job, or None where the scheduler does not know it any more."""

    def reservation_end(self, name: str, *, for_good: bool = False) -> float | None:
        """When this reservation ends, and its jobs with it; None where they do not, or the scheduler does not say.

        `for_good`: when no other job of it can start; infinity where it comes again, or jobs go on without it.
        """

    def jobs(self, plan: Plan, *, anyone: bool = False) -> list[Job]:
        """Queued and running jobs of the chain: this user's, or `anyone`'s for who only looks on."""

    def named(self, name: str) -> str | None:
        """Id of a queued or running job of this user with this name."""

    def submit_first(self, plan: Plan, script: Path, evaluation: Path | None = None) -> str:
        """Queue the first job of a chain, after all has been tested that can be; return its id.

        `evaluation`: the script of the jobs that evaluate its checkpoints, which is tested too.
        """

    def submit(self, plan: Plan, script: Path, *, options: Mapping[str, str], delay: int = 0) -> str:
        """Queue `script` as a singleton of its job name, not before `delay` seconds; return its id."""

    def submit_auxiliary(self, plan: Plan, script: Path, *, name: str, arguments: Sequence[str], limit: int) -> str:
        """Queue a job that is no part of the chain and that nothing waits for; return its id. `limit`: seconds."""

    def adopt(self, job: Job, plan: Plan) -> None:
        """Make a running job one of the chain: its name, and whether it comes back after the loss of a node."""

    def cancel(self, job_id: str) -> None:
        """Cancel one job by id; it is no error if it has already gone."""

    def note_stop(self, job_id: str, user: str) -> None:
        """Write down in a job of the chain that this user has ended it: `query` tells it as `Job.stopped_by`."""

    def cancelled(self, job_id: str, *, nodes: str) -> bool:
        """Whether somebody cancelled the job, which began on `nodes`; also right inside its own last seconds.

        May wait for the scheduler to write down how the job ended.
        """

    def cancelled_by(self, job_id: str) -> str | None:
        """Name of the user who cancelled the job; None where nobody knows."""

    def postpone(self, job_id: str, *, delay: int) -> None:
        """Do not start a queued job before `delay` seconds from now."""

    def settle(self, job: Job, *, followed: bool, log: str | None) -> None:
        """Tell the scheduler that the running job has begun: failed tries of it count no more.

        `followed`: its successor is queued, so that it need not come back after the loss of a node. `log`: the file of
        its standard error, for people who ask the scheduler.
        """

    def requeue(self, job_id: str, *, delay: int = 0, few: MinimumNodes | None = None) -> None:
        """Queue the running job again under its id, not before `delay` seconds. It may end the caller.

        `few`: what it may start with, where it need not have all nodes that it has asked for.
        """

    def guard(self, job_id: str, command: Sequence[str], *, log: Path) -> None:
        """Have the running job queued again if its batch script is killed; see `chain.watch`, which `command` runs."""

    def signal_ranks(self, job_id: str, number: signal.Signals) -> None:
        """Send a signal to the ranks of the running job, not to its batch script."""

    def rank_launch(self, plan: Plan, job: Job, *, leave_signal: signal.Signals | None) -> RankLaunch:
        """How the ranks of this running job are started and reached; with agents, the agents, one a node.

        `leave_signal`: asks them to save and leave.
        """

    def single_task_command(self, plan: Plan, *, cpus_per_task: str) -> list[str]:
        """What stands before a program that a job outside the chain starts once, on so many processors."""


JOB_VARIABLE_PREFIXES = (
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "SQUEUE_",
    "SCANCEL_",
    "SINFO_",
    "SACCT_",
    "SACCTMGR_",
    "RELAYRUN_",
)
"""What the names of variables begin with that a surrounding job has, or that change what Slurm's commands answer."""


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the variables of the surrounding job, which would give a new job wrong defaults.

    Nor with a person's defaults for Slurm's commands: with SQUEUE_STATES=RUNNING no job would wait. PYTHONPATH and
    PYTHONSAFEPATH are the user's again: the supervisor runs with others, and a new job would inherit them.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name == "SLURM_CONF" or not name.startswith(JOB_VARIABLE_PREFIXES)
    }
    if USER_PYTHONPATH in environment:
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
            kept.pop(name, None)
            kept |= {name: own} if (own := environment.get(f"RELAYRUN_USER_{name}")) else {}
    return kept


def user_python_path(environment: Mapping[str, str]) -> list[str]:
    """Folders of the submitter's PYTHONPATH, also inside the supervisor, which runs with another one."""
    text = environment.get(USER_PYTHONPATH, environment.get("PYTHONPATH", ""))
    return [folder for folder in text.split(":") if folder]
