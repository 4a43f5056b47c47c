"""datatrove's local executor on processes that may die.

datatrove's own pool waits for ever when a worker is killed (out of memory, for example). This one notices:
the run ends with one error, and what other tasks have finished is kept. Workers leave at once when the
process that started them dies: each watches a pipe whose other end closes with it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.io import DataFolder
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.logging import setup_default_logger
from datatrove.utils.stats import PipelineStats
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from relayrun.errors import RelayrunError

OnTaskDone = Callable[[int, dict[str, int]], None]
"""Called in the starting process with the rank of a finished task and the totals of its statistics."""


class KillAwareExecutor(LocalPipelineExecutor):  # type: ignore[misc]  # datatrove is untyped
    """Runs datatrove tasks on `workers` processes, in this process if there is one worker.

    `logging_dir` gets datatrove's logs and statistics. Its completion markers are written and never read:
    they know the number of a task and not its input, so the caller decides what is still to do.
    """

    def __init__(self, pipeline: Sequence[PipelineStep], *, tasks: int, workers: int, logging_dir: str) -> None:
        # a DataFolder of our own, because datatrove would give `::` and `~` in the path a meaning
        folder = DataFolder(os.path.abspath(logging_dir), fs=LocalFileSystem())
        super().__init__(list(pipeline), tasks=tasks, workers=workers, logging_dir=folder, skip_completed=False)

    def run_ranks(self, ranks: Sequence[int], on_task_done: OnTaskDone) -> None:
        """Run the tasks of `ranks`. A task that fails does not stop the others; the first error is raised at the end.

        Raises RelayrunError if a worker was killed: then the tasks that still ran are lost, not those done.
        """
        workers = min(self.workers, len(ranks))
        errors = self._run_here(ranks, on_task_done) if workers <= 1 else self._run_pool(ranks, workers, on_task_done)
        if errors:
            in_order = [errors[rank] for rank in sorted(errors)]
            defects = [error for error in in_order if not isinstance(error, (RelayrunError, OSError))]
            first = (defects or in_order)[0]
            if len(errors) > 1 and isinstance(first, RelayrunError):
                note = f"{len(errors)} of {len(ranks)} tasks failed, this is the first error"
                first.hint = f"{first.hint}\n     {note}" if first.hint else note
            raise first

    def _run_here(self, ranks: Sequence[int], on_task_done: OnTaskDone) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        for rank in ranks:
            try:
                totals = _run_task(copy.deepcopy(self), rank)
            except Exception as error:
                errors[rank] = error
            else:
                on_task_done(rank, totals)
        return errors

    def _run_pool(self, ranks: Sequence[int], workers: int, on_task_done: OnTaskDone) -> dict[int, Exception]:
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of Arrow's threads
        lifeline, our_end = context.Pipe(duplex=False)
        errors: dict[int, Exception] = {}
        pool = concurrent.futures.ProcessPoolExecutor(
            workers, mp_context=context, initializer=_begin_worker, initargs=(lifeline,)
        )
        try:
            futures = {pool.submit(_run_task, self, rank): rank for rank in ranks}
            for future in concurrent.futures.as_completed(futures):
                try:
                    totals = future.result()
                except BrokenProcessPool:
                    raise RelayrunError(
                        "a tokenization worker was killed; most often the memory is used up",
                        where=self.logging_dir.path,
                        hint="run again: finished tasks are kept, and fewer workers need less memory",
                    ) from None
                except Exception as error:
                    errors[futures[future]] = error
                else:
                    on_task_done(futures[future], totals)
        except BaseException:
            our_end.close()  # workers that still run (Ctrl-C, a killed sibling) leave now
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            our_end.close()
            lifeline.close()
        return errors


def _run_task(executor: KillAwareExecutor, rank: int) -> dict[str, int]:
    """Run one task; return the totals of its statistics by name. datatrove's log goes to its file alone."""
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            stats: PipelineStats = executor._run_for_rank(rank)
    finally:
        setup_default_logger()
    return {name: int(metric.total) for step in stats.stats for name, metric in step.stats.items()}


def _begin_worker(lifeline: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then lets go of the lifeline
    threading.Thread(target=_leave_with_parent, args=(lifeline,), daemon=True).start()


def _leave_with_parent(lifeline: Any) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)
