"""One check of the runs below a folder, started by cron (`relayrun sentinel`).

It reports problems that no job of a chain can report, because none runs. A symptom counts after two checks a minute
apart have seen it: a truncated answer of Slurm or a job between two states is not a symptom. The run's notices report
it, as a job would; a printed line, which cron mails, reports it if the run notifies nobody or the notice cannot be
written. `relayrun.watch.status.cron_check_record` keeps the symptoms and reports in the folder. Uses the standard
library alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relayrun.control.chain import evaluation_jobs, quota
from relayrun.control.chain.campaign import start_due_members
from relayrun.control.notify import notices
from relayrun.control.notify.events import make_notice, write_due_notices
from relayrun.control.notify.notices import QUIET_SECONDS, Notice, NoticePolicy
from relayrun.control.rundir.campaign import campaign_folders, read_membership
from relayrun.control.rundir.find_runs import find_runs_below, without_old_runs
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import InputError, RelayrunError, RunDirError, SchedulerError, user_name
from relayrun.files import write_error
from relayrun.trust import UntrustedError
from relayrun.watch import unsent_notices
from relayrun.watch.status import cron_check_record
from relayrun.watch.status.cron_check_record import LATE_CHECK_SECONDS, CronCheckRecord
from relayrun.watch.status.run_status import RunStatus
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import DamagedRun
from relayrun.watch.symptoms import Symptom, find_symptoms, is_at_work, running_job
from relayrun.watch.text import format_time

SETTLE_SECONDS = 55.0
"""Minimum age of a symptom before it is reported: cron may start a check every minute."""
SILENT_SLURM_SECONDS = 3600.0
"""Silence of Slurm that is not reported: controllers are updated and restarted."""
FORGET_SECONDS = 86400.0
"""Age of a dead chain at the first check from which it is counted, not reported."""
SLURM_SYMPTOM = "slurm"
"""Stands for the scheduler where symptoms are listed by run."""


@dataclass
class _SeenSymptom:
    """A symptom of one run, when it was first seen, and whether it was reported."""

    symptom: Symptom
    since: float
    told: bool


class CronCheck:
    """One check of the runs at most `cron_check_record.MAX_FOLDER_DEPTH` folders below a folder."""

    def __init__(self, folder: Path, *, now: float) -> None:
        """`now`: seconds since 1970."""
        self._folder = folder
        self._now = now
        self._lines: list[str] = []
        self._user = user_name(os.geteuid())
        self._first = False
        self._settle = SETTLE_SECONDS
        self._running: dict[str, dict[str, Any]] = {}
        self._before = CronCheckRecord(time=0.0, host="", user="")
        self._said: dict[str, float] = {}
        self._stuck: dict[str, dict[str, str]] = {}
        """Reasons by campaign and member why a run does not start; a reason is removed when it is reported."""

    def run(self) -> list[str]:
        """Check once; return the lines to print. Raises RelayrunError if the folder cannot be read."""
        lock_path = cron_check_record.cron_check_lock_path(self._folder, self._user)
        with cron_check_record.hold_lock(lock_path) as (lock, mine):
            if mine:
                return self._run(lock)
            memory = self._remembered()[0]
            stuck = memory is not None and self._now - memory.time > LATE_CHECK_SECONDS
            said = stuck and cron_check_record.is_first_in_hour(lock, now=self._now)
            return [f"{self._folder}: a look that began long ago has not ended"] * said

    def _run(self, lock: int) -> list[str]:
        before, complaint = self._remembered()
        self._first = before is None or not before.jobs_known
        self._before = before or self._before
        self._said = {key: when for key, when in self._before.said.items() if self._now - when < QUIET_SECONDS}
        path = cron_check_record.cron_check_path(self._folder, self._user)
        if complaint:
            self._say(path.name, "damaged", complaint)
        kept = write_error(self._folder) is None
        if not kept:  # the next check does not know the symptoms of this one
            self._settle = 0.0
        seen = self._runs()
        period = None if before is None else self._now - before.time
        memory = CronCheckRecord(
            time=self._now,
            period=period,
            host=socket.gethostname(),
            user=self._user,
            seen={
                name: {entry.symptom.cause: {"since": entry.since, "told": entry.told} for entry in entries}
                for name, entries in seen.items()
                if entries
            },
            running=self._running,
            said=self._said,
            jobs_known=not self._first or SLURM_SYMPTOM not in seen,
        )
        try:
            memory.write(path)
        except OSError as error:
            self._lines.append(f"{path} cannot be written: {error.strerror or error}")
            kept = False
        may = kept or not self._lines or cron_check_record.is_first_in_hour(lock, now=self._now)
        return self._lines if may else []

    def _remembered(self) -> tuple[CronCheckRecord | None, str]:
        try:
            return cron_check_record.read_cron_check(self._folder, self._user), ""
        except RunDirError as error:
            return None, f"what the last look saw is lost: {error.message}"

    def _runs(self) -> dict[str, list[_SeenSymptom]]:
        """Check every run of this user; return the symptoms by the run's path below the folder."""
        seen: dict[str, list[_SeenSymptom]] = {}
        ended, living = self._own_runs(seen)
        for run, plan in ended:
            with contextlib.suppress(Exception):  # the run has ended; `relayrun status` shows the rest
                evaluation_jobs.submit_left_evaluations(run)
                self._tell(run, plan, [], at_work=False)
        runs = [run for run, _ in living.values()]
        folders = campaign_folders([run for run, _ in ended] + runs)
        started = start_due_members(folders, say=lambda words: None)
        self._stuck = {str(folder): dict(look.stuck) for folder, look in started.items()}
        gone = [run.path for name, (run, _) in living.items() if self._is_known_gone(name, run)]
        states = {entry.path: entry for entry in RunsWatcher(without_jobs=gone).statuses(runs, now=self._now)}
        silent = None
        old = 0
        for name, (run, plan) in living.items():
            status = states[str(run.path)]
            if isinstance(status, DamagedRun):
                seen[name] = self._unreadable(run, status.error)
            elif status.state == "unknown":
                silent = status.scheduler_error or "no answer"
                causes = self._before.seen.get(name, {})  # neither reported nor forgotten
                seen[name] = [self._seen(name, Symptom(event="stopped", cause=cause, reason="")) for cause in causes]
                self._running |= {name: kept} if (kept := self._before.running.get(name)) else {}
            else:
                is_old = status.state == "failed" and self._now - _last_sign(run, status) > FORGET_SECONDS
                old += self._first and is_old
                seen[name] = self._living(name, run, plan, status, told=self._first and is_old)
        if silent is not None:
            patience = SILENT_SLURM_SECONDS if shutil.which("squeue") else 0.0
            words = f"nothing is known of the jobs: {silent}"
            seen[SLURM_SYMPTOM] = self._by_line(SLURM_SYMPTOM, "no answer", words, patience)
        if old:
            words = "chains died more than a day ago, of which nobody is told: `relayrun status`"
            self._lines.append(f"{self._folder}: {old} {words}")
        return seen

    def _own_runs(
        self, seen: dict[str, list[_SeenSymptom]]
    ) -> tuple[list[tuple[Run, Plan]], dict[str, tuple[Run, Plan]]]:
        """Ended runs of this user, and the others by name; runs that cannot be read are added to `seen`."""
        ended: list[tuple[Run, Plan]] = []
        living: dict[str, tuple[Run, Plan]] = {}
        runs = find_runs_below(self._folder, depth=cron_check_record.MAX_FOLDER_DEPTH)
        for run in without_old_runs(runs, now=self._now):
            try:
                plan = Plan.load(run) if run.path.stat().st_uid == os.geteuid() else None
                if plan is None or plan.owner != os.geteuid():
                    continue  # another user's, damaged or not, or a copy of it
                if run.stop.exists():
                    ended.append((run, plan))
                else:
                    living[self._name(run)] = run, Plan.load_trusted(run)
            except (RelayrunError, OSError) as error:
                words = str(error) if isinstance(error, UntrustedError) else getattr(error, "message", "") or str(error)
                seen[self._name(run)] = self._unreadable(run, words)
        return ended, living

    def _living(self, name: str, run: Run, plan: Plan, status: RunStatus, *, told: bool) -> list[_SeenSymptom]:
        """Check a run that has not ended, and report its symptoms. `told`: as if they were reported before."""
        try:
            found = self._symptoms(name, run, plan, status)
            for entry in found if told else ():
                entry.told = True
            self._tell(run, plan, found, at_work=is_at_work(run, status, self._running_since(name)))
        except Exception as error:  # a defect in one run's records must not hide the others
            return self._unreadable(run, getattr(error, "message", None) or f"{type(error).__name__}: {error}")
        return found

    def _is_known_gone(self, name: str, run: Run) -> bool:
        """True if the end of the chain was reported and the run was not submitted since."""
        seen = self._before.seen.get(name, {}).items()
        since = [known["since"] for cause, known in seen if cause.startswith("gone-") and known.get("told")]
        try:
            return bool(since) and run.plan.stat().st_mtime < max(since)
        except OSError:
            return False

    def _symptoms(self, name: str, run: Run, plan: Plan, status: RunStatus) -> list[_SeenSymptom]:
        job = running_job(status)
        if job is not None:
            known = self._before.running.get(name, {})
            same = known.get("job") == job.id
            self._running[name] = {"job": job.id, "since": known["since"] if same else self._now}
        policy, since = NoticePolicy.read(run.notice_policy), self._running_since(name)
        if status.has_job and quota.is_measurement_due(run, now=self._now):
            with contextlib.suppress(OSError):  # a full disk is a symptom of its own
                quota.measure_quotas(run, plan, now=self._now)
        found = find_symptoms(run, plan, status, now=self._now, running_since=since, policy=policy)
        if status.state == "queued":
            found += self._never_begins(run)
        return [self._seen(name, symptom) for symptom in found]

    def _never_begins(self, run: Run) -> list[Symptom]:
        """Reasons why a waiting run never starts; of runs with one reason the first reports it."""
        membership = read_membership(run)
        stuck = {} if membership is None else self._stuck.get(membership.folder, {})
        why = stuck.get(membership.member, stuck.get("")) if membership is not None else None
        if membership is None or why is None:
            return []
        alike = [name for name, reason in stuck.items() if reason == why]
        self._stuck[membership.folder] = {name: reason for name, reason in stuck.items() if reason != why}
        words = f"nothing more of its campaign begins: {why}" if "" in alike else f"it does not begin: {why}"
        words += f" ({len(alike) - 1} more of its campaign do not either)" if len(alike) > 1 else ""
        cause = f"stuck-{hashlib.sha256(why.encode()).hexdigest()[:8]}"
        return [Symptom(event="stopped", cause=cause, reason=words, go_on=f"relayrun status {run.path}")]

    def _running_since(self, name: str) -> float | None:
        """Time of the first check that saw the run's current job running."""
        return self._running[name]["since"] if name in self._running else None

    def _seen(self, name: str, symptom: Symptom) -> _SeenSymptom:
        known = self._before.seen.get(name, {}).get(symptom.cause, {})
        return _SeenSymptom(symptom, since=float(known.get("since", self._now)), told=bool(known.get("told", False)))

    def _unreadable(self, run: Run, why: str) -> list[_SeenSymptom]:
        """Report by a line: the notices of a run with damaged records cannot be trusted."""
        return self._by_line(self._name(run), "unreadable", f"it cannot be looked at: {why}", self._settle)

    def _by_line(self, name: str, cause: str, words: str, patience: float) -> list[_SeenSymptom]:
        entry = self._seen(name, Symptom(event="stopped", cause=cause, reason=words))
        if self._is_due(entry, patience):
            entry.told = self._say(name, cause, words)
        return [entry]

    def _is_due(self, entry: _SeenSymptom, patience: float) -> bool:
        return not entry.told and self._now - entry.since >= patience

    def _tell(self, run: Run, plan: Plan, entries: Sequence[_SeenSymptom], *, at_work: bool) -> None:
        """Report due symptoms by the run's notices, and by a line if notices cannot."""
        due = [entry for entry in entries if self._is_due(entry, max(self._settle, entry.symptom.patience))]
        name = self._name(run)
        for entry in due:
            if entry.symptom.release:
                entry.symptom = _release(run, plan, entry.symptom)
        try:
            policy = notices.read_trusted_notice_policy(run)
            written: Mapping[str, object] = {}
            complaints: list[str] = []
            if policy is not None:
                more = [self._notice(run, plan, entry) for entry in due]
                complaints = write_due_notices(run, plan, policy, now=self._now, at_work=at_work, more=more)
                written = notices.known_notices(run)
                unsent_notices.start_sender(run, policy, again_and_again=True)
        except (RelayrunError, OSError, TypeError, ValueError) as error:
            policy, written = None, {}
            complaints = [getattr(error, "message", None) or f"{type(error).__name__}: {error}"]
        for entry in due:
            if policy is not None and (self._id(entry) in written or not policy.wants(entry.symptom.event)):
                entry.told = True
            else:
                usual = f"relayrun resume {run.path}" if entry.symptom.event == "stopped" else ""
                go_on = entry.symptom.go_on or usual
                entry.told = self._say(name, entry.symptom.cause, entry.symptom.reason, go_on=go_on)
        if complaints and (due or at_work):  # the next check tries again
            self._say(name, "notices", f"its notices cannot be written: {'; '.join(complaints)}")

    def _notice(self, run: Run, plan: Plan, entry: _SeenSymptom) -> Notice:
        seen, name = entry.symptom, self._id(entry)
        cause = f"stopped-{seen.cause}" if seen.event == "stopped" else seen.event
        return make_notice(run, plan, name, cause=cause, time=self._now, reason=seen.reason, go_on=seen.go_on)

    def _id(self, entry: _SeenSymptom) -> str:
        """Id of the notice, constant as long as the symptom lasts."""
        since = entry.since if self._settle else self._now // QUIET_SECONDS * QUIET_SECONDS
        return entry.symptom.notice or f"{entry.symptom.event}-{entry.symptom.cause}-{int(since)}"

    def _say(self, name: str, cause: str, reason: str, *, go_on: str = "") -> bool:
        """Print a line, at most one per hour for a run and cause; return True if it is printed."""
        key = f"{name} {cause}"
        if key in self._said:
            return False
        self._said[key] = self._now
        self._lines.append(f"{format_time(self._now)} {name}: {reason}" + (f"\n  -> {go_on}" if go_on else ""))
        return True

    def _name(self, run: Run) -> str:
        return os.path.relpath(run.path, self._folder)


def _release(run: Run, plan: Plan, symptom: Symptom) -> Symptom:
    """Let the job start that Slurm holds since its launch failed; return the symptom with what was done."""
    try:
        scheduler_for_plan(plan, run, patience=0).release(symptom.release)
    except SchedulerError as error:
        return replace(symptom, reason=f"{symptom.reason}; it cannot be released: {error.message}", release="")
    words = f"Slurm held job {symptom.release} since its launch failed on a node; it was released"
    return replace(symptom, reason=words, go_on=f"scontrol show job {symptom.release}", release="")


def check_folder(folder: Path, *, now: float) -> list[str]:
    """Check the runs below a folder once; return the lines to print.

    Raises InputError if the folder does not exist or is not writable, RelayrunError if it cannot be read.
    """
    if not folder.is_dir():
        raise InputError("there is no such folder", where=folder, hint="give the folder that your runs lie in")
    try:
        return CronCheck(folder, now=now).run()
    except OSError as error:
        words = f"it cannot be looked after: {error.strerror or error}"
        hint = "the sentinel keeps what it saw in the folder that it looks after"
        raise InputError(words, where=error.filename or folder, hint=hint) from None


def _last_sign(run: Run, status: RunStatus) -> float:
    """Time of the last known event of a run, in seconds since 1970."""
    times = [status.updated, 0.0 if status.last_job is None else status.last_job.end_time or 0.0]
    with contextlib.suppress(OSError):
        times.append(run.plan.stat().st_mtime)
    return max(times)
