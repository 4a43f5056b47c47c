"""How the drill reaches the processes of a running job: on its nodes, or on this machine where that has all of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import SchedulerError
from relayrun.lab.faults import processes


class SignalSender(Protocol):
    """Sends signals to the processes of a job."""

    def signal(self, run: Run, job_id: str, role: str, number: signal.Signals, only: Sequence[int] = ()) -> list[str]:
        """Signal what plays a role of `processes.ROLES`, of the ranks those in `only` or all; return who got it.

        Raises SchedulerError where the job cannot be reached.
        """


class StepSignalSender:
    """Through a step of the job, beside its ranks, as whoever owns the job may start one."""

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
    """Directly: all nodes of the cluster are this machine."""

    def signal(self, run: Run, job_id: str, role: str, number: signal.Signals, only: Sequence[int] = ()) -> list[str]:
        if role == "rank":
            found = {rank: pid for rank, pid in self.rank_pids(run, job_id).items() if not only or rank in only}
            named = [(f"rank {rank}", pid) for rank, pid in found.items()]
        else:
            pids = (
                processes.batch_script_processes(job_id)
                if role == "batch"
                else processes.watch_processes(str(run.path), job_id)
            )
            named = [(role, pid) for pid in pids]
        reached = []
        for name, pid in named:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                reached.append(name)
        return reached

    def rank_pids(self, run: Run, job_id: str) -> dict[int, int]:
        """Process ids of the ranks by rank."""
        return processes.rank_processes(str(run.path), job_id)
