"""The queue of the local scheduler: a folder of the run directory with one JSON file per job."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from relayrun.control.rundir.records import Record
from relayrun.control.scheduler.base import clean_environment
from relayrun.errors import SchedulerError
from relayrun.files import names_in, writable_by_owner_alone
from relayrun.leftovers import is_locked, open_lock

JOB_ID_VARIABLE = "RELAYRUN_LOCAL_JOB_ID"


@dataclass(frozen=True, kw_only=True)
class LocalJob(Record):
    """One job of the queue; states have Slurm's names. Times are seconds since 1970."""

    id: str
    name: str
    script: str
    log_folder: str
    time_limit: int
    signal_seconds: int
    eligible_time: float
    """The job does not start before this time (`--begin`)."""
    submit_time: float | None = None
    state: str = "PENDING"
    pid: int | None = None
    start_time: float | None = None
    end_time: float | None = None
    """Time at which the limit is reached; for a job that has ended, its end."""
    exit_code: int | None = None
    cancel_requested: bool = False
    arguments: list[str] = field(default_factory=list)
    auxiliary: bool = False
    """The job is outside the chain: it runs beside the chain's jobs with the lowest priority."""
    guarded: bool = False
    """Requeue the job if its batch script is killed."""
    requeue_delay: int | None = None
    """Set by `requeue`: seconds after its end at which the job is queued again."""
    failed_begins: int = 0


class LocalQueue:
    """The jobs of one run directory. A writer holds `locked`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, job: LocalJob) -> str:
        """Queue a job under the next number, which becomes its id; return the id."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.locked():
            number = max((int(job.id) for job in self.every_job()), default=0) + 1
            job = replace(job, id=str(number), submit_time=time.time())
            self.write_job(job)
        return job.id

    def start_job(self, job: LocalJob) -> tuple[LocalJob, subprocess.Popen[bytes]]:
        """Start a job's script in a session of its own; it dies with this process. The caller records the job."""
        from relayrun.control.scheduler.local_srun import die_with_parent  # readers of the queue do not need it

        def prepare() -> None:
            # as Slurm does: blocked and ignored signals of the submitter would be inherited
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_DFL)
            die_with_parent(signal.SIGTERM)
            if job.auxiliary:
                os.nice(19)

        with _open_job_log(job, "out") as out, _open_job_log(job, "err") as err:
            started = time.time()
            process = subprocess.Popen(
                ["bash", job.script, *job.arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=clean_environment(os.environ) | {JOB_ID_VARIABLE: job.id},
                start_new_session=True,
                preexec_fn=prepare,
            )
        end_time = started + job.time_limit
        return replace(job, state="RUNNING", pid=process.pid, start_time=started, end_time=end_time), process

    def is_being_run(self) -> bool:
        """Return whether a process runs the queue now."""
        return is_locked(f"{self.folder}/runner.lock")

    def path(self, job_id: str) -> Path:
        return self.folder / f"job-{int(job_id):04}.json"

    def read_job(self, job_id: str) -> LocalJob:
        """Return the job. Raises SchedulerError if it does not exist."""
        return self._read(self.path(job_id))

    def _read(self, path: Path | str) -> LocalJob:
        job = LocalJob.read(path)
        if job is None:
            number = os.path.basename(path).removeprefix("job-").removesuffix(".json").lstrip("0")
            raise SchedulerError(f"there is no local job {number}", where=self.folder)
        return job

    def write_job(self, job: LocalJob) -> None:
        """Write the record of a job. The caller holds `locked`."""
        with writable_by_owner_alone():  # what it names is started
            job.write(self.path(job.id))

    def change(self, job_id: str, **changes: Any) -> None:
        """Change fields of a job's record under the lock."""
        with self.locked():
            self.write_job(replace(self.read_job(job_id), **changes))

    def every_job(self) -> list[LocalJob]:
        """Return all jobs in the order in which they were queued."""
        jobs = [name for name in names_in(self.folder) if name.startswith("job-") and name.endswith(".json")]
        return [self._read(f"{self.folder}/{name}") for name in jobs]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the queue for a change."""
        with open(open_lock(self.folder / "queue.lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _open_job_log(job: LocalJob, suffix: str) -> BinaryIO:
    """Open a job's log to append to, or /dev/null if that fails: a job of a chain then opens its own log elsewhere."""
    try:
        Path(job.log_folder).mkdir(parents=True, exist_ok=True)
        return open(Path(job.log_folder) / f"{job.name}-{job.id}.{suffix}", "ab")
    except OSError:
        return open(os.devnull, "ab")


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal the batch script and all processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
