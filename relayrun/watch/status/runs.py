"""Status of many runs with one query of the scheduler for the jobs of all chains.

A chain without jobs needs a query of its own, once: the end of its last job does not change until the next submit.
Summaries of stopped runs are kept in the user's cache, one a line, each with the state of the files that it came from.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Collection, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from relayrun import __version__
from relayrun.config.sections.batch_systems import batch_system
from relayrun.control.rundir.attempt import COMMITS_NAME, METRICS_NAME
from relayrun.control.rundir.find_runs import runs_folder
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import ATTEMPTS_NAME, PLAN_NAME, STOP_NAME, Run, is_stopped
from relayrun.control.scheduler import slurm
from relayrun.control.scheduler.base import Job
from relayrun.errors import RunDirError, SchedulerError
from relayrun.files import file_identity
from relayrun.trust import read_cache, write_cache
from relayrun.watch.status import queue, summary
from relayrun.watch.status.cron_check_record import FolderCache, LastCronCheck, last_cron_check
from relayrun.watch.status.queue import QueueStatus
from relayrun.watch.status.summary import DamagedRun, RemainingWork, RunSummary, summarize_run

if TYPE_CHECKING:
    from relayrun.watch.status.run_status import RunStatus

S = TypeVar("S", bound=RunSummary)
CALM_SECONDS, MAX_LINE = 60.0, 8192
"""Age of the last change of a run, by the clock of its file system, from which its summary is kept; most characters."""
_CODE = (__version__, *map(file_identity, sorted(Path(__file__).parent.glob("*.py"))))


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

        return self._read_all(runs, run_status.read_run_status, now=now, full=True)

    def summaries(self, runs: Sequence[Run], *, now: float) -> list[RunSummary | DamagedRun]:
        return self._read_all(runs, summarize_run, now=now, full=False)

    def all_summaries(self, runs: Sequence[Run], *, now: float) -> list[RunSummary | DamagedRun]:
        """Return the `summaries` of all runs of the project, and keep those of stopped runs."""
        name = sha256(repr((_CODE, runs_folder())).encode()).hexdigest()
        paths = {str(run.path): run for run in runs}
        looks: dict[tuple[str, int | None], LastCronCheck | None] = {}
        rows: dict[str, RunSummary | DamagedRun] = {}
        lines: list[str] = []
        for line in (read_cache("rows", name) or b"").decode().splitlines():
            files, owner, saved, values = json.loads(line)
            run, left = paths.get(values["path"]), values["remaining"]
            with contextlib.suppress(OSError):
                if run is not None and _identities(run, files) == files:
                    values["remaining"] = RemainingWork(**left) if left else None
                    values["durable_age"] = None if saved is None else now - saved
                    where = os.path.dirname(run.path), owner
                    looks[where] = looks[where] if where in looks else last_cron_check(run, owner, now=now)
                    rows[values["path"]] = row = object.__new__(RunSummary)
                    vars(row).update(values, sentinel=looks[where])  # its constructor takes four times as long
                    lines.append(line)
        read = functools.partial(_read_and_keep, lines)
        new = self._read_all([run for path, run in paths.items() if path not in rows], read, now=now, full=False)
        if len(lines) > len(rows):
            write_cache("rows", name, "\n".join(lines).encode())
        rows |= {each.path: each for each in new}
        return sorted((rows[path] for path in paths), key=lambda each: -each.updated)

    def _read_all(self, runs: Sequence[Run], read: Callable[..., S], *, now: float, full: bool) -> list[S | DamagedRun]:
        """Call `read` for every run with its jobs, none for a stopped run."""
        self._query_chains(runs)
        found: list[S | DamagedRun] = []
        cache = FolderCache()
        for run in runs:
            try:
                plan = self.plans.get(run.path) or Plan.load(run)
                answer = QueueStatus() if is_stopped(run) else self._queue(run, plan, brief=not full)
                found.append(read(run, answer, now=now, plan=plan, cache=cache))
            except (RunDirError, OSError) as error:  # a damaged run must not hide the others
                found.append(DamagedRun(path=str(run.path), error=getattr(error, "message", None) or str(error)))
        return sorted(found, key=lambda status: -status.updated)

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
        if found := self._jobs.get(plan.job_name):
            self._quiet.pop(run.path, None)
            return QueueStatus(jobs=found, reasons={job.id: job.reason for job in found if job.reason})
        if run.path in self._without_jobs:
            return QueueStatus()
        submitted = run.plan.stat().st_mtime
        known = self._quiet.get(run.path)
        if known is None or known[0] != submitted or known[1].error is not None or known[1].hidden is not None:
            known = self._quiet[run.path] = submitted, queue.query_queue(run, plan, brief=brief)
            self._error = known[1].error  # once silent, Slurm is not asked for every run
        return known[1]


def _read_and_keep(
    lines: list[str], run: Run, queue: QueueStatus, *, now: float, plan: Plan, cache: FolderCache
) -> RunSummary:
    """Return the summary of a run. If the run has stopped, add its line, unless a file is new, or a checkpoint damaged,
    of which any file may be mended, or the look of cron is not that of the folder."""
    with summary.damaged_records_as_error(run):
        records = summary.RunRecords(run, plan, queue, now=now)
        row = records.summary(cache)
        newest = next((counted.commit for counted in records.lineage.backwards()), None)
    own = os.path.islink(run.path) or getattr(row.sentinel, "folder", "") == row.path
    if row.stop_state and records.begin and row.durable_path == (newest and newest.path) and not own:
        last = run.attempt(records.begin.attempt).folder
        paths = {path for path in (f"{last}/{METRICS_NAME}", f"{last}/{COMMITS_NAME}") if os.path.exists(path)}
        paths |= {attempt.folder for attempt in run.opened_attempts.values()}
        paths |= {os.path.dirname(f"{newest.path}/{name}") for name in (".", *newest.files)} if newest else set()
        names = [".", PLAN_NAME, STOP_NAME, ATTEMPTS_NAME, *(path.removeprefix(f"{run.path}/") for path in paths)]
        with contextlib.suppress(OSError):
            files = _identities(run, names)
            line = json.dumps((files, plan.owner, newest and newest.time, row), default=vars)
            if max(changed for changed, _ in files.values()) < (now - CALM_SECONDS) * 1e9 and len(line) <= MAX_LINE:
                lines.append(line)
    return row


def _identities(run: Run, names: Collection[str]) -> dict[str, list[int]]:
    """Return time of change and inode of files and folders by their names in a run directory. Raises OSError."""
    folder = os.open(run.path, os.O_DIRECTORY)  # from here the look at a file takes half the time
    try:
        found = ((name, os.stat(name, dir_fd=folder)) for name in names)
        return {name: [each.st_ctime_ns, each.st_ino] for name, each in found}
    finally:
        os.close(folder)
