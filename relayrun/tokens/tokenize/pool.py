"""Tasks on processes that may die.

Python's `multiprocessing` pool, and datatrove's, wait for ever when a worker is killed (out of memory, for
example). This one notices: the run ends with one error, and what other tasks have finished is kept. Workers
leave at once when the process that started them dies: each watches a pipe whose other end closes with it.

Workers are forks of this process, and so share its tokenizer, where it has one thread (see `one_thread`): locks
of other threads would stay locked in a fork for ever. Else they are spawned.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import TypeVar

from relayrun.errors import RelayrunError, combined_error, split_error

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
    """Keep libraries from starting threads in this process and its workers; to be called before they are imported."""
    os.environ.update(ONE_THREAD_ENVIRONMENT)


def run_tasks(
    task: Callable[[K], T], items: Sequence[K], workers: int, on_done: Callable[[K, T], None], *, where: object
) -> None:
    """Call `task` for every item on `workers` processes (here if there is one); `on_done` gets each result here.

    A task that fails does not stop the others. At the end a defect is raised, or else the errors of all tasks as one,
    in the order of `items`. `task` is pickled once per item. Raises RelayrunError, naming `where`, if a worker was
    killed: then the tasks that still ran are lost, not those done.
    """
    workers = min(workers, len(items))
    errors = (_run_here if workers <= 1 else _run_on_processes)(task, items, workers, on_done, where)
    if errors:
        in_order = [errors[item] for item in items if item in errors]
        defects = [error for error in in_order if not isinstance(error, (RelayrunError, OSError))]
        if known := [error for each in in_order if isinstance(each, RelayrunError) for error in split_error(each)]:
            raise (defects or [combined_error(known, "files or tasks failed")])[0]
        raise (defects or in_order)[0]


def _run_here(
    task: Callable[[K], T], items: Sequence[K], workers: int, on_done: Callable[[K, T], None], where: object
) -> dict[K, Exception]:
    errors: dict[K, Exception] = {}
    for item in items:
        try:
            result = task(item)
        except Exception as error:
            errors[item] = error
        else:
            on_done(item, result)
    return errors


def _run_on_processes(
    task: Callable[[K], T], items: Sequence[K], workers: int, on_done: Callable[[K, T], None], where: object
) -> dict[K, Exception]:
    forked = len(os.listdir("/proc/self/task")) == 1
    context: BaseContext = multiprocessing.get_context("fork" if forked else "spawn")
    lifeline, our_end = context.Pipe(duplex=False)
    errors: dict[K, Exception] = {}
    for stream in (sys.stdout, sys.stderr):  # or a fork would print what waits there once more
        stream.flush()
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, initializer=_initialize_worker, initargs=(lifeline, our_end if forked else None)
    )
    try:
        futures = {pool.submit(task, item): item for item in items}
        for future in concurrent.futures.as_completed(futures):
            try:
                result = future.result()
            except BrokenProcessPool:
                raise RelayrunError(
                    "a tokenization worker was killed; most often the memory is used up",
                    where=where,
                    hint="run again: finished tasks are kept, and fewer workers need less memory",
                ) from None
            except Exception as error:
                errors[futures[future]] = error
            else:
                on_done(futures[future], result)
    except BaseException:
        our_end.close()  # workers that still run (Ctrl-C, a killed sibling) leave now
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        our_end.close()
        lifeline.close()
    return errors


def _initialize_worker(lifeline: Connection, other_end: Connection | None) -> None:
    if other_end is not None:
        other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then lets go of the lifeline
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    threading.Thread(target=_leave_with_parent, args=(lifeline,), daemon=True).start()


def _leave_with_parent(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)
