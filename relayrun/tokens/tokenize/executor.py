"""The local executor of datatrove on a pool that notices a killed worker, for pipelines of your own."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Sequence

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.io import DataFolder
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.logging import setup_default_logger
from datatrove.utils.stats import PipelineStats
from fsspec.implementations.local import LocalFileSystem

from relayrun.tokens.tokenize.pool import run_tasks

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

    def run_ranks(self, ranks: Sequence[int], on_task_done: OnTaskDone = lambda rank, totals: None) -> None:
        """Run the tasks of `ranks`, see `run_tasks`."""
        run_tasks(functools.partial(_run_task, self), ranks, self.workers, on_task_done, where=self.logging_dir.path)


def _run_task(executor: KillAwareExecutor, rank: int) -> dict[str, int]:
    """Run one task; return the totals of its statistics by name. datatrove's log goes to its file alone."""
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            stats: PipelineStats = copy.deepcopy(executor)._run_for_rank(rank)
    finally:
        setup_default_logger()
    return {name: int(metric.total) for step in stats.stats for name, metric in step.stats.items()}
