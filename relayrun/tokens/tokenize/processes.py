"""Processes of a tokenization: a pool that survives killed workers, file locks, and the time limit of a Slurm job.

Python's `multiprocessing` pool, and datatrove's, wait for ever when a worker is killed (out of memory, for example).
This pool ends the run with one error and keeps the results of finished tasks. Workers leave at once when their parent
dies: each watches a pipe whose other end closes with it. Workers are forks of a process with one thread (see
`use_one_thread`), and share its tokenizer; with several threads they are spawned, since locks of other threads stay
locked in a fork for ever. So this module imports neither numpy nor Arrow.

A file lock is `flock` on a file that is never replaced: the kernel releases it when the holder dies.

A job leaves before its time limit and is requeued under the same id. The deadline is inside the process, because Slurm
signals only the steps of a job or its batch shell, and submitit's jobs have neither; `--signal=B:USR2@...` of the Bash
launcher comes on top. Open shards are dropped: the next start makes them again. Two starts in a row that finish no
shard end the job: its shards do not fit into its time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from types import FrameType
from typing import TypeVar

from relayrun.control.scheduler.factory import slurm_scheduler
from relayrun.errors import RelayrunError, SchedulerError, combined_error, split_combined_error
from relayrun.masking import describe_secret

EXIT_MARGIN_SECONDS = 120.0
"""Time between the stop and the limit; a tenth of the time left at the start, if that is less."""


class _TimeIsUp(BaseException):
    """Not an Exception: tasks must not catch it as their own failure."""


def slurm_job_id() -> str | None:
    """Return the id of the Slurm job of this process; None outside Slurm. An array element is ARRAY_TASK (`12_3`): the
    plain id of its last element is that of the whole array, and requeueing that id would end all the others."""
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array else os.environ.get("SLURM_JOB_ID")


class JobRequeued(RelayrunError):
    """The time limit is near and the job is requeued; not a failure."""


@contextlib.contextmanager
def requeue_before_time_limit(progress: Callable[[], int]) -> Iterator[None]:
    """In a Slurm job, stop the work and requeue the job at SIGUSR2 or shortly before the time limit. `progress` counts
    the finished shards. Raises RelayrunError at the limit. Does nothing outside Slurm. Main thread only."""
    job = slurm_job_id()
    if job is None:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # once: the exit must not be interrupted
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise _TimeIsUp

    before, began = progress(), time.time()
    left = _job_end_time(job) - began
    former, former_alarm = signal.getsignal(signal.SIGUSR2), signal.getsignal(signal.SIGALRM)
    try:
        signal.signal(signal.SIGUSR2, stop)
        signal.signal(signal.SIGALRM, stop)
        if 0 < left < threading.TIMEOUT_MAX:  # a kernel timer: with a timer thread, workers could not be forks
            signal.setitimer(signal.ITIMER_REAL, left - min(EXIT_MARGIN_SECONDS, left / 10))
        yield
    except _TimeIsUp:
        whole = time.time() - began > left / 2  # else the signal came early, perhaps for a preemption
        if whole and progress() == before and int(os.environ.get("SLURM_RESTART_COUNT") or 0):
            words = "no shard was finished before the time limit, for the second time"
            hint = "give the jobs more time, or more tasks (smaller shards)"
            raise RelayrunError(words, where=f"Slurm job {job}", hint=hint) from None
        slurm_scheduler().requeue(job)  # tokenize.sh asks for --no-requeue, so that nothing else starts it again
        raise JobRequeued(
            "the time limit is near; the job is queued again and goes on with what is missing", where=f"Slurm job {job}"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former_alarm)
        signal.signal(signal.SIGUSR2, former)


def _job_end_time(job: str) -> float:
    """Return the end of the time limit, in seconds since 1970. Slurm 22.05 does not export it."""
    if given := os.environ.get("SLURM_JOB_END_TIME"):
        return float(given)
    with contextlib.suppress(SchedulerError):
        found = slurm_scheduler(patience=60).query(job)
        if found is not None and found.end_time is not None:
            return found.end_time
    return float("inf")


_held_locks: set[int] = set()


def _close_locks_in_child() -> None:
    for fd in _held_locks:
        os.close(fd)
    _held_locks.clear()


# a worker may outlive its parent by a moment, and must not keep the lock
os.register_at_fork(after_in_child=_close_locks_in_child)

_NO_LOCKS_HERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextlib.contextmanager
def file_lock(path: str | os.PathLike[str], *, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Hold the lock on `path` (made if missing), exclusively or with other `shared` holders.

    Yields False if `wait` is False and another process holds the lock. On a file system without locks (some Lustre
    mounts) it yields True: our appends are single writes, and the other guards (job ids, records) still protect the
    files.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _held_locks.add(fd)
    try:
        held = True
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            held = False
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
        yield held
    finally:
        _held_locks.discard(fd)
        os.close(fd)


ONE_THREAD_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment that keeps numpy, Arrow and the tokenizers from starting threads: the workers share the cores already."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def use_one_thread() -> None:
    """Keep libraries from starting threads in this process and its workers; call before importing them."""
    os.environ.update(ONE_THREAD_ENVIRONMENT)


@contextlib.contextmanager
def hidden_secrets() -> Iterator[None]:
    """Keep secrets out of the environment of this process and its workers; Slurm's own stay, for a requeue. A value is
    also blanked where it lies: `/proc/PID/environ` of a worker shows the memory of the start."""
    others = [pair for pair in os.environ.items() if not pair[0].startswith("SLURM_")]
    secrets = {name: value for name, value in others if describe_secret(value, variable=name)}
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    for name, value in secrets.items():
        if place := getenv(os.fsencode(name)):
            ctypes.memset(place, 0, len(os.fsencode(value)))
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(secrets)


def run_tasks(
    task: Callable[[K], T], items: Sequence[K], workers: int, on_done: Callable[[K, T], None], *, where: object
) -> None:
    """Call `task` for every item on `workers` processes (here for one worker, not for one item: what a task starts and
    holds would stay in this process); `on_done` gets each result here.

    A failing task does not stop the others. At the end a defect is raised, or else the errors of all tasks as one, in
    the order of `items`. `task` is pickled once per item. Raises RelayrunError, naming `where`, if a worker was killed:
    running tasks are lost, finished ones are kept.
    """
    errors: dict[K, Exception] = {}
    outcomes: Generator[tuple[K, Callable[[], T]], None, None]
    if workers <= 1 or not items:
        outcomes = ((item, functools.partial(task, item)) for item in items)
    else:
        outcomes = _on_processes(task, items, min(workers, len(items)))
    with contextlib.closing(outcomes):
        for item, outcome in outcomes:
            try:
                result = outcome()
            except BrokenProcessPool:
                words = "a tokenization worker was killed; most often the memory is used up"
                hint = "run again: finished tasks are kept, and fewer workers need less memory"
                raise RelayrunError(words, where=where, hint=hint) from None
            except Exception as error:
                errors[item] = error
            else:
                on_done(item, result)
    if errors:
        in_order = [errors[item] for item in items if item in errors]
        defects = [error for error in in_order if not isinstance(error, (RelayrunError, OSError))]
        if known := [
            error for each in in_order if isinstance(each, RelayrunError) for error in split_combined_error(each)
        ]:
            raise (defects or [combined_error(known, "files or tasks failed")])[0]
        raise (defects or in_order)[0]


def _on_processes(
    task: Callable[[K], T], items: Sequence[K], workers: int
) -> Generator[tuple[K, Callable[[], T]], None, None]:
    """Yield each item with a function that returns its result, as the items are done."""
    forked = _has_one_thread()
    context: BaseContext = multiprocessing.get_context("fork" if forked else "spawn")
    lifeline, our_end = context.Pipe(duplex=False)
    for stream in (sys.stdout, sys.stderr):  # else a fork would print the buffers again
        stream.flush()
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, initializer=_initialize_worker, initargs=(lifeline, our_end if forked else None)
    )
    try:
        futures = {pool.submit(task, item): item for item in items}
        yield from ((futures[each], each.result) for each in concurrent.futures.as_completed(futures))
    except BaseException:
        our_end.close()  # workers that still run (Ctrl-C, a killed sibling) leave now
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        our_end.close()
        lifeline.close()


def _has_one_thread() -> bool:
    """Return whether this process can be forked. Threads of OpenBLAS, which numpy starts, end before a fork, and those
    of a closed pool end a moment later than they are joined."""
    with warnings.catch_warnings(action="ignore"):  # Python 3.12 warns of a fork beside threads
        if (child := os.fork()) == 0:
            os._exit(0)
    os.waitpid(child, 0)
    for _ in range(20):
        if len(os.listdir("/proc/self/task")) == 1:
            return True
        time.sleep(0.005)
    return False


def _initialize_worker(lifeline: Connection, other_end: Connection | None) -> None:
    if other_end is not None:
        other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then closes the lifeline
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    threading.Thread(target=_leave_with_parent, args=(lifeline,), daemon=True).start()


def _leave_with_parent(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)
