"""The local scheduler: a chain of jobs on one machine, with Slurm's signals and no daemon.

The queue is a folder of the run directory; a job is one JSON file. `submit` only writes it. `run_queue`,
held by the terminal that submitted, starts one job at a time (a singleton, like on Slurm) and treats it
as Slurm does: SIGUSR2 to the batch script `signal_lead` seconds before the limit, SIGTERM to everything
at the limit, SIGKILL after KILL_WAIT. If that terminal dies, the job gets SIGTERM, saves and ends.
`AuxiliaryJobs` runs jobs that are not part of the chain beside it, one at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import Run, is_stopped, write_stop
from relayrun.control.scheduler import tasks
from relayrun.control.scheduler.base import (
    BEGIN_BACKOFF,
    MAX_FAILED_BEGINS,
    Job,
    MinimumNodes,
    RankLaunch,
    is_live_state,
)
from relayrun.control.scheduler.local_queue import JOB_ID_VARIABLE, LocalJob, LocalQueue, signal_group
from relayrun.errors import SchedulerError

AUXILIARY_POLL_SECONDS = 1.0
"""Between two looks for jobs that run beside the chain."""
AUXILIARY_KILL_WAIT = 5.0
"""Seconds from SIGTERM to SIGKILL for them; the chain's job is not looked after meanwhile."""


class AuxiliaryJobs:
    """Runs the jobs that are no part of the chain, one at a time, while its owner waits for others."""

    def __init__(self, queue: LocalQueue, on_event: Callable[[str], None]) -> None:
        self._queue = queue
        self._on_event = on_event
        self._running: tuple[LocalJob, subprocess.Popen[bytes]] | None = None
        self._next_look = 0.0

    @property
    def busy(self) -> bool:
        return self._running is not None

    def poll(self) -> None:
        """Start what waits, end what is over its limit or cancelled, record what has ended."""
        if self._running is None:
            if time.monotonic() < self._next_look:
                return
            self._next_look = time.monotonic() + AUXILIARY_POLL_SECONDS
            waiting = [job for job in self._queue.every_job() if job.auxiliary and job.state == "PENDING"]
            if waiting:
                self._running = self._queue.start_job(waiting[0])
                with contextlib.suppress(OSError), self._queue.locked():  # whoever looks on sees it waiting
                    self._queue.write_job(self._running[0])
                self._on_event(f"job {waiting[0].id} started ({waiting[0].name})")
            return
        job, process = self._running
        if process.poll() is not None:
            self._record("COMPLETED" if process.returncode == 0 else "FAILED")
        elif time.time() >= (job.end_time or 0.0):
            self._stop("TIMEOUT")
        elif self._queue.read_job(job.id).cancel_requested:
            self._stop("CANCELLED")

    def end(self) -> None:
        """End the one that runs."""
        if self._running is not None:
            self._stop("CANCELLED")

    def _stop(self, state: str) -> None:
        assert self._running is not None
        _, process = self._running
        signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(AUXILIARY_KILL_WAIT)
        signal_group(process, signal.SIGKILL)
        process.wait()
        self._record(state)

    def _record(self, state: str) -> None:
        assert self._running is not None
        job, process = self._running
        self._running = None
        self._next_look = 0.0
        with self._queue.locked():
            ended = replace(job, state=state, exit_code=process.returncode, end_time=time.time())
            self._queue.write_job(ended)
        self._on_event(f"job {job.id} ended: {state} ({job.name})")


KILL_WAIT = 30.0
"""Seconds from SIGTERM at the time limit to SIGKILL; Slurm's default."""

REQUEUE_EXIT_CODE = 75
"""Exit code of a job whose supervisor failed; see `launchers/lib/again.sh`."""

DISK_RETRY_SECONDS = 3600.0
"""Seconds for which who runs the queue tries again what a full or silent disk refuses."""

T = TypeVar("T")


class LocalScheduler:
    """A `Scheduler` for one run directory."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._queue = LocalQueue(run.path / "local")

    def current_job_id(self) -> str:
        job_id = os.environ.get(JOB_ID_VARIABLE)
        if not job_id:
            raise SchedulerError(f"not inside a local job: {JOB_ID_VARIABLE} is not set")
        return job_id

    @property
    def nodes(self) -> None:
        return None  # there is one, which every job has

    @property
    def fallback_jobs(self) -> None:
        return None  # who runs the queue sees how each job ends

    def submit_first(self, plan: Plan, script: Path, evaluation: Path | None = None) -> str:
        return self.submit(plan, script, options={})

    def adopt(self, job: Job, plan: Plan) -> None:
        with self._queue.locked():
            self._queue.write_job(replace(self._queue.read_job(job.id), name=plan.job_name))

    def submit(self, plan: Plan, script: Path, *, options: Mapping[str, str], delay: int = 0) -> str:
        if options:
            raise SchedulerError(f"the local scheduler takes no options, but was given: {', '.join(options)}")
        return self._queue.add(
            LocalJob(
                id="",
                name=plan.job_name,
                script=str(script),
                log_folder=plan.log_folder,
                time_limit=plan.time_limit,
                signal_lead=plan.signal_lead,
                eligible_time=time.time() + delay,
            )
        )

    def submit_auxiliary(self, plan: Plan, script: Path, *, name: str, arguments: Sequence[str], limit: int) -> str:
        return self._queue.add(
            LocalJob(
                id="",
                name=name,
                script=str(script),
                arguments=list(arguments),
                log_folder=plan.log_folder,
                time_limit=limit,
                signal_lead=0,
                eligible_time=time.time(),
                auxiliary=True,
            )
        )

    def named(self, name: str) -> str | None:
        return next((job.id for job in self._queue.every_job() if job.name == name and is_live_state(job.state)), None)

    def cancel(self, job_id: str) -> None:
        if not self._queue.path(job_id).exists():
            return
        try:
            with self._queue.locked():
                job = self._queue.read_job(job_id)
                if job.state == "PENDING":
                    self._queue.write_job(replace(job, state="CANCELLED", end_time=time.time()))
                elif job.state == "RUNNING":
                    self._queue.write_job(replace(job, cancel_requested=True))
        except OSError as error:
            hint = "free some space, or end the command that runs the job (Ctrl-C)"
            message = f"job {job_id} is not cancelled: {error.strerror}"
            raise SchedulerError(message, where=self._queue.folder, hint=hint) from None

    def note_stop(self, job_id: str, user: str) -> None:
        """Nowhere: its jobs are files of the run directory."""

    def cancelled_by(self, job_id: str) -> None:
        return None  # one file for all users

    def postpone(self, job_id: str, *, delay: int) -> None:
        with self._queue.locked():
            self._queue.write_job(replace(self._queue.read_job(job_id), eligible_time=time.time() + delay))

    def settle(self, job: Job, *, followed: bool, log: str | None) -> None:
        with self._queue.locked():
            self._queue.write_job(replace(self._queue.read_job(job.id), failed_begins=0))

    def requeue(self, job_id: str, *, delay: int = 0, few: MinimumNodes | None = None) -> None:
        with self._queue.locked():
            self._queue.write_job(replace(self._queue.read_job(job_id), requeue_delay=delay))

    def guard(self, job_id: str, command: Sequence[str], *, log: Path) -> None:
        with self._queue.locked():  # no process is needed: who runs the queue sees it
            self._queue.write_job(replace(self._queue.read_job(job_id), guarded=True))

    def signal_ranks(self, job_id: str, number: signal.Signals) -> None:
        # SIGKILL cannot be handed on by the one who gets it, so the starter takes SIGQUIT for it
        number = signal.SIGQUIT if number == signal.SIGKILL else number
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            os.kill(int(self._starter_pid.read_text()), number)

    @property
    def _starter_pid(self) -> Path:
        return self._queue.folder / "starter.pid"

    def query(self, job_id: str) -> Job | None:
        return self._seen(self._queue.read_job(job_id)) if self._queue.path(job_id).exists() else None

    def _seen(self, job: LocalJob) -> Job:
        """A job as who asks sees it."""
        state = job.state
        if state == "RUNNING" and not self._queue.is_being_run():
            state = "NODE_FAIL"  # whoever ran the queue was killed, and the job with it
        if state == "RUNNING" and job.cancel_requested:
            state = "CANCELLED"
        return Job(
            id=job.id,
            name=job.name,
            state=state,
            nodes=os.uname().nodename,
            end_time=job.end_time,
            submit_time=job.submit_time,
            eligible_time=job.eligible_time,
            start_time=job.start_time,
            requeue=True,
        )

    def cancelled(self, job_id: str, *, nodes: str) -> bool:
        job = self.query(job_id)
        return job is not None and job.state == "CANCELLED"

    def reservation_end(self, name: str, *, for_good: bool = False) -> float | None:
        return None

    def jobs(self, plan: Plan, *, anyone: bool = False) -> list[Job]:
        return self.live(self.every_job())

    def every_job(self) -> list[LocalJob]:
        """The jobs of the queue, as they are on record."""
        return self._queue.every_job()

    def live(self, every: Sequence[LocalJob]) -> list[Job]:
        """Those of the chain, of these, that wait or run."""
        jobs = [self._seen(job) for job in every if not job.auxiliary]
        return [job for job in jobs if job.live]

    def single_task_command(self, plan: Plan, *, cpus_per_task: str) -> list[str]:
        return []

    def rank_launch(self, plan: Plan, job: Job, *, leave_signal: signal.Signals | None) -> RankLaunch:
        del leave_signal  # the batch script sends it
        tasks = plan.nodes if plan.recovery == "node" else plan.ntasks
        starter = [
            "-m",
            "relayrun.control.scheduler.tasks",
            f"--ntasks={tasks}",
            f"--pid-file={self._starter_pid}",
            "--",
        ]
        return RankLaunch(command=[plan.host_python, *starter])  # which picks a free port

    def run_queue(self, on_event: Callable[[str], None], poll: Callable[[], None] = lambda: None) -> None:
        """Run the queued jobs until none is left, the chain's one by one. `poll` is called several times a second.

        KeyboardInterrupt cancels the running job and what is queued, waits for the end, and is raised again.
        Raises SchedulerError if somebody runs this queue already.
        """
        self._queue.folder.mkdir(parents=True, exist_ok=True)
        with open(self._queue.folder / "runner.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SchedulerError(
                    "this run's jobs are being run by another terminal", where=self._queue.folder
                ) from None
            self._patiently("ended jobs are not recorded", self._bury_orphans, on_event)
            auxiliary = AuxiliaryJobs(self._queue, on_event)

            def look() -> None:
                for duty in (poll, auxiliary.poll):
                    with contextlib.suppress(OSError):  # neither a full disk nor a closed terminal ends the chain's job
                        duty()

            def waiting() -> list[LocalJob]:
                return [job for job in self._queue.every_job() if job.state == "PENDING"]

            try:
                while (jobs := self._patiently("the queue is not read", waiting, on_event)) or auxiliary.busy:
                    job = next((job for job in jobs if not job.auxiliary), None)
                    if job is None or time.time() < job.eligible_time:
                        look()
                        time.sleep(0.1)
                        continue
                    self._run_job(job, on_event, look)
            except KeyboardInterrupt:
                for job in self._queue.every_job():
                    self.cancel(job.id)
                raise
            finally:
                auxiliary.end()

    def _patiently(self, failure: str, work: Callable[[], T], on_event: Callable[[str], None]) -> T:
        """Do what reads or writes the queue, again and again while the disk refuses it.

        Raises SchedulerError after DISK_PATIENCE, with the reason in STOP if that can be written.
        """
        deadline, pause, said = time.monotonic() + DISK_RETRY_SECONDS, 0.1, False
        while True:
            try:
                return work()
            except OSError as error:
                if time.monotonic() + pause > deadline:
                    with contextlib.suppress(OSError):
                        write_stop(self._run, ChainEnd("failed", f"{failure}: {error}"))
                    raise SchedulerError(
                        f"{failure}: {error}; the chain ends",
                        where=self._queue.folder,
                        hint="mend the file system, and submit again with --resume",
                    ) from error
                if not said:
                    on_event(f"{failure}: {error}; it is tried again for {DISK_RETRY_SECONDS:.0f} s")
                    said = True
            time.sleep(pause)
            pause = min(2 * pause, 30.0)

    def _run_job(self, job: LocalJob, on_event: Callable[[str], None], poll: Callable[[], None]) -> None:
        job, process = self._patiently(f"job {job.id} does not start", lambda: self._queue.start_job(job), on_event)
        started = job.start_time or 0.0
        on_event(f"job {job.id} started")
        state = "COMPLETED"
        try:
            state = self._watch(job, process, started, on_event, poll)
        except KeyboardInterrupt:
            on_event(f"job {job.id}: interrupted; saving and ending")
            state = "CANCELLED"
            signal_group(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_WAIT)
            raise
        finally:
            signal_group(process, signal.SIGKILL)
            code = process.wait()
            tasks.kill_leftover_processes(
                {JOB_ID_VARIABLE: job.id, "RELAYRUN_RUN_DIR": str(self._run.path), tasks.RANKS_VARIABLE: None}
            )
            if state == "COMPLETED" and code:
                state = "FAILED"
            job = self._patiently(
                f"the end of job {job.id} is not recorded", lambda: self._close(job, state, code), on_event
            )
            on_event(f"job {job.id} ended: {state}" + (" and is queued again" if job.state == "PENDING" else ""))

    def _recorded(self, job: LocalJob) -> bool:
        """Record that a job runs; return whether the disk took it."""
        try:
            with self._queue.locked():
                self._queue.write_job(_with_start(self._queue.read_job(job.id), job))
        except OSError:
            return False
        return True

    def _close(self, started: LocalJob, state: str, code: int) -> LocalJob:
        """Record how a job ended, or queue it again; return it as it stands then."""
        with self._queue.locked():
            job = _with_start(self._queue.read_job(started.id), started)
            job = replace(job, state=state, exit_code=code, end_time=time.time())
            if state != "CANCELLED" and code == REQUEUE_EXIT_CODE:
                job = self._again(job)
            elif state != "CANCELLED" and (job.requeue_delay is not None or (job.guarded and code < 0)):
                eligible = time.time() + (job.requeue_delay or 0)
                job = replace(job, state="PENDING", requeue_delay=None, guarded=False, eligible_time=eligible)
            elif state != "CANCELLED" and code < 0 and self._goes_on():
                job = self._again(job)
            self._queue.write_job(job)
        return job

    def _goes_on(self) -> bool:
        """Whether a job whose batch script was killed, which can do nothing more, shall be followed by another."""
        return self._run.plan.exists() and Plan.load(self._run).auto_requeue and not is_stopped(self._run)

    def _again(self, job: LocalJob) -> LocalJob:
        """Queue a job whose supervisor failed once more, later each time, unless another waits behind it.

        It is what `launchers/lib/again.sh` does on Slurm.
        """
        others = (other for other in self._queue.every_job() if other.id != job.id)  # its own may not say RUNNING yet
        if any(other.state == "PENDING" and not other.auxiliary for other in others):
            return job
        failed = job.failed_begins + 1
        job = replace(job, failed_begins=failed)
        if failed >= MAX_FAILED_BEGINS:
            with contextlib.suppress(OSError):
                reason = f"the supervisor failed in job {job.id}, {failed} times in a row; see its log"
                write_stop(self._run, ChainEnd("failed", reason))
            return job
        eligible = time.time() + BEGIN_BACKOFF * 2 ** (failed - 1)
        return replace(job, state="PENDING", eligible_time=eligible)

    def _watch(
        self,
        job: LocalJob,
        process: subprocess.Popen[bytes],
        started: float,
        on_event: Callable[[str], None],
        poll: Callable[[], None],
    ) -> str:
        """Send the signals when they are due, until the batch script ends; return the job's state."""
        signal_at: float | None = started + job.time_limit - job.signal_lead
        term_at: float | None = started + job.time_limit
        kill_at: float | None = None
        state = "COMPLETED"
        recorded = False
        while process.poll() is None:
            recorded = recorded or self._recorded(job)
            now = time.time()
            if signal_at is not None and now >= signal_at:
                on_event(f"job {job.id}: SIGUSR2, {job.signal_lead} s before the time limit")
                process.send_signal(signal.SIGUSR2)
                signal_at = None
            if term_at is not None and (now >= term_at or self._cancel_requested(job.id)):
                state = "TIMEOUT" if now >= term_at else "CANCELLED"
                on_event(f"job {job.id}: SIGTERM ({state.lower()})")
                signal_group(process, signal.SIGTERM)
                signal_at = term_at = None
                kill_at = now + KILL_WAIT
            if kill_at is not None and now >= kill_at:
                signal_group(process, signal.SIGKILL)
            poll()
            time.sleep(0.1)
        return state

    def _cancel_requested(self, job_id: str) -> bool:
        try:
            return self._queue.read_job(job_id).cancel_requested
        except OSError:  # it is read again soon
            return False

    def _bury_orphans(self) -> None:
        """A job that still counts as running when a new runner starts has lost its own."""
        for job in self._queue.every_job():
            if job.state == "RUNNING":
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if job.pid is not None and os.getsid(job.pid) == job.pid:
                        os.killpg(job.pid, signal.SIGKILL)
                with self._queue.locked():
                    self._queue.write_job(replace(job, state="NODE_FAIL", end_time=time.time()))


def _with_start(record: LocalJob, job: LocalJob) -> LocalJob:
    """The record of a job with what only who started it knows."""
    return replace(record, state="RUNNING", pid=job.pid, start_time=job.start_time, end_time=job.end_time)


def print_event(text: str) -> None:
    """An event of the queue, for a person."""
    with contextlib.suppress(OSError):  # the terminal may have gone, or be a file on a full disk
        print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
