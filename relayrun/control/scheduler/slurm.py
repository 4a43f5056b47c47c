"""The scheduler of a chain through Slurm's commands, and further functions that only Slurm offers."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import (
    FallbackJobs,
    FallbackOrder,
    Job,
    JobHistory,
    MinimumNodes,
    RankLaunch,
    Scheduler,
    UsableNodes,
    clean_environment,
    is_live_state,
)
from relayrun.control.scheduler.error_lines import expand_nodelist
from relayrun.control.scheduler.local_srun import free_port
from relayrun.control.scheduler.slurm_commands import (
    BEGIN_FAILED_COMMENT,
    COMMENT_PREFIX,
    STOPPED_BY_COMMENT,
    NoAnswerError,
    SlurmCommands,
    are_gpus_ambiguous,
    foreign_variables,
    gpu_options_like_script,
    is_job_text_ambiguous,
    parse_job,
    parse_timestamp,
)
from relayrun.control.scheduler.slurm_nodes import (
    NODES_TEST_SECONDS,
    SlurmNodes,
    chosen_partitions,
    exceeded_limits,
    first_test,
    minimum_changes,
)
from relayrun.errors import ConfigError, SchedulerError, user_name
from relayrun.slurmtime import format_time

log = logging.getLogger(__name__)

COMPLETING_SECONDS = 30.0
"""Seconds for which `cancelled` waits until a completing job has its final state."""
GUARD_STEP = "relayrun-guard"
LASTING_RESERVATIONS = {"HOURLY", "DAILY", "WEEKDAY", "WEEKEND", "WEEKLY", "NO_HOLD_JOBS_AFTER_END"}
"""Flags of a reservation after whose end pending jobs still start: it repeats, or its jobs go on without it."""


class Slurm(SlurmCommands, Scheduler):
    """The scheduler of a chain, through Slurm's commands."""

    @classmethod
    def for_run(cls, run: Run, *, patience: float, ordered: bool = False) -> Slurm:
        return cls(patience=patience, ordered=ordered)

    @classmethod
    def queued_jobs(cls, chains: Sequence[tuple[Run, Sequence[str]]], *, patience: float) -> list[list[Job]]:
        queued = jobs_by_name([name for _, names in chains for name in names], patience=patience)
        return [[job for name in names for job in queued[name]] for _, names in chains]

    def current_job_id(self) -> str:
        job_id = os.environ.get("SLURM_JOB_ID")
        if not job_id:
            raise SchedulerError("not inside a Slurm job: SLURM_JOB_ID is not set")
        return job_id

    def query(self, job_id: str) -> Job | None:
        try:
            text = self.ask(["scontrol", "show", "job", "--oneliner", job_id], answer="Invalid job id")
        except SchedulerError as error:
            if "Invalid job id" in error.message:
                return None
            raise
        name = self.field(job_id, "%j") if is_job_text_ambiguous(text) else None
        return parse_job(text, name=name, gpus=self.field(job_id, "%b") if are_gpus_ambiguous(text) else "")

    def field(self, job_id: str, letter: str) -> str:
        """Return one field of a job, in squeue's format."""
        command = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--format={letter}"]
        return self.ask(command, answer="Invalid job id").removesuffix("\n")

    def jobs(self, plan: Plan, *, anyone: bool = False) -> list[Job]:
        return self.jobs_named(plan.job_name, anyone=anyone)

    def find_job(self, name: str) -> str | None:
        found = self.ask(["squeue", "--noheader", "--me", f"--name={name}", "--format=%i"]).split()
        return found[0] if found else None

    def cancelled(self, job_id: str, *, nodes: str) -> bool:
        job = self.query(job_id)
        own = job_id == os.environ.get("SLURM_JOB_ID")
        if own and job is not None and job.restarts > int(os.environ.get("SLURM_RESTART_COUNT") or 0):
            return False  # an operator requeued it
        if own and job is not None and job.state == "COMPLETING":
            # While its batch script, in which this runs, lives, a job that Slurm ends is COMPLETING, whatever the
            # cause. Where no field names it, the job was cancelled if Slurm gives no reason, and it was no preemption,
            # nor one of its nodes (a lost one is no longer in its own list).
            said = self._states_beside_completing(job_id) or self._accounted_state(job_id).split()[:1]
            if said and not is_live_state(said[0]):
                return said[0] == "CANCELLED"
            return not (job.at_limit or job.ended_by_slurm or job.preempted) and not self._node_is_down(nodes)
        deadline = time.monotonic() + COMPLETING_SECONDS
        while job is not None and job.state == "COMPLETING" and time.monotonic() < deadline:
            time.sleep(1)  # a successor may start before Slurm has recorded the end of its predecessor
            job = self.query(job_id)
        return (self._accounted_state(job_id) if job is None else job.state).startswith("CANCELLED")

    def _states_beside_completing(self, job_id: str) -> list[str]:
        """Return the other states of a completing job: newer Slurm tells them in JSON. Empty if it does not."""
        try:
            (job,) = json.loads(self._once(["scontrol", "show", "job", "--json", job_id]))["jobs"]
            states = job["job_state"]
        except (SchedulerError, ValueError, KeyError, TypeError):
            return []
        return [each for each in states if each != "COMPLETING"] if isinstance(states, list) else []

    def _node_is_down(self, nodes: str) -> bool:
        states = self.ask(["sinfo", "--noheader", f"--nodes={nodes}", "--format=%T"]).split()
        known = [state for state in states if not state.startswith("unknown")]  # since a moment, after a reconfigure
        return any(state.rstrip("*").startswith(("down", "fail")) or state.endswith("*") for state in known)

    def _accounted_state(self, job_id: str) -> str:
        """Return the state of a job in the accounting, such as `CANCELLED by 1000`; empty if there is none."""
        try:
            command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}", "--format=State"]
            return self._once(command).strip()
        except SchedulerError:
            return ""

    def cancelled_by(self, job_id: str) -> str | None:
        found = re.search(r"CANCELLED by (\d+)", self._accounted_state(job_id))
        return None if found is None else user_name(int(found[1]))

    def clock(self) -> float | None:
        try:
            found = re.search(r"sdiag output at .*\((\d+)\)", self._once(["sdiag"]))
        except SchedulerError:
            return None
        return float(found[1]) if found else None

    def release(self, job_id: str) -> None:
        self.order_job(job_id, "release")

    def order_job(self, job_id: str, verb: str) -> None:
        """Give one order of scontrol: release, hold, requeue. Raises SchedulerError."""
        self.order(["scontrol", verb, job_id])

    def job_end(self, job: Job) -> tuple[float | None, str]:
        ends = [] if job.end_time is None else [(job.end_time, "")]
        nodes = set(expand_nodelist(job.nodes))
        for name, found in self._reservations().items():
            flags, begin = _reservation_flags(found), parse_timestamp(found.get("StartTime", ""))
            over = parse_timestamp(found.get("EndTime", ""))
            if name == job.options.get("reservation"):
                ends += [(over, f"reservation {name} ends")] if over is not None and "FLEX" not in flags else []
            elif "MAINT" in flags and nodes & set(expand_nodelist(found.get("Nodes", ""))):
                later = begin is not None and begin > (job.start_time or 0)  # the job started in spite of it
                ends += [(begin, f"maintenance {name} begins")] if begin is not None and later else []
        return min(ends, default=(None, ""))

    def _reservations(self) -> dict[str, dict[str, str]]:
        """Return the fields of each reservation by its name; empty if Slurm does not answer."""
        try:
            text = self._once(["scontrol", "show", "reservation", "--oneliner"])
        except SchedulerError:
            return {}
        # of two equal fields the first counts: the text of the comment comes last
        rows = [dict(reversed(re.findall(r"(\S+?)=(\S*)", line))) for line in text.splitlines()]
        return {row["ReservationName"]: row for row in rows if "ReservationName" in row}

    def reservation_end(self, name: str, *, for_good: bool = False) -> float | None:
        if (found := self._reservations().get(name)) is None:
            return None
        flags = _reservation_flags(found)
        if for_good and flags & LASTING_RESERVATIONS:
            return math.inf
        if "FLEX" in flags:  # jobs may go on after its end
            return None
        return parse_timestamp(found.get("EndTime", ""))

    @property
    def nodes(self) -> UsableNodes:
        return SlurmNodes(self, Slurm(patience=min(self._patience, NODES_TEST_SECONDS), pause=self._pause))

    @property
    def fallback_jobs(self) -> FallbackJobs:
        return SlurmFallbackJobs(self)

    @property
    def history(self) -> JobHistory:
        from relayrun.control.scheduler.job_history import SlurmHistory  # jobs do without it

        return SlurmHistory()

    def submit_first(self, plan: Plan, script: Path, evaluation: Path | None = None) -> str:
        Path(plan.log_folder).mkdir(parents=True, exist_ok=True)  # without this folder a job dies without a log
        rows: list[dict[str, str]] = []
        with contextlib.suppress(SchedulerError):  # asked once: sbatch says what is wrong with the controller
            rows = Slurm(patience=0).partitions()
        chosen = chosen_partitions(rows, plan.sbatch_options.get("partition"))
        if "qos" not in plan.sbatch_options and (exceeded := exceeded_limits(chosen, plan)):  # a QOS may lift them
            raise SchedulerError(exceeded[0][1])
        tested = [first_test(self, script, {}, plan.spare_nodes)]
        try:
            if evaluation is not None:
                tested.append(first_test(self, evaluation, {}, 0))
        except SchedulerError as error:  # else the results would be missing and only a log would say why
            raise SchedulerError(f"the job of an evaluation: {error.message}", hint="change evaluation.job") from None
        for warning in filter(None, [warning for _, warning in tested]):
            log.warning("%s", warning)
        return self.submit(plan, script, options={})

    def submit(self, plan: Plan, script: Path, *, options: Mapping[str, str], delay: int = 0) -> str:
        command = ["--dependency=singleton"]
        if delay:
            command.append(f"--begin=now+{delay}")
        again = gpu_options_like_script(options, plan.sbatch_options)
        command += [f"--{name}={value}" for name, value in again.items()]
        # not `--`: sbatch takes the rest as the script and its arguments anyway
        return self.submit_once([*command, str(script)], name=plan.job_name)

    def submit_auxiliary(self, plan: Plan, script: Path, *, name: str, arguments: Sequence[str], limit: int) -> str:
        options = [f"--job-name={name}", f"--time={format_time(limit)}"]
        return self.submit_once([*options, str(script), *arguments], name=name)

    def adopt(self, job: Job, plan: Plan) -> None:
        if job.name != plan.job_name:  # from here on the job is a singleton of its chain
            self.update_job(job.id, f"JobName={plan.job_name}")
        if plan.chain.auto_requeue != job.requeue:  # so that Slurm requeues a job that loses its node
            try:
                self.update_job(job.id, f"Requeue={int(plan.chain.auto_requeue)}")
            except SchedulerError:  # a site may forbid it; only the mode `requeue` needs it
                if plan.chain.mode == "requeue":
                    raise

    def confirm_begin(self, job: Job, *, followed: bool, log: str | None) -> None:
        changes = ["Requeue=0"] if followed else []
        if job.begin_failed_on and not followed:  # a requeued job must know which nodes it excludes for that reason
            changes.append(f"Comment={BEGIN_FAILED_COMMENT}0@{job.begin_failed_on}")
        else:  # Slurm's StdOut is /dev/null: the script opens its log itself
            changes.append(f"Comment={COMMENT_PREFIX}log={log}" if log else "Comment=")
        self.update_job(job.id, *changes)

    def guard(self, job_id: str, command: Sequence[str], *, log: Path) -> None:
        if GUARD_STEP in self.ask(["squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%j"]).split():
            return  # of a watch that has ended
        named = [f"--job-name={GUARD_STEP}", f"--output={escape_file_pattern(str(log))}", "--export=ALL"]
        environment = clean_environment(os.environ)  # else srun takes the job's own options from it
        devnull = subprocess.DEVNULL
        try:  # it ends with the job
            step = [*self._step_on_batch_host(job_id), *named, *command]
            subprocess.Popen(step, env=environment, stdin=devnull, stdout=devnull, stderr=devnull)
        except OSError as error:
            raise SchedulerError(f"srun: {error}") from None

    def _step_on_batch_host(self, job_id: str) -> list[str]:
        """Return the srun command for one task on the batch host, by name: Slurm versions number nodes differently."""
        job = self.query(job_id)
        if job is None or not job.batch_host:
            raise SchedulerError(f"Slurm does not say on which node the batch script of job {job_id} runs")
        return [*_step_beside(job_id, nodes=1), f"--nodelist={job.batch_host}"]

    def run_beside(self, job_id: str, command: Sequence[str], *, nodes: int) -> str:
        """Run a program on a running job's batch host, or once per node; return its output. Raises SchedulerError."""
        step = self._step_on_batch_host(job_id) if nodes == 1 else _step_beside(job_id, nodes=nodes)
        return self._once([*step, *command])

    def requeue(self, job_id: str, *, delay: int = 0, minimum: MinimumNodes | None = None) -> None:
        job = None
        with contextlib.suppress(SchedulerError, KeyError):  # asks once: only seconds may be left
            job = parse_job(self._once(["scontrol", "show", "job", "--oneliner", job_id]))
        if job is None or not job.requeue:
            with contextlib.suppress(SchedulerError):  # refused while the job ends; by then it is set
                self.update_job(job_id, "Requeue=1")
        later = [f"StartTime=now+{delay}"] * bool(delay) + self._nodes_come_back(job)
        # separate updates, since a site may refuse one, but a single process: the requeue ends this job
        changes = filter(None, [later, minimum_changes(minimum)])
        updates = [" ".join([f"update JobId={job_id}", *each]) for each in changes]
        try:
            if updates:
                self.order(["scontrol"], [f"requeue {job_id}", *updates])
            else:
                self.order(["scontrol", "requeue", job_id])
        except SchedulerError as error:  # the guard or the batch script requeued it before
            if "pending execution" not in error.message:
                raise

    def _nodes_come_back(self, job: Job | None) -> list[str]:
        """Return the changes that allow a job whose `begin` worked the nodes where `begin` had failed before."""
        if job is None or not job.begin_failed_on:
            return []
        tried, shown = set(job.begin_failed_on.split(",")), job.options.get("exclude")
        try:
            given = self._once(["scontrol", "show", "hostnames", shown]).split() if shown else []
        except SchedulerError:
            return []
        return [f"ExcNodeList={','.join(node for node in given if node not in tried)}", "Comment="]

    def postpone(self, job_id: str, *, delay: int) -> None:
        self.update_job(job_id, f"StartTime=now+{delay}")

    def cancel(self, job_id: str) -> None:
        job = self.query(job_id)
        if job is not None and job.live:
            self.order(["scancel", job_id])

    def cancel_together(self, job_ids: Sequence[str]) -> bool:
        try:
            self.order(["scancel", *job_ids])
        except NoAnswerError:
            raise
        except SchedulerError:  # one of them has just ended, or is another user's
            return False
        return True

    def note_stop(self, job_id: str, user: str) -> None:
        self.update_job(job_id, f"Comment={STOPPED_BY_COMMENT}{user}")

    def signal_ranks(self, job_id: str, number: signal.Signals) -> None:
        word = f"--signal={number.name.removeprefix('SIG')}"
        if number != signal.SIGKILL:
            self.order(["scancel", word, job_id])  # to all steps, but not to the batch script
            return
        # SIGKILL to a job cancels the job and its batch script, so each step gets it
        command = ["squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i"]
        for step in self.ask(command, answer="Invalid job id").split():
            if step.rpartition(".")[2].isdecimal():
                self.order(["scancel", word, step])

    def rank_launch(self, plan: Plan, job: Job, *, leave_signal: signal.Signals | None) -> RankLaunch:
        name = "" if leave_signal is None else leave_signal.name.removeprefix("SIG")
        cpus = job.options.get("cpus-per-task", str(plan.cpus_per_task))
        nodes = self.nodes.expand(job.nodes)
        if plan.outlives_nodes:
            command = self.agent_command(plan, nodes=1, cpus_per_task=cpus)
            command.insert(1, "--overlap")  # else a step waits until another step ends
        elif plan.chain.recovery == "node":
            command = self.agent_command(plan, nodes=job.num_nodes, cpus_per_task=cpus)
        else:
            # srun does not inherit --cpus-per-task from sbatch
            tasks = [f"--ntasks-per-node={plan.ntasks_per_node}", f"--cpus-per-task={cpus}"]
            command = [*_SRUN, f"--nodes={job.num_nodes}", *tasks, *plan.srun_options]
        return RankLaunch(
            command=command,
            nodes=nodes if plan.outlives_nodes else (),
            signal_command=["scancel", f"--signal={name}", job.id] if name else ["true"],
            unset=foreign_variables(job.options, plan.srun_options),
            # this is the batch host, the first node; a taken port, or a lost race for it, is another in the next job
            environment={"MASTER_ADDR": self._resolvable(nodes[0]), "MASTER_PORT": str(free_port(""))},
        )

    def _resolvable(self, node: str) -> str:
        """Return the node's name or, if it does not resolve here, the address that Slurm uses."""
        try:
            socket.getaddrinfo(node, None)
        except OSError:
            with contextlib.suppress(SchedulerError):
                return next(iter(self._once(["sinfo", "--noheader", f"--nodes={node}", "--format=%o"]).split()), node)
        return node

    def default_options(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        with contextlib.suppress(SchedulerError):
            found["partition"] = next(row["PartitionName"] for row in self.partitions() if row.get("Default") == "YES")
        with contextlib.suppress(SchedulerError, StopIteration):
            show, me = ["sacctmgr", "--noheader", "--parsable2", "show"], user_name(os.getuid())
            found["account"] = next(iter(self._once([*show, "user", me, "format=DefaultAccount"]).split()))
            where = [f"user={me}", f"account={found['account']}", "format=DefaultQOS"]
            found["qos"] = (self._once([*show, "association", *where]).split() or ["normal"])[0]
        return found

    def agent_command(self, plan: Plan, *, nodes: int, cpus_per_task: str) -> list[str]:
        """Return the command prefix that starts a program once per node, with the processors of all its ranks."""
        # without --ntasks srun takes the job's number of ranks from the environment
        tasks = [f"--ntasks={nodes}", "--ntasks-per-node=1"]
        cpus = f"--cpus-per-task={int(cpus_per_task) * plan.ntasks_per_node}"
        return [*_SRUN, f"--nodes={nodes}", *tasks, cpus, *plan.srun_options]

    def single_task_command(self, plan: Plan, *, cpus_per_task: str) -> list[str]:
        one = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={cpus_per_task}"]
        return ["srun", "--export=ALL", *one, *plan.srun_options]

    def partitions(self) -> list[dict[str, str]]:
        """Return the fields of every partition, as `scontrol show partition` prints them. Raises SchedulerError."""
        text = self.ask(["scontrol", "show", "partition", "--oneliner"])
        rows = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in text.splitlines()]
        return [row for row in rows if "PartitionName" in row]

    def live_ids(self) -> set[str]:
        """Return ids of all queued and running jobs of all users; an array element is `12_3`."""
        return set(self.ask(["squeue", "--noheader", "--array", "--format=%i"]).split())

    def max_array_size(self) -> int:
        """Return the maximum number of elements of a job array; 0 if the cluster accepts no arrays."""
        config = self.ask(["scontrol", "show", "config"])
        pattern = r"^MaxArraySize\s*=\s*(\d+)|^SchedulerParameters\s*=.*\bmax_array_tasks=(\d+)"
        limits = re.findall(pattern, config, re.M)
        return min((int(limit) for pair in limits for limit in pair if limit), default=1001)  # Slurm's own default

    def kill_wait(self) -> float:
        """Return the seconds from SIGTERM to SIGKILL at the end of a job."""
        found = re.search(r"^KillWait\s*=\s*(\d+)", self.ask(["scontrol", "show", "config"]), re.M)
        return float(found[1]) if found else 30.0


SCHEDULER = Slurm


_SRUN = ["srun", "--kill-on-bad-exit=1", "--export=ALL"]
_NO_RESOURCES = ["--cpus-per-task=1", "--cpu-bind=none", "--mem=0", "--gres=none", "--input=none", "--quiet"]


def _reservation_flags(fields: Mapping[str, str]) -> set[str]:
    return set(fields.get("Flags", "").split(","))


def _step_beside(job_id: str, *, nodes: int) -> list[str]:
    """Return the srun command for one task per node that takes no resources from the other steps of a running job."""
    return ["srun", f"--jobid={job_id}", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", *_NO_RESOURCES]


def whole_job_command(srun_options: Sequence[str]) -> list[str]:
    """Return the command prefix for one task with all processors of its job, which srun would bind to fewer."""
    return ["srun", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--export=ALL", *srun_options]


def escape_file_pattern(path: str) -> str:
    """Escape a path for a Slurm file name pattern, in which `%` begins a field."""
    if "\n" in path:
        raise ConfigError("a path with a line break cannot stand in a job script", where=repr(path))
    return path.replace("%", "%%")


def jobs_by_name(names: Sequence[str], *, patience: float) -> dict[str, list[Job]]:
    """Return the queued and running jobs of all users, by job name. Raises SchedulerError."""
    found: dict[str, list[Job]] = {name: [] for name in names}
    if not names:
        return found
    command = ["squeue", "--noheader", f"--name={','.join(sorted(found))}", "--format=%i|%T|%r|%j"]
    text = Slurm(patience=patience).ask(command)
    for line in text.splitlines():
        job_id, state, reason, name = (*line.split("|", 3), "", "", "")[:4]
        if name in found:
            job = Job(id=job_id, name=name, state=state)
            found[name].append(replace(job, reason=reason) if job.waits and reason != "None" else job)
    return found


FALLBACK_OPTIONS = ("partition", "account", "qos", "reservation", "constraint", "exclude")
"""Options of the chain's jobs that its fallback job always gets: where it may run, and who pays."""
TIME_OPTIONS = ("time", "time-min", "begin", "deadline")
"""Options of the chain's jobs that the fallback job never gets."""


class SlurmFallbackJobs(FallbackJobs):
    """Slurm jobs that start only if another job fails: `--dependency=afternotok`.

    Measured on Slurm 22.05: such a job starts about a second after the other job failed, was killed, or was cancelled,
    even while queued. It keeps waiting while Slurm requeues the other job after the loss of its node. Slurm cancels it
    when the other job ends with exit code 0. Its comment holds the other job, since Slurm forgets the dependency at its
    start.
    """

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm

    def live(self, name: str, *, anyone: bool = False) -> list[Job]:
        return self._slurm.jobs_named(name, anyone=anyone)

    def queue(
        self, script: Path, *, name: str, order: FallbackOrder, options: Mapping[str, str | None], limit: int
    ) -> str:
        limited = f"--time={format_time(limit)}"
        first = [f"--job-name={name}", f"--dependency=afternotok:{order.job_id}", "--kill-on-invalid-dep=yes", limited]
        small = _option_words({option: options[option] for option in FALLBACK_OPTIONS if options.get(option)})
        whole = _option_words({option: value for option, value in options.items() if option not in TIME_OPTIONS})
        try:  # sbatch queues a job that no partition or site ever lets start
            # on Slurm 26.05 `sbatch --test-only` does not say that a partition requires several nodes
            taken = chosen_partitions(self._slurm.partitions(), options.get("partition"))
            if taken and all(int(row.get("MinNodes") or 1) > 1 for row in taken):
                raise SchedulerError("a job of one node never starts in its partition")
            self._slurm.order(["sbatch", "--test-only", limited, *small, str(script)])
            return self._slurm.submit_once([*first, *small, str(script)], name=name, comment=_order_comment(order))
        except NoAnswerError:
            raise
        except SchedulerError:  # a site may require GPUs or several nodes for every job
            return self._slurm.submit_once([*first, *whole, str(script)], name=name, comment=_order_comment(order))

    def move(self, job_id: str, order: FallbackOrder) -> None:
        self._slurm.update_job(job_id, f"Dependency=afternotok:{order.job_id}", f"Comment={_order_comment(order)}")

    def order(self, job_id: str) -> FallbackOrder:
        text = self._slurm.ask(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%k"]).strip()
        found = _ORDER_COMMENT.fullmatch(text)
        if found is None:
            raise SchedulerError(f"the comment of job {job_id} does not say which job it stands behind: {text!r}")
        return FallbackOrder(job_id=found[1], failed_begins=int(found[2]))

    def count_failed_begins(self, job_id: str, count: int, nodes: str) -> None:
        self._slurm.update_job(job_id, f"Comment={BEGIN_FAILED_COMMENT}{count}@{nodes}")


def _option_words(options: Mapping[str, str | None]) -> list[str]:
    return [f"--{option}" if value is None else f"--{option}={value}" for option, value in options.items()]


_ORDER_COMMENT = re.compile(rf"{COMMENT_PREFIX}starts-only-if-job=(\d+)-fails,failed-begins=(\d+)")


def _order_comment(order: FallbackOrder) -> str:
    return f"{COMMENT_PREFIX}starts-only-if-job={order.job_id}-fails,failed-begins={order.failed_begins}"
