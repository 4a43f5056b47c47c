"""The scheduler of a chain through Slurm's commands, and the jobs of many chains by one question."""

from __future__ import annotations

import contextlib
import math
import os
import pwd
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler import slurm_commands
from relayrun.control.scheduler.base import (
    CONTROLLER_PATIENCE,
    FallbackJobs,
    Job,
    MinimumNodes,
    NodeControl,
    RankLaunch,
    clean_environment,
)
from relayrun.control.scheduler.slurm_commands import (
    BEGIN_FAILED_COMMENT,
    COMMENT_PREFIX,
    STOPPED_BY_COMMENT,
    NoAnswerError,
    NotInstalledError,
    is_job_text_ambiguous,
    parse_job,
    parse_timestamp,
)
from relayrun.control.scheduler.slurm_fallback import SlurmFallbackJobs
from relayrun.control.scheduler.slurm_nodes import (
    NODES_TEST_SECONDS,
    SlurmNodes,
    fewer_nodes_changes,
    says_too_few_nodes,
)
from relayrun.errors import ConfigError, SchedulerError
from relayrun.slurmtime import format_time

COMPLETING_SECONDS = 30.0
"""Seconds for which `cancelled` waits until a completing job has its final state."""

LASTING_RESERVATIONS = {"HOURLY", "DAILY", "WEEKDAY", "WEEKEND", "WEEKLY", "NO_HOLD_JOBS_AFTER_END"}
"""Flags of a reservation after whose end pending jobs still start: it repeats, or its jobs go on without it."""

COMMAND_SECONDS = 120.0
"""Time limit of one command. A command that hangs would hold the nodes to the end of the job."""


class Slurm:
    """Slurm through its commands, each of which has a time limit.

    For `patience` seconds a question is repeated after any error, and an order if the controller did not answer.
    """

    def __init__(self, *, patience: float = CONTROLLER_PATIENCE, pause: float = 2.0) -> None:
        self._patience = patience
        self._pause = pause

    def current_job_id(self) -> str:
        job_id = os.environ.get("SLURM_JOB_ID")
        if not job_id:
            raise SchedulerError("not inside a Slurm job: SLURM_JOB_ID is not set")
        return job_id

    @property
    def nodes(self) -> NodeControl:
        return SlurmNodes(self, Slurm(patience=min(self._patience, NODES_TEST_SECONDS), pause=self._pause))

    @property
    def fallback_jobs(self) -> FallbackJobs:
        return SlurmFallbackJobs(self)

    def submit_first(self, plan: Plan, script: Path, evaluation: Path | None = None) -> str:
        Path(plan.log_folder).mkdir(parents=True, exist_ok=True)  # without this folder a job dies without a log
        try:
            self.test(script)
        except SchedulerError as error:
            if plan.spare_nodes and says_too_few_nodes(error):
                error.hint = (
                    f"job.nodes and job.spare_nodes ask for {plan.nodes_of_job} nodes; where so many are not up, "
                    "set job.spare_nodes to fewer"
                )
            raise
        try:
            if evaluation is not None:
                self.test(evaluation)
        except SchedulerError as error:  # else the results would be missing and only a log would say why
            raise SchedulerError(f"the job of an evaluation: {error.message}", hint="change evaluation.job") from None
        return self.submit(plan, script, options={})

    def test(self, script: Path, options: Mapping[str, str] | None = None) -> str:
        """Ask Slurm whether it would accept the script with these options of sbatch; nothing is queued.

        Returns Slurm's message. Raises SchedulerError.
        """
        further = [f"--{name}={value}" for name, value in (options or {}).items()]
        return self.order(["sbatch", "--test-only", *further, str(script)], words=True)

    def partitions(self) -> list[dict[str, str]]:
        """Return the fields of every partition, as `scontrol show partition` prints them. Raises SchedulerError."""
        text = self.ask(["scontrol", "show", "partition", "--oneliner"])
        rows = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in text.splitlines()]
        return [row for row in rows if "PartitionName" in row]

    def adopt(self, job: Job, plan: Plan) -> None:
        if job.name != plan.job_name:  # from here on the job is a singleton of its chain
            self.order(["scontrol", "update", f"JobId={job.id}", f"JobName={plan.job_name}"])
        if plan.auto_requeue != job.requeue:  # Slurm requeues a job that loses its node, until a successor is queued
            try:
                self.order(["scontrol", "update", f"JobId={job.id}", f"Requeue={int(plan.auto_requeue)}"])
            except SchedulerError:  # a site may forbid it; only the mode `requeue` needs it
                if plan.mode == "requeue":
                    raise

    def submit(self, plan: Plan, script: Path, *, options: Mapping[str, str], delay: int = 0) -> str:
        command = ["--dependency=singleton"]
        if delay:
            command.append(f"--begin=now+{delay}")
        again = slurm_commands.gpu_options_like_script(options, plan.sbatch_options)
        command += [f"--{name}={value}" for name, value in again.items()]
        # not `--`: sbatch takes the rest as the script and its arguments anyway
        return self.submit_once([*command, str(script)], name=plan.job_name)

    def submit_auxiliary(self, plan: Plan, script: Path, *, name: str, arguments: Sequence[str], limit: int) -> str:
        return self.submit_once(
            [f"--job-name={name}", f"--time={format_time(limit)}", str(script), *arguments], name=name
        )

    def submit_once(self, arguments: Sequence[str], *, name: str, comment: str | None = None) -> str:
        """Queue one job exactly once: sbatch may queue a job and report an error all the same.

        So each job carries a unique word in its comment, and a retry first looks for it. `name` is the job's name,
        `comment` a comment that is already unique. Returns the job's id; raises SchedulerError.
        """
        comment = comment or f"{COMMENT_PREFIX}{secrets.token_hex(6)}"
        command = ["sbatch", "--parsable", f"--comment={comment}", *arguments]
        deadline, pause = time.monotonic() + self._patience, self._pause
        while True:
            try:
                job_id = self._once(command).strip().split(";")[0]
                if not job_id.isdecimal():
                    raise SchedulerError(f"sbatch: no job id in its answer {job_id!r}")
                return job_id
            except SchedulerError as error:
                rows = self.ask(["squeue", "--noheader", "--me", f"--name={name}", "--format=%i|%k"]).splitlines()
                found = [row.partition("|")[0] for row in rows if row.partition("|")[2] == comment]
                if found:
                    return found[0]
                if not isinstance(error, NoAnswerError) or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 30.0)

    def named(self, name: str) -> str | None:
        found = self.ask(["squeue", "--noheader", "--me", f"--name={name}", "--format=%i"]).split()
        return found[0] if found else None

    def cancel(self, job_id: str) -> None:
        job = self.query(job_id)
        if job is not None and job.live:
            self.order(["scancel", job_id])

    def note_stop(self, job_id: str, user: str) -> None:
        self.order(["scontrol", "update", f"JobId={job_id}", f"Comment={STOPPED_BY_COMMENT}{user}"])

    def cancelled_by(self, job_id: str) -> str | None:
        try:
            command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}", "--format=State"]
            found = re.search(r"CANCELLED by (\d+)", self._once(command))
        except SchedulerError:  # no accounting
            return None
        if found is None:
            return None
        try:
            return pwd.getpwuid(int(found[1])).pw_name
        except KeyError:
            return found[1]

    def postpone(self, job_id: str, *, delay: int) -> None:
        self.order(["scontrol", "update", f"JobId={job_id}", f"StartTime=now+{delay}"])

    def settle(self, job: Job, *, followed: bool, log: str | None) -> None:
        changes = ["Requeue=0"] if followed else []
        if job.begin_failed and not followed:  # a requeued job must know which nodes it excludes for that reason
            changes.append(f"Comment={BEGIN_FAILED_COMMENT}0@{job.begin_failed_on}")
        else:  # Slurm's StdOut is /dev/null: the script opens its log itself
            changes.append(f"Comment={COMMENT_PREFIX}log={log}" if log else "Comment=")
        self.order(["scontrol", "update", f"JobId={job.id}", *changes])

    def requeue(self, job_id: str, *, delay: int = 0, few: MinimumNodes | None = None) -> None:
        job = self._seen_once(job_id)
        if job is None or not job.requeue:
            with contextlib.suppress(SchedulerError):  # refused while the job ends; by then it is set
                self.order(["scontrol", "update", f"JobId={job_id}", "Requeue=1"])
        later = [f"StartTime=now+{delay}"] * bool(delay) + self._nodes_come_back(job)
        # separate updates, since a site may refuse one, but a single process: the requeue ends this job
        updates = [
            " ".join([f"update JobId={job_id}", *changes]) for changes in (later, fewer_nodes_changes(few)) if changes
        ]
        try:
            if updates:
                self.order(["scontrol"], [f"requeue {job_id}", *updates])
            else:
                self.order(["scontrol", "requeue", job_id])
        except SchedulerError as error:  # the guard or the batch script requeued it before
            if "pending execution" not in error.message:
                raise

    def _seen_once(self, job_id: str) -> Job | None:
        """Return the job, or None if Slurm does not report it. Asks once: only seconds may be left."""
        try:
            return parse_job(self._once(["scontrol", "show", "job", "--oneliner", job_id]))
        except (SchedulerError, KeyError):
            return None

    def _nodes_come_back(self, job: Job | None) -> list[str]:
        """Return the changes that allow a job whose `begin` worked the nodes where `begin` had failed before."""
        if job is None or not job.begin_failed_on:
            return []
        tried = set(job.begin_failed_on.split(","))
        shown = job.options.get("exclude")
        try:
            given = self._once(["scontrol", "show", "hostnames", shown]).split() if shown else []
        except SchedulerError:
            return []
        return [f"ExcNodeList={','.join(node for node in given if node not in tried)}", "Comment="]

    def guard(self, job_id: str, command: Sequence[str], *, log: Path) -> None:
        step = [*self._step_on_batch_host(job_id), f"--output={escape_file_pattern(str(log))}", "--export=ALL"]
        environment = clean_environment(os.environ)  # else srun takes the job's own options from it
        devnull = subprocess.DEVNULL
        try:  # it ends with the job
            subprocess.Popen([*step, *command], env=environment, stdin=devnull, stdout=devnull, stderr=devnull)
        except OSError as error:
            raise SchedulerError(f"srun: {error}") from None

    def run_beside(self, job_id: str, command: Sequence[str], *, nodes: int) -> str:
        """Run a program beside the ranks of a running job: on the batch host, or once on each of its nodes.

        Returns its output. Raises SchedulerError.
        """
        step = self._step_on_batch_host(job_id) if nodes == 1 else _step_beside(job_id, nodes=nodes)
        return self._once([*step, *command])

    def _step_on_batch_host(self, job_id: str) -> list[str]:
        """Return the srun command for one task on the batch host, by name: Slurm versions count a job's nodes
        differently.
        """
        job = self.query(job_id)
        if job is None or not job.batch_host:
            raise SchedulerError(f"Slurm does not say on which node the batch script of job {job_id} runs")
        return [*_step_beside(job_id, nodes=1), f"--nodelist={job.batch_host}"]

    def kill_wait(self) -> float:
        """Return the seconds from SIGTERM to SIGKILL at the end of a job."""
        found = re.search(r"^KillWait\s*=\s*(\d+)", self.ask(["scontrol", "show", "config"]), re.M)
        return float(found[1]) if found else 30.0

    def signal_ranks(self, job_id: str, number: signal.Signals) -> None:
        word = f"--signal={number.name.removeprefix('SIG')}"
        if number != signal.SIGKILL:
            self.order(["scancel", word, job_id])  # to all steps, but not to the batch script
            return
        # SIGKILL to a job cancels the job and its batch script, so each step gets it
        steps = self.ask(
            ["squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i"], answer="Invalid job id"
        ).split()
        for step in steps:
            if step.rpartition(".")[2].isdecimal():
                self.order(["scancel", word, step])

    def query(self, job_id: str) -> Job | None:
        try:
            text = self.ask(["scontrol", "show", "job", "--oneliner", job_id], answer="Invalid job id")
        except SchedulerError as error:
            if "Invalid job id" in error.message:
                return None
            raise
        name = None
        if is_job_text_ambiguous(text):  # the job's name contains text that looks like a field
            command = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%j"]
            name = self.ask(command, answer="Invalid job id").removesuffix("\n")
        return parse_job(text, name=name)

    def reservation_end(self, name: str, *, for_good: bool = False) -> float | None:
        try:
            text = self._once(["scontrol", "show", "reservation", "--oneliner", name])
        except SchedulerError:
            return None
        found = dict(re.findall(r"(\S+?)=(\S*)", text))
        flags = set(found.get("Flags", "").split(","))
        if for_good and flags & LASTING_RESERVATIONS:
            return math.inf
        if "FLEX" in flags:  # jobs may go on after its end
            return None
        return parse_timestamp(found.get("EndTime", ""))

    def cancelled(self, job_id: str, *, nodes: str) -> bool:
        job = self.query(job_id)
        if job_id == os.environ.get("SLURM_JOB_ID") and job is not None and job.state == "COMPLETING":
            # While its batch script, in which this runs, lives, a job that Slurm ends is COMPLETING, whatever
            # the cause. It was cancelled if it was neither its limit, nor a preemption, nor one of its nodes
            # (a lost one is no longer in its own list).
            return not job.at_limit and not job.preempted and not self._node_is_down(nodes)
        deadline = time.monotonic() + COMPLETING_SECONDS
        while job is not None and job.state == "COMPLETING" and time.monotonic() < deadline:
            time.sleep(1)  # a successor may start before Slurm has recorded the end of its predecessor
            job = self.query(job_id)
        return job is not None and job.state == "CANCELLED"

    def _node_is_down(self, nodes: str) -> bool:
        states = self.ask(["sinfo", "--noheader", f"--nodes={nodes}", "--format=%T"]).split()
        return any(state.rstrip("*").startswith(("down", "fail")) or state.endswith("*") for state in states)

    def live_ids(self) -> set[str]:
        """Return ids of all queued and running jobs of all users; an array element is `12_3`."""
        return set(self.ask(["squeue", "--noheader", "--array", "--format=%i"]).split())

    def max_array_size(self) -> int:
        """Return the maximum number of elements of a job array; 0 if the cluster accepts no arrays."""
        config = self.ask(["scontrol", "show", "config"])
        limits = re.findall(
            r"^MaxArraySize\s*=\s*(\d+)|^SchedulerParameters\s*=.*\bmax_array_tasks=(\d+)", config, re.M
        )
        return min((int(limit) for pair in limits for limit in pair if limit), default=1001)  # Slurm's own default

    def jobs(self, plan: Plan, *, anyone: bool = False) -> list[Job]:
        return self.jobs_named(plan.job_name, anyone=anyone)

    def jobs_named(self, name: str, *, anyone: bool = False) -> list[Job]:
        """Return the queued and running jobs with this name: this user's, or with `anyone` every user's. Raises
        SchedulerError.
        """
        whose = [] if anyone else ["--me"]
        text = self.ask(["squeue", "--noheader", *whose, f"--name={name}", "--format=%i|%j|%T"])
        rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
        return [Job(id=row[0], name=row[1], state=row[2]) for row in rows]

    def rank_launch(self, plan: Plan, job: Job, *, leave_signal: signal.Signals | None) -> RankLaunch:
        name = "" if leave_signal is None else leave_signal.name.removeprefix("SIG")
        cpus = job.options.get("cpus-per-task", str(plan.cpus_per_task))
        nodes = self.nodes.expand(job.nodes)
        # one port per job and requeue: jobs that share a node must not meet
        port = 20_000 + (int(job.id) + 7_001 * int(os.environ.get("SLURM_RESTART_COUNT") or 0)) % 20_000
        if plan.outlives_nodes:
            command = self.agent_command(plan, nodes=1, cpus_per_task=cpus)
            command.insert(1, "--overlap")  # else a step waits until another step ends
        elif plan.recovery == "node":
            command = self.agent_command(plan, nodes=job.num_nodes, cpus_per_task=cpus)
        else:
            command = self.every_task_command(plan, nodes=job.num_nodes, cpus_per_task=cpus)
        return RankLaunch(
            command=command,
            nodes=nodes if plan.outlives_nodes else (),
            signal_command=["scancel", f"--signal={name}", job.id] if name else ["true"],
            environment={"MASTER_ADDR": nodes[0], "MASTER_PORT": str(port)},
        )

    def every_task_command(self, plan: Plan, *, nodes: int, cpus_per_task: str) -> list[str]:
        """Return the command prefix that starts a program once per rank."""
        return [
            "srun",
            "--kill-on-bad-exit=1",
            "--export=ALL",
            f"--nodes={nodes}",
            f"--ntasks-per-node={plan.ntasks_per_node}",
            f"--cpus-per-task={cpus_per_task}",  # srun does not inherit it from sbatch
            *plan.srun_options,
        ]

    def agent_command(self, plan: Plan, *, nodes: int, cpus_per_task: str) -> list[str]:
        """Return the command prefix that starts a program once per node, with the processors of all its ranks."""
        return [
            "srun",
            "--kill-on-bad-exit=1",
            "--export=ALL",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",  # else srun takes the job's number of ranks from the environment
            "--ntasks-per-node=1",
            f"--cpus-per-task={int(cpus_per_task) * plan.ntasks_per_node}",
            *plan.srun_options,
        ]

    def single_task_command(self, plan: Plan, *, cpus_per_task: str) -> list[str]:
        # srun does not inherit --cpus-per-task from sbatch
        one = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={cpus_per_task}"]
        return ["srun", "--export=ALL", *one, *plan.srun_options]

    def ask(self, command: Sequence[str], *, answer: str = "") -> str:
        """Run a command that changes nothing and return its output.

        Any error is retried: no list of transient errors is complete. `answer`: an error that contains these words is
        an answer and is raised. Raises SchedulerError.
        """
        return self._run(command, again=lambda error: not (answer and answer in error.message))

    def order(self, command: Sequence[str], lines: Sequence[str] = (), *, words: bool = False) -> str:
        """Run a command that changes something, and may safely run twice; return its output.

        It is retried if the controller did not answer. Raises SchedulerError for a refusal. `lines`: orders for its
        standard input. `words`: also return its standard error.
        """
        return self._run(command, lines, words=words, again=lambda error: isinstance(error, NoAnswerError))

    def _run(
        self,
        command: Sequence[str],
        lines: Sequence[str] = (),
        *,
        again: Callable[[SchedulerError], bool],
        words: bool = False,
    ) -> str:
        deadline, pause = time.monotonic() + self._patience, self._pause
        while True:
            try:
                return self._once(command, lines, words=words)
            except NotInstalledError:
                raise
            except SchedulerError as error:
                if not again(error) or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 30.0)

    def _once(self, command: Sequence[str], lines: Sequence[str] = (), *, words: bool = False) -> str:
        seconds = min(COMMAND_SECONDS, max(10.0, self._patience))
        return slurm_commands.run_slurm_command(command, lines, seconds=seconds, words=words)


def _step_beside(job_id: str, *, nodes: int) -> list[str]:
    """Return the srun command for one task per node that takes no resources from the other steps of a running job."""
    return [
        "srun",
        f"--jobid={job_id}",
        "--overlap",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--cpus-per-task=1",
        "--cpu-bind=none",
        "--mem=0",
        "--gres=none",
        "--input=none",
        "--quiet",
    ]


def whole_job_command(srun_options: Sequence[str]) -> list[str]:
    """Return the command prefix for one task with all processors of its job, which srun would bind to fewer."""
    return ["srun", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--export=ALL", *srun_options]


def escape_file_pattern(path: str) -> str:
    """Escape a path for a Slurm file name pattern, in which `%` begins a field."""
    if "\n" in path:
        raise ConfigError("a path with a line break cannot stand in a job script", where=repr(path))
    return path.replace("%", "%%")


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job and its pending reason in Slurm's words; the reason is empty if the job does not wait."""

    job: Job
    reason: str


def jobs_by_name(names: Sequence[str], *, patience: float) -> dict[str, list[QueuedJob]]:
    """Return the queued and running jobs of all users, by job name.

    The question is repeated for `patience` seconds. Raises SchedulerError.
    """
    found: dict[str, list[QueuedJob]] = {name: [] for name in names}
    if not names:
        return found
    text = Slurm(patience=patience).ask(
        ["squeue", "--noheader", f"--name={','.join(sorted(found))}", "--format=%i|%T|%r|%j"]
    )
    for line in text.splitlines():
        job_id, state, reason, name = (*line.split("|", 3), "", "", "")[:4]
        if name in found:
            job = Job(id=job_id, name=name, state=state)
            found[name].append(QueuedJob(job=job, reason=reason if job.waits and reason != "None" else ""))
    return found
