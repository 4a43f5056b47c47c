"""One watcher for many runs: a look asks the scheduler once for the jobs of all chains.

A chain without jobs is asked about on its own, once: how its last job ended does not change until the next submit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from relayrun.errors import RunDirError, SchedulerError
from relayrun.monitoring import run_status
from relayrun.monitoring.run_status import Damaged, Queue, RunStatus
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.scheduler import together
from relayrun.scheduler.together import Waiting


class Watcher:
    """Remembers between two looks what need not be asked again."""

    def __init__(self, *, without_jobs: Collection[Path] = ()) -> None:
        """`without_jobs`: run directories of which who asks knows how it ended, should they have no job now."""
        self._without_jobs = without_jobs
        self._jobs: dict[str, list[Waiting]] = {}
        self._error: str | None = None
        self._quiet: dict[Path, tuple[float, Queue]] = {}
        self._plans: dict[Path, Plan] = {}
        """The plans of the look that is under way."""

    def look(self, runs: Sequence[Run], *, now: float) -> list[RunStatus | Damaged]:
        """Return the status of every run, the newest first, damaged ones last. `now`: seconds since 1970."""
        self._plans = {run.path: plan for run in runs if (plan := _plan(run)) is not None}
        asked = [run for run in runs if run.path in self._plans and not run.stop.exists()]
        names = [plan.job_name for run in asked if (plan := self._plans[run.path]).scheduler == "slurm"]
        try:
            self._jobs, self._error = together.jobs_of(names, patience=run_status.PATIENCE), None
        except SchedulerError as error:
            self._jobs, self._error = {}, error.message
        return run_status.gather_all(runs, now=now, ask=self._queue, plans=self._plans)

    def _queue(self, run: Run) -> Queue:
        plan = self._plans.get(run.path) or Plan.load(run)
        if plan.scheduler != "slurm":
            return run_status.ask(run, plan)
        if self._error is not None:
            return Queue(error=self._error)
        found = self._jobs.get(plan.job_name, [])
        if found:
            self._quiet.pop(run.path, None)
            reasons = {each.job.id: each.reason for each in found if each.reason}
            return Queue(jobs=[each.job for each in found], reasons=reasons)
        if run.path in self._without_jobs:
            return Queue()
        submitted = run.plan.stat().st_mtime
        known = self._quiet.get(run.path)
        if known is None or known[0] != submitted or known[1].error is not None or known[1].hidden is not None:
            known = self._quiet[run.path] = submitted, run_status.ask(run, plan)
        return known[1]


def _plan(run: Run) -> Plan | None:
    """The plan of a run; damaged runs are told of elsewhere."""
    try:
        return Plan.load(run)
    except (RunDirError, OSError):
        return None
