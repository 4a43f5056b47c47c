"""The target of a fault: a running chain and its cluster, signals to its processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import RelayrunError, SchedulerError
from relayrun.files import read_json_lines
from relayrun.lab.faults import processes

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
    slurm: Slurm
    patience: float = 1.0
    """Factor on the seconds of waits."""
    queue_seconds: float = 3600.0
    """Time that a job may wait in the queue, not counted in other waits."""

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

    def wait_begin(self) -> None:
        """Wait until the first attempt has begun, or the chain has ended before. Raises FaultNotInjected."""
        begin = self.run.attempt(1).begin
        self.wait(lambda: begin.exists() or self.chain_has_ended(), what="the first attempt's begin")

    def chain_has_ended(self) -> bool:
        """True if the chain has no pending or running job, fallback jobs included."""
        if self.jobs():
            return False
        return not self.slurm.fallback_jobs.live(Plan.load(self.run).fallback_job_name) and not self.jobs()

    def require(self, holds: object, words: str) -> None:
        """Raise FaultNotInjected with these words if a condition is false."""
        if not holds:
            raise FaultNotInjected(words, where=self.run.path)

    def send_signal(self, job_id: str, role: str, number: signal.Signals, only: Sequence[int]) -> list[str]:
        """Signal processes of a role of `processes`, for ranks those in `only` or all; return the reached ones. It is a
        job step beside the ranks, which the owner of the job may start. Raises SchedulerError."""
        job = self.slurm.query(job_id)
        if job is None:
            raise SchedulerError(f"Slurm does not know job {job_id} any more")
        program = [Plan.load(self.run).host_python, str(Path(processes.__file__).resolve())]
        arguments = [str(self.run.path), job_id, role, number.name, *map(str, only)]
        said = self.slurm.run_beside(job_id, [*program, *arguments], nodes=1 if role != "rank" else job.num_nodes)
        return [line.rpartition(" ")[0] for line in said.splitlines()]

    def signal(self, role: str, number: signal.Signals, *only: int) -> None:
        """Signal the running job's `rank`s (all, or those in `only`), `batch` script or supervisor's `watch`."""
        reached = self.send_signal(self.job_id(), role, number, only)
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

    def _shown(self, job: str) -> str:
        return self.ask("scontrol", "show", "job", "--oneliner", job)

    def _all_wait(self) -> bool:
        try:
            states = set(self.jobs().values())
        except SchedulerError:
            return False
        return states == {"PENDING"}
