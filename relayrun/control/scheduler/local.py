"""The local scheduler: a chain of jobs on one machine, with Slurm's signals and no daemon.

The queue is a folder of the run directory; a job is one JSON file, and `submit` only writes it. `run_queue`, held by
the terminal that submitted, starts one job at a time (a singleton, like on Slurm) and treats it as Slurm does: SIGUSR2
to the batch script `signal_seconds` seconds before the limit, SIGTERM to all processes at the limit, SIGKILL after
KILL_WAIT. If that terminal dies, the job gets SIGTERM, saves and ends. `AuxiliaryJobs` runs jobs outside the chain
beside it, one at a time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import Run, is_stopped, write_stop
from relayrun.control.scheduler import local_srun
from relayrun.control.scheduler.base import (
    BEGIN_BACKOFF,
    MAX_FAILED_BEGINS,
    Job,
    JobHistory,
    MinimumNodes,
    RankLaunch,
    Scheduler,
    is_live_state,
)
from relayrun.control.scheduler.local_queue import JOB_ID_VARIABLE, LocalJob, LocalQueue, signal_group
from relayrun.errors import SchedulerError
from relayrun.leftovers import exclusive_lock, open_lock

KILL_WAIT = 30.0
"""Seconds from SIGTERM at the time limit to SIGKILL; Slurm's default."""
REQUEUE_EXIT_CODE = 75
"""Exit code of a job whose supervisor failed; see `launchers/lib/again.sh`."""
DISK_RETRY_SECONDS = 3600.0
"""Seconds for which `run_queue` retries reads and writes that a full or silent disk refuses."""
AUXILIARY_POLL_SECONDS = 1.0
"""Interval between two looks for auxiliary jobs."""
AUXILIARY_KILL_WAIT = 5.0
"""Seconds from SIGTERM to SIGKILL for auxiliary jobs; the chain's job is not watched meanwhile."""
T = TypeVar("T")


class LocalScheduler(Scheduler):
    """The `Scheduler` of one run directory."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._queue = LocalQueue(run.path / "local")

    @classmethod
    def for_run(cls, run: Run, *, patience: float, ordered: bool = False) -> LocalScheduler:
        return cls(run)

    @classmethod
    def queued_jobs(cls, chains: Sequence[tuple[Run, Sequence[str]]], *, patience: float) -> list[list[Job]]:
        return [cls(run)._live() for run, _ in chains]

    def current_job_id(self) -> str:
        job_id = os.environ.get(JOB_ID_VARIABLE)
        if not job_id:
            raise SchedulerError(f"not inside a local job: {JOB_ID_VARIABLE} is not set")
        return job_id

    def query(self, job_id: str) -> Job | None:
        return self._seen(self._queue.read_job(job_id)) if self._queue.path(job_id).exists() else None

    def _seen(self, job: LocalJob) -> Job:
        state = job.state
        if state == "RUNNING" and not self._queue.is_being_run():
            state = "NODE_FAIL"  # the runner of the queue was killed, and the job with it
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

    def jobs(self, plan: Plan, *, anyone: bool = False) -> list[Job]:
        return self._live()

    def _live(self) -> list[Job]:
        """Return the pending and running jobs of the chain, whatever the plan says."""
        jobs = [self._seen(job) for job in self._queue.every_job() if not job.auxiliary]
        return [job for job in jobs if job.live]

    @property
    def has_waiting_auxiliary(self) -> bool:
        """True if a job outside the chain waits for a terminal that runs it."""
        return any(job.auxiliary and job.state == "PENDING" for job in self._queue.every_job())

    @property
    def history(self) -> JobHistory:
        from relayrun.control.scheduler.job_history import LocalHistory  # jobs do without it

        return LocalHistory(self._queue)

    def find_job(self, name: str) -> str | None:
        return next((job.id for job in self._queue.every_job() if job.name == name and is_live_state(job.state)), None)

    def cancelled(self, job_id: str, *, nodes: str) -> bool:
        job = self.query(job_id)
        return job is not None and job.state == "CANCELLED"

    def submit(self, plan: Plan, script: Path, *, options: Mapping[str, str], delay: int = 0) -> str:
        if options:
            raise SchedulerError(f"the local scheduler takes no options, but was given: {', '.join(options)}")
        seconds = {"time_limit": plan.time_limit, "signal_seconds": plan.signal_seconds}
        return self._add(plan, script, name=plan.job_name, eligible_time=time.time() + delay, **seconds)

    def submit_auxiliary(self, plan: Plan, script: Path, *, name: str, arguments: Sequence[str], limit: int) -> str:
        seconds = {"time_limit": limit, "signal_seconds": 0, "eligible_time": time.time()}
        return self._add(plan, script, name=name, arguments=list(arguments), auxiliary=True, **seconds)

    def _add(self, plan: Plan, script: Path, **fields: Any) -> str:
        return self._queue.add(LocalJob(id="", script=str(script), log_folder=plan.log_folder, **fields))

    def adopt(self, job: Job, plan: Plan) -> None:
        self._queue.change(job.id, name=plan.job_name)

    def confirm_begin(self, job: Job, *, followed: bool, log: str | None) -> None:
        self._queue.change(job.id, failed_begins=0)

    def guard(self, job_id: str, command: Sequence[str], *, log: Path) -> None:
        self._queue.change(job_id, guarded=True)  # no process is needed: `run_queue` sees the end

    def requeue(self, job_id: str, *, delay: int = 0, minimum: MinimumNodes | None = None) -> None:
        self._queue.change(job_id, requeue_delay=delay)

    def postpone(self, job_id: str, *, delay: int) -> None:
        self._queue.change(job_id, eligible_time=time.time() + delay)

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

    def signal_ranks(self, job_id: str, number: signal.Signals) -> None:
        # a process cannot forward SIGKILL, so the starter forwards SIGQUIT as SIGKILL
        number = signal.SIGQUIT if number == signal.SIGKILL else number
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            os.kill(int(self._starter_pid.read_text()), number)

    def rank_launch(self, plan: Plan, job: Job, *, leave_signal: signal.Signals | None) -> RankLaunch:
        del leave_signal  # the batch script sends it
        tasks = plan.nodes if plan.chain.recovery == "node" else plan.ntasks
        options = [f"--ntasks={tasks}", f"--pid-file={self._starter_pid}", "--"]
        # it picks a free port
        return RankLaunch(command=[*plan.host_command("relayrun.control.scheduler.local_srun"), *options])

    @property
    def _starter_pid(self) -> Path:
        return self._queue.folder / "starter.pid"

    def run_queue(self, on_event: Callable[[str], None], poll: Callable[[], None] = lambda: None) -> None:
        """Run the queued jobs until none is left, the chain's jobs one by one. `poll` is called several times a second.

        KeyboardInterrupt cancels the jobs, and is raised again. Raises SchedulerError if another process runs this
        queue.
        """
        self._queue.folder.mkdir(parents=True, exist_ok=True)
        refusal = SchedulerError("this run's jobs are being run by another terminal", where=self._queue.folder)
        with exclusive_lock(open_lock(self._queue.folder / "runner.lock"), refusal):
            self._patiently("ended jobs are not recorded", self._bury_orphans, on_event)
            auxiliary = AuxiliaryJobs(self._queue, on_event)

            def look() -> None:
                for duty in (poll, auxiliary.poll):
                    with contextlib.suppress(OSError):  # a full disk or a closed terminal must not end the chain's job
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
        """Repeat `work`, which reads or writes the queue, while the disk refuses it. Raises SchedulerError after
        DISK_RETRY_SECONDS, with the reason in STOP if that can be written."""
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
        on_event(f"job {job.id} started")
        state = "COMPLETED"
        try:
            state = self._watch(job, process, on_event, poll)
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
            marks = {JOB_ID_VARIABLE: job.id, "RELAYRUN_RUN_DIR": str(self._run.path), local_srun.RANKS_VARIABLE: None}
            local_srun.kill_leftover_processes(marks)
            if state == "COMPLETED" and code:
                state = "FAILED"
            words = f"the end of job {job.id} is not recorded"
            job = self._patiently(words, lambda: self._close(job, state, code), on_event)
            on_event(f"job {job.id} ended: {state}" + (" and is queued again" if job.state == "PENDING" else ""))

    def _watch(
        self, job: LocalJob, process: subprocess.Popen[bytes], on_event: Callable[[str], None], poll: Callable[[], None]
    ) -> str:
        """Send the signals when they are due, until the batch script ends; return the job's state."""
        end = (job.start_time or 0.0) + job.time_limit
        signal_at: float | None = end - job.signal_seconds
        term_at: float | None = end
        kill_at: float | None = None
        state = "COMPLETED"
        recorded = False
        while process.poll() is None:
            recorded = recorded or self._recorded(job)
            now = time.time()
            if signal_at is not None and now >= signal_at:
                on_event(f"job {job.id}: SIGUSR2, {job.signal_seconds} s before the time limit")
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

    def _recorded(self, job: LocalJob) -> bool:
        try:
            with self._queue.locked():
                self._queue.write_job(_with_start(self._queue.read_job(job.id), job))
        except OSError:
            return False
        return True

    def _cancel_requested(self, job_id: str) -> bool:
        try:
            return self._queue.read_job(job_id).cancel_requested
        except OSError:  # the next poll reads it again
            return False

    def _close(self, started: LocalJob, state: str, code: int) -> LocalJob:
        """Record how a job ended, or queue it again; return its new record."""
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
        """Return whether a job whose batch script was killed, and could not do anything itself, needs a successor."""
        return self._run.plan.exists() and Plan.load_in_job(self._run).chain.auto_requeue and not is_stopped(self._run)

    def _again(self, job: LocalJob) -> LocalJob:
        """Requeue a job whose supervisor failed, later each time, unless another job waits (Slurm: again.sh)."""
        # its own record may not say RUNNING yet
        others = (other for other in self._queue.every_job() if other.id != job.id)
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

    def _bury_orphans(self) -> None:
        """Record the end of jobs that still count as running when a new runner starts: they lost their own runner."""
        for job in self._queue.every_job():
            if job.state == "RUNNING":
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if job.pid is not None and os.getsid(job.pid) == job.pid:
                        os.killpg(job.pid, signal.SIGKILL)
                with self._queue.locked():
                    self._queue.write_job(replace(job, state="NODE_FAIL", end_time=time.time()))


SCHEDULER = LocalScheduler


def _with_start(record: LocalJob, job: LocalJob) -> LocalJob:
    """Add the start of a job, which only the process that started it knows, to its record."""
    return replace(record, state="RUNNING", pid=job.pid, start_time=job.start_time, end_time=job.end_time)


class AuxiliaryJobs:
    """Runs the jobs outside the chain, one at a time, while its owner waits for the chain's jobs."""

    def __init__(self, queue: LocalQueue, on_event: Callable[[str], None]) -> None:
        self._queue = queue
        self._on_event = on_event
        self._running: tuple[LocalJob, subprocess.Popen[bytes]] | None = None
        self._next_look = 0.0

    @property
    def busy(self) -> bool:
        return self._running is not None

    def poll(self) -> None:
        """Start a pending job, end a job that is cancelled or over its limit, and record a job that has ended."""
        if self._running is None:
            if time.monotonic() < self._next_look:
                return
            self._next_look = time.monotonic() + AUXILIARY_POLL_SECONDS
            waiting = [job for job in self._queue.every_job() if job.auxiliary and job.state == "PENDING"]
            if waiting:
                self._running = self._queue.start_job(waiting[0])
                with contextlib.suppress(OSError), self._queue.locked():  # until then a reader sees it pending
                    self._queue.write_job(self._running[0])
                self._on_event(f"job {waiting[0].id} started ({waiting[0].name})")
            return
        job, process = self._running
        if process.poll() is not None:
            self._record(job, process, "COMPLETED" if process.returncode == 0 else "FAILED")
        elif time.time() >= (job.end_time or 0.0):
            self._stop(job, process, "TIMEOUT")
        elif self._queue.read_job(job.id).cancel_requested:
            self._stop(job, process, "CANCELLED")

    def end(self) -> None:
        """End the running job."""
        if self._running is not None:
            self._stop(*self._running, "CANCELLED")

    def _stop(self, job: LocalJob, process: subprocess.Popen[bytes], state: str) -> None:
        signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(AUXILIARY_KILL_WAIT)
        signal_group(process, signal.SIGKILL)
        process.wait()
        self._record(job, process, state)

    def _record(self, job: LocalJob, process: subprocess.Popen[bytes], state: str) -> None:
        self._running = None
        self._next_look = 0.0
        with self._queue.locked():
            ended = replace(job, state=state, exit_code=process.returncode, end_time=time.time())
            self._queue.write_job(ended)
        self._on_event(f"job {job.id} ended: {state} ({job.name})")


def print_event(text: str) -> None:
    """Print an event of the queue for a person."""
    with contextlib.suppress(OSError):  # the terminal may be closed, or a file on a full disk
        print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
