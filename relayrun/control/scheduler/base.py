"""The class that every scheduler extends, with the methods that a chain calls, and a job as a scheduler reports it."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.slurm_states import ENDED_STATES, WAITING_STATES
from relayrun.errors import SchedulerError

CONTROLLER_PATIENCE = 600.0
"""Seconds for which a question to a controller that does not answer is repeated."""
MAX_FAILED_BEGINS = 6
"""Consecutive failures of a job's supervisor after which the chain ends."""
BEGIN_BACKOFF = 30
"""Seconds until the first retry of such a job; each further retry doubles them."""
USER_PYTHONPATH = "RELAYRUN_USER_PYTHONPATH"
"""Environment variable in which job.sh keeps the PYTHONPATH of the submit."""


def is_live_state(state: str) -> bool:
    """True if a job in this state (Slurm's word) is queued or runs."""
    return state.partition(" ")[0] not in ENDED_STATES  # `CANCELLED by 1000`


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as the scheduler reports it. Times are seconds since 1970."""

    id: str
    name: str
    state: str
    reason: str = ""
    """Pending reason in Slurm's words, if it was asked for."""
    nodes: str = ""
    """Compressed."""
    num_nodes: int = 1
    batch_host: str = ""
    """The node of the batch script; it stays when Slurm removes that node from `nodes`."""
    end_time: float | None = None
    """Time at which the limit is reached, None while pending or without a limit; for a job that has ended, its end."""
    submit_time: float | None = None
    eligible_time: float | None = None
    """Time from which only a lack of nodes kept the job from starting; None if the scheduler does not report it."""
    start_time: float | None = None
    """None while it is pending."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of sbatch by their long names, read back from the job."""
    requeue: bool = False
    """`requeue` accepts the job."""

    at_limit: bool = False
    """The job has run as long as its time limit allows."""
    ended_by_slurm: bool = False
    """Slurm itself ends the job, for its limit, a node, memory, or a deadline: nobody cancelled it."""
    preempted: bool = False
    restarts: int = 0
    """Number of requeues, the newest one included even before the job has ended for it."""
    of_chain: bool = False
    """A program of ours queued the job, by its comment; not a person's sbatch or a launcher."""
    failed_begins: int = 0
    """Consecutive failures of its `begin`, read from its comment."""
    stopped_by: str = ""
    """User who ended the chain, read from the comment of the job if the run directory did not accept STOP."""
    begin_failed_on: str = ""
    """Nodes, separated by commas, that the job excludes because its `begin` failed there; successors may use them."""

    @property
    def live(self) -> bool:
        """The job is queued or runs."""
        return is_live_state(self.state)

    @property
    def waits(self) -> bool:
        """The job is queued, and perhaps held."""
        return self.state in WAITING_STATES


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """The end of a job, as its scheduler recorded it."""

    id: str
    state: str
    """Slurm's state: FAILED, TIMEOUT, NODE_FAIL, OUT_OF_MEMORY, `CANCELLED by 1000`, ..."""
    exit_code: str = ""
    """Exit of the batch script: `1`, or `signal 9`; empty if it is 0 or unknown."""
    nodes: str = ""
    reason: str = ""
    end_time: float | None = None
    """Seconds since 1970."""
    source: str
    """The source of the record: sacct, scontrol or the local queue."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One period in which a job had nodes. Times are seconds since 1970, by the scheduler's clock."""

    job_id: str
    nodes: int
    """Number of nodes at its start."""
    submit: float | None
    """Time of the submit or requeue; None if unknown."""
    eligible: float | None
    """Time from which only a lack of nodes kept the job from starting."""
    start: float
    end: float | None
    """None while the job has its nodes."""
    source: str
    """The source of the record: sacct, squeue or the local queue."""
    state: str = ""
    """State of the job, in the scheduler's word; empty if it is unknown."""
    resized: Sequence[tuple[float, int]] = ()
    """Time of each loss of nodes and the number of nodes left, oldest first."""


class JobHistory:
    """The history of a chain's jobs, for people. The defaults fit a scheduler that keeps no record of jobs."""

    def last_job(self, plan: Plan, *, since: float) -> JobEnd | None:
        """Return the newest job since a time that ran and ended, else one that never ran; None if unknown."""
        return None

    def pending_reasons(self, plan: Plan) -> dict[str, str]:
        """Return, by job id, why each queued job of the chain waits, its fallback job included, in Slurm's words."""
        return {}

    def abandoned_jobs(self) -> list[str]:
        """Return the ids of queued jobs that never start because the terminal that ran the queue has gone."""
        return []

    def other_jobs_are_hidden(self) -> bool:
        """Return whether the scheduler hides the jobs of other users."""
        return False

    def allocations(self, plan: Plan, *, since: float, job_ids: Sequence[str]) -> list[Allocation]:
        """Return every allocation of the chain that the scheduler remembers, oldest first. `since`: seconds since 1970.
        `job_ids`: the jobs that began an attempt; the first one may have had another name."""
        return []


@dataclass(frozen=True, kw_only=True)
class RankLaunch:
    """Commands that start and signal the ranks of a job."""

    command: Sequence[str]
    """Command prefix that starts the program behind it once per rank."""
    nodes: Sequence[str] = ()
    """With spare nodes: names of the job's nodes; `command` starts one step on each of them, see
    `relayrun.control.agent.step_per_node`."""
    signal_command: Sequence[str] = ()
    """Command that sends the signal to all ranks; empty if the batch script signals the task starter itself."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """MASTER_ADDR and MASTER_PORT, if they are known before the ranks start."""
    unset: Sequence[str] = ()
    """Variables of another job, in which the job was submitted: the task starter would obey them."""


class MinimumNodes(NamedTuple):
    """The smallest size at which a job may start."""

    nodes: int
    wanted: int
    """Number of nodes that the job gets if they are up."""
    tasks: int


class UsableNodes(Protocol):
    """The nodes of a cluster, and the nodes that a queued job may use. Every method may raise SchedulerError."""

    def expand(self, nodes: str) -> list[str]:
        """Return the node names of a compressed list, in the order of the ranks."""

    def all_nodes(self) -> set[str]:
        """Return the names of all nodes."""

    def enough_up(self, plan: Plan, script: Path, options: Mapping[str, str]) -> bool:
        """Return whether enough nodes are up for a job with these options, including its excluded nodes."""

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """Set the excluded nodes of a queued job to exactly these nodes."""

    def allow_fewer(self, job_id: str, minimum: MinimumNodes) -> None:
        """Let a queued job start with fewer nodes than it asks for; it gets all of them if they are up."""


@dataclass(frozen=True, kw_only=True)
class FallbackOrder:
    """The failure that a fallback job waits for."""

    job_id: str
    failed_begins: int = 0
    """Number of consecutive jobs before that job that could not begin."""


class FallbackJobs(Protocol):
    """Jobs that start only if another job fails. Every method may raise SchedulerError."""

    def live(self, name: str, *, anyone: bool = False) -> list[Job]:
        """Return the fallback jobs with this name that are pending or running: this user's, or `anyone`'s."""

    def queue(
        self, script: Path, *, name: str, order: FallbackOrder, options: Mapping[str, str | None], limit: int
    ) -> str:
        """Queue `script` as a fallback job, in partitions that jobs with these options may use; return its id. The job
        asks for one task; if the site refuses that, for all `options`. `limit`: its time limit in seconds."""

    def move(self, job_id: str, order: FallbackOrder) -> None:
        """Let a pending fallback job wait for the failure of another job."""

    def order(self, job_id: str) -> FallbackOrder:
        """Return the failure that this fallback job waited for."""

    def count_failed_begins(self, job_id: str, count: int, nodes: str) -> None:
        """Record in a queued job of the chain how many consecutive `begin`s failed before it, and on which nodes."""


class Scheduler(ABC):
    """Slurm, or the local scheduler. Every method may raise SchedulerError.

    A new batch system implements the eleven abstract methods. The defaults of the others fit a scheduler without choice
    of nodes, reservations, comments in jobs, or a record of users.
    """

    @classmethod
    def for_run(cls, run: Run, *, patience: float, ordered: bool = False) -> Scheduler:
        """Construct the scheduler of a run. `patience`: seconds for which a question is repeated. `ordered`: a person
        waits for an order."""
        return cls()

    @classmethod
    def queued_jobs(cls, chains: Sequence[tuple[Run, Sequence[str]]], *, patience: float) -> list[list[Job]]:
        """Return the queued and running jobs of several runs, each given with the names of its jobs."""
        found = []
        for run, names in chains:
            scheduler = cls.for_run(run, patience=patience)
            jobs = [scheduler.query(job_id) for name in names if (job_id := scheduler.find_job(name))]
            found.append([job for job in jobs if job is not None and job.live])
        return found

    @abstractmethod
    def current_job_id(self) -> str:
        """Return the id of the job that this process runs in."""

    @abstractmethod
    def query(self, job_id: str) -> Job | None:
        """Return the job, or None if the scheduler has forgotten it."""

    @abstractmethod
    def jobs(self, plan: Plan, *, anyone: bool = False) -> list[Job]:
        """Return the queued and running jobs of the chain: this user's, or with `anyone` every user's."""

    @abstractmethod
    def find_job(self, name: str) -> str | None:
        """Return the id of a queued or running job of this user with this name."""

    @abstractmethod
    def submit(self, plan: Plan, script: Path, *, options: Mapping[str, str], delay: int = 0) -> str:
        """Queue `script` as a singleton of its job name, to start after `delay` seconds or later; return its id."""

    @abstractmethod
    def submit_auxiliary(self, plan: Plan, script: Path, *, name: str, arguments: Sequence[str], limit: int) -> str:
        """Queue a job outside the chain that no other job waits for; return its id. `limit`: in seconds."""

    @abstractmethod
    def cancel(self, job_id: str) -> None:
        """Cancel one job by id; a job that has already ended is no error."""

    @abstractmethod
    def cancelled(self, job_id: str, *, nodes: str) -> bool:
        """Return whether somebody cancelled the job, which began on `nodes`; may wait until its end is recorded."""

    @abstractmethod
    def requeue(self, job_id: str, *, delay: int = 0, minimum: MinimumNodes | None = None) -> None:
        """Requeue the running job, after `delay` seconds and with `minimum` nodes at least. May end the caller."""

    @abstractmethod
    def signal_ranks(self, job_id: str, number: signal.Signals) -> None:
        """Send a signal to the ranks of the running job, but not to its batch script."""

    @abstractmethod
    def rank_launch(self, plan: Plan, job: Job, *, leave_signal: signal.Signals | None) -> RankLaunch:
        """Return how the ranks, or one agent per node, are started and signalled; `leave_signal` asks them to leave."""

    @property
    def nodes(self) -> UsableNodes | None:
        """None if jobs cannot choose among nodes."""
        return None

    @property
    def fallback_jobs(self) -> FallbackJobs | None:
        """None if a job whose batch script is killed comes back without them."""
        return None

    @property
    def history(self) -> JobHistory:
        """The record of ended jobs, and of the reasons why jobs wait."""
        return JobHistory()

    def live_fallback_jobs(self, plan: Plan, *, anyone: bool = False) -> list[Job]:
        """Return the chain's pending or running fallback jobs: this user's, or `anyone`'s."""
        jobs = self.fallback_jobs
        return jobs.live(plan.fallback_job_name, anyone=anyone) if plan.fallback_job and jobs is not None else []

    def submit_first(self, plan: Plan, script: Path, evaluation: Path | None = None) -> str:
        """Queue the first job after every possible check, also of the script `evaluation`; return its id."""
        return self.submit(plan, script, options={})

    def adopt(self, job: Job, plan: Plan) -> None:
        """Make a running job a job of the chain: set its name, and whether it is requeued after the loss of a node."""
        return

    def confirm_begin(self, job: Job, *, followed: bool, log: str | None) -> None:
        """Report that the running job has begun: its earlier failures no longer count. `followed`: its successor is
        queued. `log`: the file of its standard error, for people who ask the scheduler."""
        return

    def guard(self, job_id: str, command: Sequence[str], *, log: Path) -> None:
        """Have the running job requeued if its batch script is killed. `command` runs `chain.watch.run_guard`, once."""
        return

    def postpone(self, job_id: str, *, delay: int) -> None:
        """Delay the start of a queued job to `delay` seconds from now or later."""
        raise SchedulerError("this scheduler cannot delay a queued job")

    def clock(self) -> float | None:
        """Return the scheduler's time, in seconds since 1970; None if it is not known, or this machine's."""
        return None

    def job_end(self, job: Job) -> tuple[float | None, str]:
        """Return when a running job ends, by what is known now, and what ends it; empty if its time limit does."""
        return job.end_time, ""

    def release(self, job_id: str) -> None:
        """Let a job start that the scheduler itself holds."""
        raise SchedulerError("this scheduler holds no job")

    def reservation_end(self, name: str, *, for_good: bool = False) -> float | None:
        """Return when this reservation, and the jobs in it, end; None if the jobs go on or it is not known. `for_good`:
        the time from which no further job of it can start; infinity if it repeats, or jobs may go on without it."""
        return None

    def cancel_together(self, job_ids: Sequence[str]) -> bool:
        """Cancel these jobs with one order, so that none starts since another one is gone; return whether it was taken.
        If not, `cancel` does it one by one."""
        return False

    def note_stop(self, job_id: str, user: str) -> None:
        """Record in a job of the chain that this user ended the chain; `query` returns it as `Job.stopped_by`."""
        return

    def cancelled_by(self, job_id: str) -> str | None:
        """Return the name of the user who cancelled the job; None if it is not known."""
        return None

    def default_options(self) -> Mapping[str, str]:
        """Return the options of a job that asks for none, such as the default partition, if they are known."""
        return {}

    def single_task_command(self, plan: Plan, *, cpus_per_task: str) -> list[str]:
        """Return the command prefix with which a job outside the chain starts one task with so many processors."""
        return []


_COMMANDS = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SINFO_", "SACCT_", "SACCTMGR_")
JOB_VARIABLE_PREFIXES = (*_COMMANDS, "RELAYRUN_")
"""Prefixes of the variables that a surrounding job sets, or that change the output of Slurm's commands."""


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of the surrounding job, which give a new job wrong defaults.

    Defaults for Slurm's commands go as well: with SQUEUE_STATES=RUNNING no job would seem to wait. PYTHONPATH and
    PYTHONSAFEPATH, which the supervisor changes, become the user's again.
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
    """Return the folders of the submitter's PYTHONPATH, also inside the supervisor, which runs with another one."""
    text = environment.get(USER_PYTHONPATH, environment.get("PYTHONPATH", ""))
    return [folder for folder in text.split(":") if folder]
