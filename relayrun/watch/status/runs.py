"""Status of many runs with one query of the scheduler for the jobs of all chains.

A chain without jobs needs a query of its own, once: the end of its last job does not change until the next submit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from relayrun.config.sections.batch_systems import batch_system
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, is_stopped
from relayrun.control.scheduler import slurm
from relayrun.control.scheduler.base import Job
from relayrun.errors import RunDirError, SchedulerError
from relayrun.watch.status import queue
from relayrun.watch.status.cron_check_record import FolderCache
from relayrun.watch.status.queue import QueueStatus
from relayrun.watch.status.summary import DamagedRun, RunSummary, summarize_run

if TYPE_CHECKING:
    from relayrun.watch.status.run_status import RunStatus

S = TypeVar("S", bound=RunSummary)


class RunsWatcher:
    """Keeps answers between two calls that need not be asked again."""

    def __init__(self, *, without_jobs: Collection[Path] = ()) -> None:
        """`without_jobs`: run directories whose end the caller knows, if they have no job now."""
        self._without_jobs = without_jobs
        self._jobs: dict[str, list[Job]] = {}
        self._error: str | None = None
        self._quiet: dict[Path, tuple[float, QueueStatus]] = {}
        self.plans: dict[Path, Plan] = {}
        """Plans of the current call."""

    def statuses(self, runs: Sequence[Run], *, now: float) -> list[RunStatus | DamagedRun]:
        """Return the status of every run, newest first, damaged runs last. `now`: seconds since 1970."""
        from relayrun.watch.status import run_status  # a table of many runs does not need it

        return self._read_each(runs, run_status.read_run_status, now=now, brief=False)

    def summaries(self, runs: Sequence[Run], *, now: float) -> list[RunSummary | DamagedRun]:
        return self._read_each(runs, summarize_run, now=now, brief=True)

    def _read_each(
        self, runs: Sequence[Run], read: Callable[..., S], *, now: float, brief: bool
    ) -> list[S | DamagedRun]:
        """Call `read` for every run with its jobs: none for a stopped run, and Slurm's silence once it was silent."""
        self._query_chains(runs)
        found: list[S] = []
        damaged: list[DamagedRun] = []
        cache = FolderCache()
        silent: QueueStatus | None = None
        for run in runs:
            try:
                plan = self.plans.get(run.path) or Plan.load(run)
                shared = batch_system(plan.scheduler).slurm
                if is_stopped(run):
                    answer = QueueStatus()
                elif silent is not None and shared:
                    answer = silent
                else:
                    answer = self._queue(run, plan, brief=brief)
                    silent = answer if shared and answer.error is not None else silent
                found.append(read(run, answer, now=now, plan=plan, cache=cache))
            except (RunDirError, OSError) as error:  # a damaged run must not hide the others
                damaged.append(DamagedRun(path=str(run.path), error=getattr(error, "message", None) or str(error)))
        return [*sorted(found, key=lambda status: -status.updated), *damaged]

    def _query_chains(self, runs: Sequence[Run]) -> None:
        self.plans = {}
        for run in runs:
            with contextlib.suppress(RunDirError, OSError):
                self.plans[run.path] = Plan.load(run)
        live = [plan for run in runs if (plan := self.plans.get(run.path)) is not None and not is_stopped(run)]
        names = [plan.job_name for plan in live if batch_system(plan.scheduler).slurm]
        try:
            self._jobs, self._error = slurm.jobs_by_name(names, patience=queue.RETRY_SECONDS), None
        except SchedulerError as error:
            self._jobs, self._error = {}, error.message

    def _queue(self, run: Run, plan: Plan, *, brief: bool) -> QueueStatus:
        if not batch_system(plan.scheduler).slurm:
            return queue.query_queue(run, plan, brief=brief)
        if self._error is not None:
            return QueueStatus(error=self._error)
        found = self._jobs.get(plan.job_name, [])
        if found:
            self._quiet.pop(run.path, None)
            return QueueStatus(jobs=found, reasons={job.id: job.reason for job in found if job.reason})
        if run.path in self._without_jobs:
            return QueueStatus()
        submitted = run.plan.stat().st_mtime
        known = self._quiet.get(run.path)
        if known is None or known[0] != submitted or known[1].error is not None or known[1].hidden is not None:
            known = self._quiet[run.path] = submitted, queue.query_queue(run, plan, brief=brief)
        return known[1]
