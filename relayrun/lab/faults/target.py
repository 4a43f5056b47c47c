"""The target of a fault: a running chain and its cluster, signals to its processes, and wrappers of its commands."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from relayrun import places
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import InputError, RelayrunError, SchedulerError
from relayrun.files import read_json_lines
from relayrun.lab.faults import processes

TEST_CLUSTER_SCRIPT = "scripts/tools/test_cluster.sh"
CONTROL_SECONDS = 400
"""Time limit for the start or stop of a daemon."""
POLL_SECONDS = 0.1
"""Interval between two checks of files."""
WAIT_SECONDS = 600.0
"""Time limit of a wait: a start takes a minute on a busy machine."""


class FaultNotInjected(RelayrunError):
    """A fault could not be injected, so its effect is unknown."""


@dataclass(kw_only=True)
class ClusterUnderTest:
    """A running chain and its cluster, as far as a fault can reach them."""

    run: Run
    commands: Path
    """Folder with the wrappers of `Fault.commands` and their marker."""
    slurm: Slurm
    signals: SignalSender
    control: TestClusterControl | None = None
    """Rights over a test cluster; None on any other cluster."""
    patience: float = 1.0
    """Factor on the seconds of waits."""
    queue_seconds: float = 3600.0
    """Time that a job may wait in the queue, not counted in other waits."""
    own_jobs: list[str] = field(default_factory=list)
    """Ids of jobs that the fault itself queued."""
    lost_nodes: list[str] = field(default_factory=list)
    """Nodes whose daemons the fault has stopped."""

    def wait(self, condition: Callable[[], object], *, what: str = "what the fault needs") -> None:
        """Wait until the condition holds. Raises FaultNotInjected after the time limit. Time during which all jobs of
        the chain are pending does not count."""
        limit, queued = WAIT_SECONDS * self.patience, 0.0
        begin = time.monotonic()
        while not condition():
            if time.monotonic() - begin - queued > limit:
                if queued > self.queue_seconds or not self._all_wait():
                    raise FaultNotInjected(f"{what}: not within {limit:.0f} s", where=self.run.path)
                queued += limit
            time.sleep(POLL_SECONDS)

    def wait_iteration(self, iteration: int, *, attempt: int = 1) -> None:
        """Wait until the attempt has done this iteration."""
        metrics = self.run.attempt(attempt).metrics
        self.wait(
            lambda: any(line["iteration"] >= iteration for line in read_json_lines(metrics)),
            what=f"iteration {iteration} of attempt {attempt}",
        )

    def require(self, holds: object, words: str) -> None:
        """Raise FaultNotInjected with these words if a condition is false."""
        if not holds:
            raise FaultNotInjected(words, where=self.run.path)

    def signal(self, role: str, number: signal.Signals, *only: int) -> None:
        """Signal the running job's `rank`s (all, or those in `only`), `batch` script or supervisor's `watch`."""
        reached = self.signals.signal(self.run, self.job_id(), role, number, only)
        names = " ".join(map(str, [role, *only]))
        self.require(reached, f"{names}: no such process was found on the nodes of the job")

    def jobs(self) -> dict[str, str]:
        """Return the states of the chain's pending and running jobs by id."""
        return {job.id: job.state for job in self.slurm.jobs(Plan.load(self.run))}

    def job_id(self) -> str:
        """Return the running job's id, from the newest attempt's record or else from Slurm. Raises FaultNotInjected."""
        numbers = self.run.attempt_numbers()
        newest = self.run.attempt(numbers[-1]) if numbers else None
        begin = newest.read_begin() if newest is not None and not newest.end.exists() else None
        if begin is not None:
            return begin.job_id
        running = [job for job, state in self.jobs().items() if state == "RUNNING"]
        self.require(running, "no job of the chain runs")
        return running[0]

    def waiting_jobs(self) -> list[str]:
        """Return the ids of the chain's pending jobs."""
        return [job for job, state in self.jobs().items() if state == "PENDING"]

    def waiting_job(self) -> str:
        """Return the id of the only pending job. Raises FaultNotInjected if there is not exactly one."""
        waiting = self.waiting_jobs()
        self.require(len(waiting) == 1, f"{len(waiting)} jobs of the chain wait, not one")
        return waiting[0]

    def ask(self, *words: str) -> str:
        """Run a command of Slurm that changes nothing; return its output."""
        return self.slurm.ask(words)

    def order(self, *words: str) -> str:
        """Run a command of Slurm that changes something; return its output."""
        return self.slurm.order(words)

    def start_successor_now(self) -> None:
        """Start a delayed successor now."""

        def delayed() -> list[str]:
            return [job for job in self.waiting_jobs() if "Reason=BeginTime" in self._shown(job)]

        self.wait(lambda: delayed() or not self.jobs(), what="a job that waits for its time")
        for job in delayed():
            # Slurm kills a requeued job that starts within the second of its requeue: its credential is revoked
            start = "now" if "Restarts=0" in self._shown(job) else "now+2"
            try:
                self.order("scontrol", "update", f"JobId={job}", f"StartTime={start}")
            except SchedulerError:  # the job has started
                continue

    def queue_job(self, *options: str) -> None:
        """Queue a job of the fault itself, with these options of sbatch."""
        self.own_jobs.append(self.order("sbatch", "--parsable", *options).strip().split(";")[0])

    def kill_node(self) -> None:
        """Stop the daemon of the node that rank 1 runs on."""
        self._lose(self.slurm.nodes.expand(self._job(self.job_id()).nodes)[1])

    def lose_node(self) -> None:
        """Kill the daemon of the batch script's node, the batch script, and all its processes."""
        job_id = self.job_id()
        self._lose(self._job(job_id).batch_host)
        pids = [pid for pid, _, _ in processes.job_processes(job_id)]
        for pid in {*pids, *processes.step_daemons(pids)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _lose(self, node: str) -> None:
        self._cluster.kill_node(node)
        self.lost_nodes.append(node)

    def bring_back_nodes(self) -> None:
        """Restart the stopped daemons, and resume their nodes. Raises SchedulerError."""
        for node in self.lost_nodes:
            self._cluster.start_node(node)
            with suppress(SchedulerError):  # the node may be up
                self.order("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.lost_nodes.clear()

    @contextmanager
    def slow_epilogs(self) -> Iterator[None]:
        """Keep ended jobs COMPLETING inside the block."""
        slow = self.commands / "slow"
        slow.touch()
        epilog = write_wrapper(self.commands, "epilog", f'while [[ -e "{slow}" ]]; do sleep 0.5; done')
        before = self._cluster.conf.read_text(encoding="utf-8")
        self._cluster.conf.write_text(f"{before}Epilog={epilog}\n", encoding="utf-8")
        self.order("scontrol", "reconfigure")
        try:
            yield
        finally:
            slow.unlink()
            self._cluster.conf.write_text(before, encoding="utf-8")
            self.order("scontrol", "reconfigure")

    def remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.run.path)], check=True)

    def stop_controller(self, seconds: float) -> None:
        """Stop the controller for some seconds; return when it is back."""
        self._cluster.stop_ctld()
        try:
            time.sleep(seconds)
        finally:
            self._cluster.start_ctld()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the ranks and their slurmstepd with SIGSTOP inside the block. Needs root."""
        if not isinstance(self.signals, LocalSignalSender):
            raise FaultNotInjected("slurmstepd is out of reach", where=self.run.path)
        ranks = list(self.signals.rank_pids(self.run, self.job_id()).values())
        daemons = processes.step_daemons(ranks)
        for pid in (*daemons, *ranks):
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in (*ranks, *daemons):
                os.kill(pid, signal.SIGCONT)

    @property
    def _cluster(self) -> TestClusterControl:
        if self.control is None:
            raise FaultNotInjected("nothing here has rights over the cluster", where=self.run.path)
        return self.control

    def _job(self, job_id: str) -> Job:
        job = self.slurm.query(job_id)
        if job is None:
            raise FaultNotInjected(f"job {job_id} has gone", where=self.run.path)
        return job

    def _shown(self, job: str) -> str:
        return self.ask("scontrol", "show", "job", "--oneliner", job)

    def _all_wait(self) -> bool:
        try:
            states = set(self.jobs().values())
        except SchedulerError:
            return False
        return states == {"PENDING"}


class SignalSender(Protocol):
    """Sends signals to the processes of a job."""

    def signal(self, run: Run, job_id: str, role: str, number: signal.Signals, only: Sequence[int] = ()) -> list[str]:
        """Signal processes of a role of `processes`, for ranks those in `only` or all; return the reached ones. Raises
        SchedulerError if the job cannot be reached."""


class StepSignalSender:
    """Signals through a job step beside the ranks, which the owner of the job may start."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm

    def signal(self, run: Run, job_id: str, role: str, number: signal.Signals, only: Sequence[int] = ()) -> list[str]:
        job = self._slurm.query(job_id)
        if job is None:
            raise SchedulerError(f"Slurm does not know job {job_id} any more")
        program = [Plan.load(run).host_python, str(Path(processes.__file__).resolve())]
        arguments = [str(run.path), job_id, role, number.name, *map(str, only)]
        said = self._slurm.run_beside(job_id, [*program, *arguments], nodes=1 if role != "rank" else job.num_nodes)
        return [line.rpartition(" ")[0] for line in said.splitlines()]


class LocalSignalSender:
    """Signals directly: all nodes of the cluster are this machine."""

    def signal(self, run: Run, job_id: str, role: str, number: signal.Signals, only: Sequence[int] = ()) -> list[str]:
        if role == "rank":
            named = processes.named_ranks(self.rank_pids(run, job_id), only)
        else:
            named = processes.role_processes(role, str(run.path), job_id)
        return [name for name, _ in processes.signal_processes(named, number)]

    def rank_pids(self, run: Run, job_id: str) -> dict[int, int]:
        return processes.rank_processes(str(run.path), job_id)


class TestClusterControl:
    """Rights over the test cluster in a folder, whose nodes are all this machine."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError if the folder holds no test cluster."""
        self._folder = folder.expanduser().resolve()
        self.conf = self._folder / "etc" / "slurm.conf"
        if not self.conf.is_file() or not (self._folder / "nodes").is_file():
            hint = "scripts/tools/test_cluster.sh up starts one; on a cluster of others leave --test-cluster out"
            raise InputError("no test cluster was started here", where=self._folder, hint=hint)

    def kill_node(self, node: str) -> None:
        """Kill the node's slurmd; processes of its jobs continue."""
        self._script("kill-node", node)

    def stop_ctld(self) -> None:
        """Stop the controller; running steps continue."""
        self._script("stop-ctld")

    def start_ctld(self) -> None:
        """Start the controller with its old queue; return when it answers."""
        self._script("start-ctld")

    def start_node(self, node: str) -> None:
        self._script("start-node", node)

    def _script(self, verb: str, *arguments: str) -> None:
        command = [str(places.shared_file(TEST_CLUSTER_SCRIPT)), verb, str(self._folder), *arguments]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CONTROL_SECONDS, check=False
        )
        if done.returncode != 0:
            raise SchedulerError(f"{Path(TEST_CLUSTER_SCRIPT).name} {verb}: {done.stderr.strip()}", where=self._folder)


def write_wrappers(commands: Mapping[str, str], folder: Path, *, search: str, real: Mapping[str, str]) -> None:
    """Write the wrappers of a fault.

    A wrapper acts only if its parent process belongs to a job: the supervisor or the batch script. `search`: a PATH for
    the commands; `real`: other names to look up, by command. Raises InputError if a command is missing.
    """
    for name, text in commands.items():
        found = shutil.which(real.get(name, name), path=search)
        if found is None:
            raise InputError(f"{real.get(name, name)} is not on PATH")
        names = f'real="{found}" provoked="{wrapper_marker(folder)}"'
        inside = f"if grep -qz '^SLURM_JOB_ID=' /proc/${{PPID}}/environ; then\n{text.strip()}\nfi"
        write_wrapper(folder, name, f'{names}\n{inside}\nexec "${{real}}" "$@"')


def write_wrapper(folder: Path, name: str, text: str) -> Path:
    """Write a Bash script `folder/bin/NAME`, and return its path."""
    path = folder / "bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def wrapper_marker(folder: Path) -> Path:
    """Return the file that a wrapper creates when it does harm."""
    return folder / "provoked"
